"""How the text of one setting becomes a value, and what is allowed there (Q13).

settings.py names a kind for each setting; the kind's `read` takes the text of an environment variable as well as the
value itself (tests and embedders construct `Settings` directly), so there is one check and one message for both. `read`
raises `Refused`, or a group of them for a list with several faults, which settings.py turns into lines such as
`NAME: must be what is allowed, not 'value'`. Nothing here knows the settings' names.

Rejected: cattrs and typed-settings. Both report structure paths and exception trees, from which one line for a person
would have to be pieced together again; the kinds are shorter than that.
"""

import ipaddress
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, cast
from urllib.parse import urlsplit

import attrs
import msgspec

from dataloader.flows.etl.declare.pipeline_config import PREFIX, PipelineSettings, read_settings
from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import MAX_NAME, NAME_RULE, check_name
from dataloader.jobs.secrets.masking import MASKED, mask_address
from dataloader.jobs.text import CONTROL
from dataloader.jobs.visible import visible

Role = Literal["read", "operate", "admin"]
ROLES: Final = ("read", "operate", "admin")
_SCHEMES: Final = frozenset({"postgresql", "postgres", "postgresql+asyncpg", "postgres+asyncpg"})
_LONGEST_S: Final = 31_536_000
_SHORTEST_S: Final = 0.001
MOST_OF_POSTGRES_S: Final = 2_147_000
"""Timeouts that it is told of: milliseconds in 31 bits."""
SHORTEST_TOKEN: Final = 16
PLACEHOLDER: Final = "replace-me-by-a-random-one"
"""The token in `.env.example`, which is none."""


@attrs.frozen
class Worker:
    """One entry of WORKERS_JSON: this process runs up to `concurrency` jobs of `queue` at once."""

    queue: str
    concurrency: int


@attrs.frozen
class ApiToken:
    """One entry of DL_TOKENS: who sends `token` in the Authorization header is `name` and may do what `role` allows."""

    name: str
    role: Role
    token: str = attrs.field(repr=False)


class Refused(Exception):  # noqa: N818 - the answer of a check, always caught
    """A value is not allowed. `allowed` says what is, `where` which part of the value is meant, `shown` that part."""

    def __init__(self, allowed: str, where: str = "", shown: str | None = None) -> None:
        super().__init__(allowed)
        self.allowed = allowed
        self.where = where
        self.shown = shown


class Missing(Refused):
    """A part of a value is not there: `where` it should be, and what is `allowed`."""


@attrs.frozen
class Kind:
    """What a setting may be: `allowed` in words, `read` from a text or a value, `show` without secrets."""

    allowed: str
    read: Callable[[object], Any]
    show: Callable[[Any], str] = str


def quoted(value: object) -> str:
    """Return a value as it stands in a message: on one line, in quotes, not longer than 200 characters."""
    text = visible(str(value))
    return f"'{text[:200]}…'" if len(text) > 200 else f"'{text}'"


def seconds(example: str, *, zero: bool = False, most: int = _LONGEST_S) -> Kind:
    """Return the kind of a duration: a millisecond or more, or also 0 if `zero`, and up to `most`."""
    allowed = f"a number of seconds {'not less' if zero else 'greater'} than 0, for example {example}"

    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise Refused(allowed)
        try:
            number = float(value)
        except (ValueError, OverflowError):
            raise Refused(allowed) from None
        if math.isnan(number) or number < 0 or (number == 0 and not zero):
            raise Refused(allowed)
        if 0 < number < _SHORTEST_S:
            raise Refused(f"{allowed}, and at least {_SHORTEST_S}")
        if number > most:
            raise Refused(
                f"{allowed}, and at most {most} ({'a year' if most == _LONGEST_S else 'PostgreSQL has no more'})"
            )
        return number

    return Kind(allowed, read, lambda value: f"{value:.12g}")


