"""Files as a source, on a local or network disk: one request for each file, or for each member of an archive.

Each access to the disk is in a thread, because a network disk can hang. A thread that hangs longer than its deadline is
abandoned. Each source has separate threads, limited for the whole process: later runs on a hung disk get an error, and
other sources are not affected. A file that changes while it is read is an error, because a part may be missing. No
pauses are needed between files, so the source has no supplier's name.
"""

from __future__ import annotations

import glob
import io
import itertools
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import attrs
import trio

from dataloader.flows.etl.declare import option_checks
from dataloader.flows.etl.formats.content import GIB, Format
from dataloader.flows.etl.sources.archives import Archive, list_members, warn_of_old_python
from dataloader.flows.etl.sources.file_windows import WindowOf, check_window_of, is_wanted, own_window
from dataloader.flows.etl.sources.links import is_inside, open_inside
from dataloader.flows.etl.sources.source import Page, Record, Request, Response, Source, SourceError, Window
from dataloader.jobs.logger import get_logger

log = get_logger(__name__)

T = TypeVar("T")

THREADS: Final = 4
"""Maximum threads of one source in a process, including those that hang."""
SOURCE_FILE: Final = "source_file"
"""Field that `record_source` adds."""
LISTING_S: Final = 600.0
"""Seconds to list files, or the members of an archive, which may have to be unpacked."""
MAX_SETTLED_S: Final = 3_600.0

_threads: Final = trio.lowlevel.RunVar[dict[tuple[str, ...], trio.CapacityLimiter]]("threads of files")

Looks = dict[Path, tuple[int, int, int, int]]
"""Files with the values by which a change is noticed: device, inode, size and modification time."""


