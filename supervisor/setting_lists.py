"""The settings that are JSON lists of objects: queues (WORKERS_JSON), API tokens (DL_TOKENS), targets (DL_NOTIFY)."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, cast
from urllib.parse import urlsplit

import attrs
import msgspec

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import MAX_NAME, NAME_RULE, check_name
from dataloader.jobs.notices import KINDS, CommandTarget, Target, WebhookTarget
from dataloader.jobs.secrets.masking import MASKED
from dataloader.supervisor.setting_kinds import LINE, Kind, Missing, Refused, choice, seconds, whole

Role = Literal["read", "operate", "admin"]
ROLES: Final = ("read", "operate", "admin")
SHORTEST_TOKEN: Final = 16
PLACEHOLDER: Final = "replace-me-by-a-random-one"
"""The example in `.env.example`, which is refused as a token."""


@attrs.frozen
class Worker:
    """One entry of WORKERS_JSON: this process runs up to `concurrency` jobs of `queue` at once."""

    queue: str
    concurrency: int


@attrs.frozen
class ApiToken:
    """One entry of DL_TOKENS: a request with `token` in its Authorization header is `name`'s, with `role`'s rights."""

    name: str
    role: Role
    token: str = attrs.field(repr=False)


def _read_list(
    value: object,
    kinds: Mapping[str, Kind] | Callable[[object], Mapping[str, Kind]],
    allowed: str,
    *,
    once: Iterable[str],
    has_secret: bool,
) -> list[dict[str, Any]]:
    """Return the objects of a JSON list, each with exactly these fields. Values of fields in `once` must differ.

    `kinds` may depend on the object.

    Raises `Refused` if the value is not a list, and a group of `Refused` for everything that is wrong in the list.
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
        given = attrs.asdict(item) if isinstance(item, _ENTRIES) else item
        entry = _read_entry(
            given, kinds(given) if callable(kinds) else kinds, f"[{index}]", wrong, has_secret=has_secret
        )
        for name in once:
            if name in entry and any(other.get(name) == entry[name] for other in entries):
                shown = _shown(name, entry[name], has_secret=has_secret)
                wrong.append(Refused("different in each entry", f"[{index}].{name}", shown))
        entries.append(entry)
    if wrong:
        raise ExceptionGroup("invalid entries", wrong)
    return entries


def _read_entry(
    given: object, kinds: Mapping[str, Kind], where: str, wrong: list[Refused], *, has_secret: bool
) -> dict[str, Any]:
    """Return the valid fields of an object, and append the errors of the others to `wrong`."""
    fields = ", ".join(kinds)
    if not isinstance(given, Mapping):
        shown = MASKED if has_secret else msgspec.json.encode(given).decode()
        wrong.append(Refused(f"an object with {fields}", where, shown))
        return {}
    others = [str(name) for name in given if name not in kinds]
    wrong += [Refused(f"an object with only {fields}", where, MASKED if has_secret else name) for name in others]
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
    """A field's value for a message. In an entry with a token, values that are long enough to be one are masked."""
    text = str(value)
    return MASKED if has_secret and (name in {"token", "secret"} or len(text) >= SHORTEST_TOKEN) else text


def _read_workers(value: object) -> tuple[Worker, ...]:
    kinds = {"queue": QUEUE, "concurrency": CONCURRENCY}
    entries = _read_list(value, kinds, WORKERS.allowed, once=("queue",), has_secret=False)
    return tuple(Worker(**entry) for entry in entries)


def _read_tokens(value: object) -> tuple[ApiToken, ...]:
    kinds = {"name": LINE, "role": choice(*ROLES), "token": TOKEN}
    entries = _read_list(value, kinds, TOKENS.allowed, once=("name", "token"), has_secret=True)
    return tuple(ApiToken(**entry) for entry in entries)


def _read_targets(value: object) -> tuple[Target, ...]:
    entries = _read_list(value, _target_kinds, TARGETS.allowed, once=("name",), has_secret=True)
    return tuple(WebhookTarget(**entry) if "url" in entry else CommandTarget(**entry) for entry in entries)