def whole(least: int, most: int) -> Kind:
    """Return the kind of an integer from `least` to `most`."""
    allowed = f"an integer from {least} to {most}"

    def read(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise Refused(allowed)
        return value

    return Kind(allowed, read)


def choice(*choices: str) -> Kind:
    """Return the kind of a word out of a few, in any case."""
    allowed = f"one of {', '.join(choices)}"

    def read(value: object) -> str:
        word = value.strip().lower() if isinstance(value, str) else ""
        if word not in choices:
            raise Refused(allowed)
        return word

    return Kind(allowed, read)


def _read_flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    if word in {"true", "yes", "on", "1"}:
        return True
    if word in {"false", "no", "off", "0"}:
        return False
    raise Refused(FLAG.allowed)


def _read_line(value: object) -> str:
    if not isinstance(value, str) or not 1 <= len(value.strip()) <= 200 or CONTROL.search(value):
        raise Refused(LINE.allowed)
    return value.strip()


def _read_directory(value: object) -> Path:
    if not isinstance(value, (str, Path)) or CONTROL.search(str(value)):
        raise Refused(DIRECTORY.allowed)
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise Refused(f"{DIRECTORY.allowed} (there is no such user)") from None


def _read_host(value: object) -> str:
    host = value.strip() if isinstance(value, str) else ""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        if re.fullmatch(r"(?=.{1,253}$)(?![0-9.]+$)[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?", host):
            return host
        raise Refused(HOST.allowed) from None


def _read_dsn(value: object) -> str:
    scheme, _, rest = value.strip().partition("://") if isinstance(value, str) else ("", "", "")
    dsn = f"postgresql://{rest}"
    if scheme.lower() not in _SCHEMES or not rest or re.search(r"\s", rest) or CONTROL.search(rest):
        raise Refused(DSN.allowed)
    try:
        parts = urlsplit(dsn)
        # Several hosts are fine for the driver, and no port for urlsplit.
        whole_address = not parts.fragment and ("," in parts.netloc or parts.port != 0)
    except ValueError:
        whole_address = False
    if not whole_address:
        raise Refused(f"{DSN.allowed} (in the password / ? # are written as %2F %3F %23)")
    return dsn


def is_loopback(host: str) -> bool:
    """Tell whether nobody on another machine can connect to this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _read_list(
    value: object, kinds: Mapping[str, Kind], allowed: str, *, once: Iterable[str], has_secret: bool
) -> list[dict[str, Any]]:
    """Return the objects of a JSON list, each with exactly these fields; those in `once` have a value of their own.

    Raises `Refused` for what is no list, and for what is in it a group of all that is refused there.
    """
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise Refused(f"{allowed} ({error})") from None
    if not isinstance(value, (list, tuple)):
        raise Refused(allowed)
    entries: list[dict[str, Any]] = []
    wrong: list[Refused] = []
    for index, item in enumerate(cast("Iterable[object]", value)):
        given = attrs.asdict(item) if isinstance(item, (Worker, ApiToken)) else item
        entry = _read_entry(given, kinds, f"[{index}]", wrong, has_secret=has_secret)
        for name in once:
            if name in entry and any(other.get(name) == entry[name] for other in entries):
                shown = _shown(name, entry[name], has_secret=has_secret)
                wrong.append(Refused(f"another {name} in each entry", f"[{index}].{name}", shown))
        entries.append(entry)
    if wrong:
        raise ExceptionGroup("entries that are not allowed", wrong)
    return entries


def _read_entry(
    given: object, kinds: Mapping[str, Kind], where: str, wrong: list[Refused], *, has_secret: bool
) -> dict[str, Any]:
    """Return the fields of an object that are as they should be; what is not goes to `wrong`."""
    fields = ", ".join(kinds)
    if not isinstance(given, Mapping):
        shown = MASKED if has_secret else msgspec.json.encode(given).decode()
        wrong.append(Refused(f"an object with {fields}", where, shown))
        return {}
    others = [str(name) for name in given if name not in kinds]
    wrong += [Refused(f"an object with {fields} alone", where, MASKED if has_secret else name) for name in others]
    entry: dict[str, Any] = {}
    for name, kind in kinds.items():
        if name not in given:
            wrong.append(Missing(kind.allowed, f"{where}.{name}"))
            continue
        try:
            entry[name] = kind.read(given[name])
        except Refused as refused:
            shown = refused.shown or _shown(name, given[name], has_secret=has_secret)
            wrong.append(Refused(refused.allowed, f"{where}.{name}", shown))
    return entry


def _shown(name: str, value: object, *, has_secret: bool) -> str:
    """A field in a message. Beside tokens none is shown that is long enough to be one in the wrong place."""
    text = str(value)
    return MASKED if has_secret and (name == "token" or len(text) >= SHORTEST_TOKEN) else text


def _read_workers(value: object) -> tuple[Worker, ...]:
    kinds = {"queue": QUEUE, "concurrency": CONCURRENCY}
    entries = _read_list(value, kinds, WORKERS.allowed, once=("queue",), has_secret=False)
    return tuple(Worker(**entry) for entry in entries)


def _read_tokens(value: object) -> tuple[ApiToken, ...]:
    kinds = {"name": LINE, "role": choice(*ROLES), "token": TOKEN}
    entries = _read_list(value, kinds, TOKENS.allowed, once=("name", "token"), has_secret=True)
    return tuple(ApiToken(**entry) for entry in entries)


def _read_queue(value: object) -> str:
    if not isinstance(value, str):
        raise Refused(QUEUE.allowed)
    try:
        check_name("queue", value, MAX_NAME)
    except BadRequest:
        raise Refused(QUEUE.allowed) from None
    return value


def _read_token(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(rf"[!-~]{{{SHORTEST_TOKEN},1000}}", value):
        raise Refused(TOKEN.allowed)
    if value == PLACEHOLDER:
        raise Refused("a random one, made by `openssl rand -hex 24`, and none that everybody knows", shown=value)
    return value


def _show_workers(workers: tuple[Worker, ...]) -> str:
    return msgspec.json.encode([attrs.asdict(worker) for worker in workers]).decode()


def _show_tokens(tokens: tuple[ApiToken, ...]) -> str:
    return msgspec.json.encode([{**attrs.asdict(token), "token": MASKED} for token in tokens]).decode()


def _read_pipeline(value: object) -> PipelineSettings:
    if isinstance(value, PipelineSettings):
        return value
    if not isinstance(value, Mapping):
        raise Refused(PIPELINE.allowed)
    return read_settings(value)


def _show_pipeline(settings: PipelineSettings) -> str:
    given = {PREFIX + name.upper(): value for name, value in settings.of_all.items()}
    for load, one in settings.of_one.items():
        given |= {f"{PREFIX}{load}__{name.upper()}": value for name, value in one.items()}
    return " ".join(f"{name}={value}" for name, value in given.items())


PIPELINE = Kind("variables such as DL_PIPELINE__RATE_MIN", _read_pipeline, _show_pipeline)
FLAG = Kind("true or false", _read_flag, lambda value: str(value).lower())
LINE = Kind("1 to 200 characters on one line", _read_line)
DIRECTORY = Kind("the path of a directory", _read_directory)
HOST = Kind("an IP address or host name, without a port, for example 127.0.0.1", _read_host)
DSN = Kind("the address of a database, for example postgresql://user:password@host:5432/name", _read_dsn, mask_address)
QUEUE = Kind(f"1 to {MAX_NAME} characters {NAME_RULE}", _read_queue)
CONCURRENCY = whole(1, 1000)
WORKERS = Kind('a JSON list such as [{"queue":"load.cbr","concurrency":2}]', _read_workers, _show_workers)
TOKEN = Kind(f"{SHORTEST_TOKEN} to 1000 printable ASCII characters without spaces", _read_token)
TOKENS = Kind(
    'a JSON list such as [{"name":"ci","role":"operate","token":"…"}], role one of read, operate, admin, '
    "token of 16 or more characters",
    _read_tokens,
    _show_tokens,
)