def _as_patterns(value: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    several = [value] if isinstance(value, (str, Path)) else value
    return tuple(os.path.expanduser(path) for path in several)  # noqa: PTH111 - a pattern is not a path


def _check_patterns(_instance: Any, attribute: attrs.Attribute[Any], value: tuple[str, ...]) -> None:
    if not value or not all(value):
        raise option_checks.refuse(
            attribute.name, list(value), "a path, a pattern such as /data/*.csv, or a list of them"
        )


def _check_settled(_instance: Any, attribute: attrs.Attribute[Any], value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_SETTLED_S:
        raise option_checks.refuse(attribute.name, value, f"a number of seconds from 0 to {MAX_SETTLED_S:,.0f}")


@attrs.frozen
class Files(Source):
    """Files, in the order of their paths.

    Args:
        paths: a path, a pattern with `*`, `?`, `[…]` and `**` (folders of any depth), or a list of them.
        format: format of the files.
        members: reads each file as an archive (tar, also compressed by gzip or xz, or zip), and each member that
            matches this pattern as a file.
        window_of: window of a file or a member, by its name; None reads all files in each run. See `WindowOf`.
        settled_s: reads only files whose size and time have not changed for this many seconds, for which a run checks
            twice. A file that changes in the meantime is left to the next run. It is an error if its path is given
            without a pattern.
        record_source: adds `source_file` to each record: the file's name or the member's path.
        follow_links: also reads files that a pattern finds by links that lead out of the folder before its first star.
            A path without a pattern may always be a link.
        max_body_bytes: maximum bytes of a file or member; more are an error.
        max_unpacked_bytes: maximum bytes of all members of an archive together; more are an error.
    """

    paths: tuple[str, ...] = attrs.field(converter=_as_patterns, validator=_check_patterns)
    format: Format = attrs.field(kw_only=True)
    members: str | None = attrs.field(default=None, kw_only=True, validator=option_checks.text_or_none)
    window_of: WindowOf | None = attrs.field(default=None, kw_only=True, validator=check_window_of)
    settled_s: float = attrs.field(default=0.0, kw_only=True, validator=_check_settled)
    record_source: bool = attrs.field(default=True, kw_only=True)
    follow_links: bool = attrs.field(default=False, kw_only=True)
    max_body_bytes: int = attrs.field(default=GIB // 4, kw_only=True, validator=option_checks.whole_from(1))
    max_unpacked_bytes: int = attrs.field(default=GIB, kw_only=True, validator=option_checks.whole_from(1))

    @property
    def walks_are_segments(self) -> bool:
        """Return True: each file or member is committed separately."""
        return True

    @asynccontextmanager
    async def open(self) -> AsyncIterator[FilesConnection]:
        """Open a connection for the duration of a block. It keeps an archive open between its members."""
        if self.members is not None:
            warn_of_old_python()
        connection = FilesConnection(self)
        try:
            yield connection
        finally:
            connection.close()

    async def requests(self, window: Window) -> AsyncGenerator[Request, None]:
        """Yield one request for each file or member of the window.

        Raises `SourceError` if a file that is given by its path is missing or still changes, if the folder before a
        pattern's first star is missing, if the disk does not answer in time, or if an archive cannot be read.
        """
        for path in await self._settled():
            if self.members is None:
                if is_wanted(path.name, self.window_of, window):
                    yield Request(endpoint=str(path))
                continue
            for member in await self._listed(
                list_members, path, self.members, self.max_unpacked_bytes, self.folders_of(path)
            ):
                if is_wanted(member, self.window_of, window):
                    yield Request(endpoint=str(path), key=member)

    async def _settled(self) -> list[Path]:
        """Return the existing files that do not change."""
        if not self.settled_s:
            return await self._listed(_list_files, self.paths, self.follow_links)
        before: Looks = await self._listed(_look_at, self.paths, self.follow_links)
        if not before:
            return []
        # Use this machine's clock: the disk server's clock may differ, and copied files keep their old times.
        await trio.sleep(self.settled_s)
        now: Looks = await self._listed(_look_at, self.paths, self.follow_links)
        changing = [path for path in now if before.get(path) != now[path]]
        for path in changing:
            if str(path) in self.paths:
                raise SourceError(
                    f"{path}: was changed within the last {self.settled_s:g} s (settled_s)", is_retryable=True
                )
        if changing:
            log.info("leaving changing files to the next run", files=len(changing), first=str(changing[0]))
        return [path for path in now if path not in changing]

    def folders_of(self, path: Path) -> Sequence[Path] | None:
        """Return the folders in one of which a file must be; None if it may be anywhere."""
        if self.follow_links or str(path) in self.paths:
            return None
        return [_folder_of(pattern) for pattern in self.paths if glob.has_magic(pattern)]

    async def _listed(self, function: Callable[..., T], *args: Any) -> T:
        with trio.move_on_after(LISTING_S):
            return await _in_thread(threads_of(self), function, *args)
        raise SourceError(f"{args[0]}: not listed within {LISTING_S:g} s{_hung(self)}", is_retryable=True)

    def window(self, request: Request) -> Window | None:
        """Return the own window of the file or member, by its name."""
        return own_window(request.key or Path(request.endpoint).name, self.window_of)

    def for_reading(self) -> Files:
        """Return the source without the function for files' windows."""
        return attrs.evolve(self, window_of=None)

    def read(self, response: Response) -> Page:
        """Return the records of a file. Raises `SourceError`."""
        name = response.request.key or Path(response.request.endpoint).name
        return page_of_file(self.format, response, name if self.record_source else None)


@attrs.define
class FilesConnection:
    """Reads files. Keeps the last archive open at its current position."""

    source: Files
    _turn: trio.Lock = attrs.field(factory=trio.Lock)
    _archive: Archive | None = None
    _archive_path: str = ""

    async def fetch(self, request: Request, *, timeout_s: float) -> Response:
        """Read a file, or a member of an archive.

        Raises `SourceError` if it cannot be read, is not read within `timeout_s` or changes in the meantime (all
        retryable), or has too many bytes.
        """
        began_at = trio.current_time()
        with trio.move_on_after(timeout_s):
            body = await (self._read_member(request) if request.key else self._read_file(request))
            url = f"{request.endpoint}!{request.key}" if request.key else request.endpoint
            took_s = trio.current_time() - began_at
            return Response(request=request, url=url, status=200, headers={}, body=body, took_s=took_s)
        raise SourceError(f"{request.endpoint}: not read within {timeout_s:g} s{_hung(self.source)}", is_retryable=True)

    def close(self) -> None:
        """Close the open archive, if any."""
        if self._archive is not None:
            self._archive.close()
        self._archive = None

    async def _read_file(self, request: Request) -> bytes:
        path = Path(request.endpoint)
        folders = self.source.folders_of(path)
        return await _in_thread(threads_of(self.source), _read_settled, path, self.source.max_body_bytes, folders)

    async def _read_member(self, request: Request) -> bytes:
        async with self._turn:
            if self._archive is None or self._archive_path != request.endpoint:
                self.close()
            path, most = Path(request.endpoint), self.source.max_unpacked_bytes
            archive = self._archive or Archive(path, max_bytes=most, folders=self.source.folders_of(path))
            # An abandoned thread keeps its archive. An archive is reused only after its thread has returned.
            self._archive = None
            limit = self.source.max_body_bytes
            body = await _in_thread(threads_of(self.source), _read_member, archive, request.key, limit)
            self._archive, self._archive_path = archive, request.endpoint
            return body


def page_of_file(form: Format, response: Response, file: str | None) -> Page:
    """Return the records of a whole file, each with the file's name if given. Raises `SourceError`."""
    content = form.parse(io.BytesIO(response.body), None)
    records = content.all()
    return Page(records=records if file is None else _with_source(records, file), broken=content.broken)


def _with_source(records: Iterable[Record], file: str) -> Iterator[Record]:
    for record in records:
        # The record was just made and has no other user, so it may be changed.
        cast("dict[str, Any]", record)[SOURCE_FILE] = file
        yield record


async def _in_thread(threads: trio.CapacityLimiter, function: Callable[..., T], *args: Any) -> T:
    """Call a function in a thread. On cancellation the thread is abandoned. Hung threads may exhaust this limiter."""
    return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True, limiter=threads)


def threads_of(source: Files) -> trio.CapacityLimiter:
    """Return the limiter of the source's threads, one for each list of paths in a process."""
    limiters = _threads.get({})
    _threads.set(limiters)
    return limiters.setdefault(source.paths, trio.CapacityLimiter(THREADS))


def _hung(source: Files) -> str:
    """Return the addition to a deadline's error if all threads of the source hang."""
    threads = threads_of(source)
    if threads.available_tokens:
        return ""
    return f"; all {THREADS} threads of the source wait for the disk; check it"


def _read_member(archive: Archive, name: str, limit: int) -> bytes:
    try:
        return archive.read(name, max_bytes=limit)
    except BaseException:
        archive.close()
        raise


def _read_settled(path: Path, limit: int, folders: Sequence[Path] | None) -> bytes:
    try:
        with open_inside(path, folders) as file:
            before = os.fstat(file.fileno())
            body = file.read(limit + 1)
            after = os.fstat(file.fileno())
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}", is_retryable=True) from error
    if len(body) > limit:
        raise SourceError(f"{path}: has more than the limit of {limit:,} bytes", is_retryable=False)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or len(body) != after.st_size:
        raise SourceError(f"{path}: was changed while it was read", is_retryable=True)
    return body


def _look_at(patterns: tuple[str, ...], follow_links: bool) -> Looks:  # noqa: FBT001 - positional, for a thread
    """Return the current files of the patterns, with the values by which a change is noticed."""
    looks = {}
    for path in _list_files(patterns, follow_links):
        try:
            is_now = path.stat()
        except OSError:  # the file is gone or not yet there
            continue
        looks[path] = (is_now.st_dev, is_now.st_ino, is_now.st_size, is_now.st_mtime_ns)
    return looks


def _folder_of(pattern: str) -> Path:
    """Return the folder before a pattern's first star."""
    return Path(*itertools.takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts))


def _list_files(patterns: tuple[str, ...], follow_links: bool) -> list[Path]:  # noqa: FBT001 - as above
    """Return the files of the patterns, sorted, each once, without those that links out of the folder lead to."""
    found: set[str] = set()
    outside: list[str] = []
    for pattern in patterns:
        if not glob.has_magic(pattern):
            if not Path(pattern).is_file():
                raise SourceError(f"{pattern}: there is no such file", is_retryable=True)
            found.add(pattern)
            continue
        folder = _folder_of(pattern)
        if not folder.is_dir():
            raise SourceError(f"{pattern}: there is no folder {folder}; check the disk", is_retryable=True)
        paths = glob.glob(pattern, recursive=True)  # noqa: PTH207 - Path.glob does not accept a whole pattern
        for path in paths:
            if Path(path).is_file():
                if follow_links or is_inside(path, [folder]):
                    found.add(path)
                else:
                    outside.append(path)
    if outside:
        log.warning("skipping files behind links that lead out of their folder", files=len(outside), first=outside[0])
    return [Path(path) for path in sorted(found)]
