"""Buckets of S3, and of services with its protocol: one request for each object.

Uses boto3, which supports all ways of getting a machine's credentials, in threads, because it blocks. It is in the
extra `s3`; without it, importing this module raises `ConfigError`. Its own retries are off, because the pipeline
retries. Rejected alternatives: asynchronous clients, which need asyncio, and our own signatures, which are simple for
keys but complex for roles and sessions that expire.
"""

from __future__ import annotations

import contextlib
import fnmatch
import io
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from typing import Any, Final, TypeVar

import attrs
import trio

from dataloader.flows.etl.declare import option_checks
from dataloader.flows.etl.formats.content import GIB, Format
from dataloader.flows.etl.sources import retry_after
from dataloader.flows.etl.sources.file_windows import WindowOf, check_window_of, is_wanted, own_window
from dataloader.flows.etl.sources.files import page_of_file
from dataloader.flows.etl.sources.source import (
    AskForList,
    Page,
    Request,
    Response,
    Source,
    SourceError,
    Window,
    ask_at_once,
)
from dataloader.jobs.errors import ConfigError
from dataloader.jobs.secrets.known_secrets import KnownSecrets
from dataloader.jobs.secrets.masking import names_a_secret

try:
    import boto3  # type: ignore[import-untyped]
    import botocore.config  # type: ignore[import-untyped]
    import botocore.exceptions  # type: ignore[import-untyped]
except ImportError as error:
    raise ConfigError("S3 needs the extra s3: pip install 'dataloader-supervisor[s3]'") from error

T = TypeVar("T")

THREADS: Final = 4
CONNECT_S: Final = 10.0
READ_S: Final = 30.0
"""Seconds of silence after which a connection is closed. `fetch` limits the time for a whole object."""
_PIECE: Final = 256 * 1024
_PASSING: Final = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})
_PASSING_CODES: Final = frozenset({"RequestTimeout", "SlowDown", "Throttling", "InternalError"})
_OF_THE_NETWORK: Final = (
    botocore.exceptions.ConnectionError,
    botocore.exceptions.HTTPClientError,
    botocore.exceptions.IncompleteReadError,
    botocore.exceptions.ChecksumError,
    botocore.exceptions.CredentialRetrievalError,
)