def _target_kinds(given: object) -> dict[str, Kind]:
    """The fields of a target: a command has an `argv`, all others are webhooks."""
    named = given if isinstance(given, Mapping) else {}
    if "argv" in named:
        kinds, optional = {"name": LINE, "argv": ARGV}, {"timeout_s": COMMAND_S, "kinds": NOTICE_KINDS}
    else:
        kinds, optional = {"name": LINE, "url": WEBHOOK_URL, "secret": TOKEN}, {"kinds": NOTICE_KINDS}
    return kinds | {name: kind for name, kind in optional.items() if name in named}


def _read_argv(value: object) -> tuple[str, ...]:
    given = value if isinstance(value, (list, tuple)) else ()
    if not given or not all(isinstance(part, str) and "\0" not in part for part in given) or not given[0]:
        raise Refused(ARGV.allowed, shown=MASKED)
    return tuple(given)


def _read_notice_kinds(value: object) -> tuple[Any, ...]:
    given = value if isinstance(value, (list, tuple)) else ()
    if not given or not all(kind in KINDS for kind in given):
        raise Refused(NOTICE_KINDS.allowed)
    return tuple(dict.fromkeys(given))


def _read_url(value: object) -> str:
    try:
        parts = urlsplit(value if isinstance(value, str) else "")
        is_address = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0 and not parts.fragment
    except ValueError:
        is_address = False
    if not is_address or not re.fullmatch(r"[!-~]{1,2000}", str(value)):
        raise Refused(WEBHOOK_URL.allowed, shown=MASKED)
    return str(value)


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
        raise Refused("a random one, made by `openssl rand -hex 24`, not the published example", shown=value)
    return value


def _read_tasks(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError:
            raise Refused(TASKS.allowed) from None
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) and name for name in value):
        raise Refused(TASKS.allowed)
    return tuple(cast("Iterable[str]", value))


def _show_tasks(tasks: tuple[str, ...]) -> str:
    return msgspec.json.encode(tasks).decode()


def _show_workers(workers: tuple[Worker, ...]) -> str:
    return msgspec.json.encode([attrs.asdict(worker) for worker in workers]).decode()


def _show_tokens(tokens: tuple[ApiToken, ...]) -> str:
    return msgspec.json.encode([{**attrs.asdict(token), "token": MASKED} for token in tokens]).decode()


def _show_targets(targets: tuple[Target, ...]) -> str:
    """Their names and kinds: an address may be a secret itself, and a command may have one."""
    hidden = {"url": MASKED, "secret": MASKED, "argv": [MASKED]}
    shown = [{name: hidden.get(name, value) for name, value in attrs.asdict(one).items()} for one in targets]
    return msgspec.json.encode(shown).decode()


QUEUE = Kind(f"1 to {MAX_NAME} characters {NAME_RULE}", _read_queue)
CONCURRENCY = whole(1, 1000)
TASKS = Kind('a JSON list of names such as ["load.rates"]', _read_tasks, _show_tasks)
WORKERS = Kind('a JSON list such as [{"queue":"load.cbr","concurrency":2}]', _read_workers, _show_workers)
TOKEN = Kind(f"{SHORTEST_TOKEN} to 1000 printable ASCII characters without spaces", _read_token)
TOKENS = Kind(
    'a JSON list such as [{"name":"ci","role":"operate","token":"…"}], role one of read, operate, admin, '
    "token of 16 or more characters",
    _read_tokens,
    _show_tokens,
)
WEBHOOK_URL = Kind("an address that begins with http:// or https://", _read_url)
ARGV = Kind("a list of texts, a program and its arguments", _read_argv)
COMMAND_S = seconds("30", most=500)
NOTICE_KINDS = Kind(f"a list of some of {', '.join(KINDS)}", _read_notice_kinds)
TARGETS = Kind(
    'a JSON list such as [{"name":"ops","url":"https://…","secret":"…"},{"name":"page","argv":["/usr/bin/page"]}], '
    "secret of 16 or more characters",
    _read_targets,
    _show_targets,
)
_ENTRIES: Final = (Worker, ApiToken, WebhookTarget, CommandTarget)