@attrs.frozen
class S3(Source):
    """Objects of a bucket whose names begin with a prefix, in the order of their names.

    Args:
        bucket: name of the bucket.
        prefix: beginning of the objects' names; empty for all.
        format: format of the objects.
        pattern: pattern with `*` and `?` for the whole name of the objects to read.
        window_of: window of an object, by its name; None reads all objects in each run. See `WindowOf`.
        record_source: adds `source_file`, the object's name, to each record.
        name: name of the supplier, for objects and for the pages of the bucket's list; None for no rate limit.
        max_body_bytes: maximum bytes of an object; more are an error.
        options: options of boto3's client, such as endpoint_url, region_name, aws_access_key_id. By default boto3 finds
            them in the environment, files, or the machine's role.
    """

    bucket: str = attrs.field(validator=option_checks.nonempty_text)
    prefix: str = ""
    format: Format = attrs.field(kw_only=True)
    pattern: str = attrs.field(default="*", kw_only=True, validator=option_checks.nonempty_text)
    window_of: WindowOf | None = attrs.field(default=None, kw_only=True, validator=check_window_of)
    record_source: bool = attrs.field(default=True, kw_only=True)
    name: str | None = attrs.field(default=None, kw_only=True, validator=option_checks.text_or_none)
    max_body_bytes: int = attrs.field(default=GIB // 4, kw_only=True, validator=option_checks.whole_from(1))
    options: Mapping[str, Any] = attrs.field(factory=dict, kw_only=True, repr=False)

    @property
    def walks_are_segments(self) -> bool:
        """Return True: each object is committed separately."""
        return True

    @asynccontextmanager
    async def open(self) -> AsyncIterator[S3Connection]:
        """Open a client, for the duration of a block."""
        connection = await self._connect()
        try:
            yield connection
        finally:
            connection.client.close()

    def requests(self, window: Window) -> AsyncGenerator[Request, None]:
        """Yield one request for each object of the window. Raises `SourceError` if the bucket cannot be listed."""
        return self.listed(window, ask_at_once)

    async def listed(self, window: Window, ask: AskForList) -> AsyncGenerator[Request, None]:
        """Yield requests as `requests` does. Each page of the bucket's list (1,000 names) is a request of the run."""
        connection = await self._connect()
        try:
            following: str | None = ""
            while following is not None:
                names, following = await ask(
                    self, f"s3://{self.bucket}/{self.prefix}", partial(connection.names, following)
                )
                for name in names:
                    if is_wanted(name, self.window_of, window):
                        yield Request(endpoint=name)
        finally:
            connection.client.close()

    async def _connect(self) -> S3Connection:
        threads = trio.CapacityLimiter(THREADS)
        client = await trio.to_thread.run_sync(_s3_client, self.options, limiter=threads)
        return S3Connection(self, client, threads)

    def window(self, request: Request) -> Window | None:
        """Return the object's own window, by its name."""
        return own_window(request.endpoint, self.window_of)

    def hide(self, text: str) -> str:
        """Return a text without the secrets among the options."""
        secrets = [value for name, value in self.options.items() if isinstance(value, str) and names_a_secret(name)]
        return KnownSecrets.of(secrets).hide(text)

    def for_reading(self) -> S3:
        """Return the source without the function for objects' windows and without the client's options."""
        return attrs.evolve(self, window_of=None, options={})

    def read(self, response: Response) -> Page:
        """Return the records of an object. Raises `SourceError`."""
        return page_of_file(self.format, response, response.request.endpoint if self.record_source else None)


@attrs.frozen
class S3Connection:
    """Open client. Several threads may use it concurrently."""

    source: S3
    client: Any
    threads: trio.CapacityLimiter

    async def fetch(self, request: Request, *, timeout_s: float) -> Response:
        """Read an object.

        Raises `SourceError` if it is missing, may not be read, or has too many bytes. Retryable errors: it is not read
        within `timeout_s`, or the service or the network is busy or fails.
        """
        began_at = trio.current_time()
        what = f"s3://{self.source.bucket}/{request.endpoint}"
        body = await self._in_thread(what, timeout_s, self._read, request.endpoint, time.monotonic() + timeout_s)
        took_s = trio.current_time() - began_at
        return Response(request=request, url=what, status=HTTPStatus.OK, headers={}, body=body, took_s=took_s)

    async def names(self, following: str, timeout_s: float) -> tuple[list[str], str | None]:
        """Return a page of the matching names, and the token for the next page, None at the end.

        Raises `SourceError` as `fetch` does.
        """
        what = f"s3://{self.source.bucket}/{self.source.prefix}"
        return await self._in_thread(what, timeout_s, self._list, following)

    async def _in_thread(self, what: str, timeout_s: float, function: Callable[..., T], *args: Any) -> T:
        try:
            with trio.move_on_after(timeout_s):
                return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True, limiter=self.threads)
        except botocore.exceptions.ClientError as error:
            raise self._refused(what, error) from error
        except botocore.exceptions.BotoCoreError as error:
            text = self.source.hide(f"{what}: {type(error).__name__}: {error}")
            raise SourceError(text, is_retryable=_is_retryable(error)) from error
        raise SourceError(f"{what}: no complete answer within {timeout_s:g} s", is_retryable=True)

    def _list(self, following: str) -> tuple[list[str], str | None]:
        place = {"ContinuationToken": following} if following else {}
        page = self.client.list_objects_v2(Bucket=self.source.bucket, Prefix=self.source.prefix, **place)
        # Names that end in a slash are folders that consoles create. They are empty objects.
        names = [entry["Key"] for entry in page.get("Contents", ()) if not entry["Key"].endswith("/")]
        return fnmatch.filter(names, self.source.pattern), page.get("NextContinuationToken")

    def _read(self, name: str, until: float) -> bytes:
        answer = self.client.get_object(Bucket=self.source.bucket, Key=name)
        whole, limit = io.BytesIO(), self.source.max_body_bytes
        with contextlib.closing(answer["Body"]) as body:
            while piece := body.read(_PIECE):
                whole.write(piece)
                if whole.tell() > limit:
                    text = f"s3://{self.source.bucket}/{name}: has more than the limit of {limit:,} bytes"
                    raise SourceError(text, is_retryable=False)
                if time.monotonic() > until:
                    # Nothing waits for this thread any more, so it must not continue forever.
                    raise SourceError(f"s3://{self.source.bucket}/{name}: not read in time", is_retryable=True)
        return whole.getvalue()

    def _refused(self, what: str, error: Any) -> SourceError:
        about = error.response.get("ResponseMetadata", {})
        status = about.get("HTTPStatusCode")
        reason = error.response.get("Error", {})
        headers = {name.lower(): str(value) for name, value in about.get("HTTPHeaders", {}).items()}
        is_busy = status is None or status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _PASSING
        return SourceError(
            self.source.hide(f"{what}: {reason.get('Message', '')} ({reason.get('Code', '')})"),
            is_retryable=is_busy or reason.get("Code") in _PASSING_CODES,
            retry_after_s=retry_after.retry_after_s(headers, now=datetime.now(UTC)),
            status=status,
        )


def _is_retryable(error: botocore.exceptions.BotoCoreError) -> bool:
    """Return whether this is an error of the network, or of the service that provides credentials."""
    return isinstance(error, _OF_THE_NETWORK)


def _s3_client(options: Mapping[str, Any]) -> Any:
    """Return a client without its own retries. Takes a tenth of a second, to read the protocol's description."""
    retries = {"total_max_attempts": 1, "mode": "standard"}
    config = botocore.config.Config(connect_timeout=CONNECT_S, read_timeout=READ_S, retries=retries)
    # A separate session: several threads must not use boto3's default one.
    return boto3.session.Session().client("s3", **{"config": config, **options})
