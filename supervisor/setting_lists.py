"""Settings that are JSON lists of objects: WORKERS_JSON, DL_TOKENS, DL_NOTIFY (targets), DL_SINKS."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, cast
from urllib.parse import urlsplit

import attrs
import msgspec

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import MAX_NAME, NAME_RULE, check_name
from dataloader.jobs.notices import KINDS, CommandTarget, Target, WebhookTarget
from dataloader.jobs.process_outbox import MAX_SINK, MESSAGES, SINK_KINDS, Sink
from dataloader.jobs.processes import check_type
from dataloader.jobs.secrets.masking import MASKED
from dataloader.supervisor.setting_kinds import LINE, Missing, RefusedSetting, SettingKind, choice, seconds, whole

Role = Literal["read", "operate", "admin"]
ROLES: Final = ("read", "operate", "admin")
SHORTEST_TOKEN: Final = 16
FEWEST_CHARACTERS: Final = 6
"""Minimum number of different characters in a token. A random one of 16 hex digits has fewer in 1 of 30,000 cases."""
PLACEHOLDER: Final = "replace-me-by-a-random-one"
"""Example in `.env.example`, which is refused as a token."""


@attrs.frozen
class Worker:
    """One entry of WORKERS_JSON: this process runs up to `concurrency` jobs of `queue` concurrently.

    With `tasks`, the process claims only jobs of the named tasks and leaves the queue's other jobs to other processes.
    """

    queue: str
    concurrency: int
    tasks: tuple[str, ...] | None = None


@attrs.frozen
class ApiToken:
    """One entry of DL_TOKENS: requests with `token` in their Authorization header act as `name`, with rights `role`."""

    name: str
    role: Role
    token: str = attrs.field(repr=False)


@attrs.frozen
class Fields:
    """Fields of an entry: required and optional."""

    needed: Mapping[str, SettingKind]
    optional: Mapping[str, SettingKind] = attrs.field(factory=dict[str, SettingKind])


def _read_list(
    value: object,
    fields: Callable[[object], Fields],
    allowed: str,
    *,
    once: Iterable[str],
    has_secret: bool,
    together: Callable[[Sequence[Mapping[str, Any]]], Iterable[RefusedSetting]] = lambda _entries: (),
) -> list[dict[str, Any]]:
    """Return the objects of a JSON list, each with these `fields`, which may depend on the object.

    Values of the fields in `once` must differ. `together` finds contradictions between the entries; it gets only valid
    fields.

    Raises `RefusedSetting` if the value is not a list, and a group of `RefusedSetting` for all errors in the list.
    """
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise RefusedSetting(f"{allowed} ({error})") from None
    if not isinstance(value, (list, tuple)):
        raise RefusedSetting(allowed)
    entries: list[dict[str, Any]] = []
    wrong: list[RefusedSetting] = []
    for index, item in enumerate(cast("Iterable[object]", value)):
        given = attrs.asdict(item, filter=_is_given) if isinstance(item, _ENTRIES) else item
        entry = _read_entry(given, fields(given), f"[{index}]", wrong, has_secret=has_secret)
        for name in once:
            if name in entry and any(other.get(name) == entry[name] for other in entries):
                shown = _shown_field(name, entry[name], has_secret=has_secret)
                wrong.append(RefusedSetting("different in each entry", f"[{index}].{name}", shown))
        entries.append(entry)
    wrong += together(entries)
    if wrong:
        raise ExceptionGroup("invalid entries", wrong)
    return entries


def _is_given(_field: object, value: object) -> bool:
    return value is not None


def _read_entry(
    given: object, fields: Fields, where: str, wrong: list[RefusedSetting], *, has_secret: bool
) -> dict[str, Any]:
    """Return the valid fields of an object, and append the errors of its other fields to `wrong`."""
    kinds = {**fields.needed, **fields.optional}
    if not isinstance(given, Mapping):
        shown = MASKED if has_secret else msgspec.json.encode(given).decode()
        wrong.append(RefusedSetting(f"an object with {', '.join(fields.needed)}", where, shown))
        return {}
    others = [str(name) for name in given if name not in kinds]
    allowed = f"an object with only {', '.join(kinds)}"
    wrong += [RefusedSetting(allowed, where, MASKED if has_secret else name) for name in others]
    entry: dict[str, Any] = {}
    for name, kind in kinds.items():
        if name not in given:
            if name in fields.needed:
                wrong.append(Missing(kind.allowed, f"{where}.{name}"))
            continue
        try:
            entry[name] = kind.read(given[name])
        except RefusedSetting as refused:
            shown = refused.shown or _shown_field(name, given[name], has_secret=has_secret)
            wrong.append(RefusedSetting(refused.allowed, f"{where}.{name}", shown))
    return entry


def _shown_field(name: str, value: object, *, has_secret: bool) -> str:
    """Return a field's value for a message. In an entry with a secret, values long enough to be one are masked."""
    text = str(value)
    return MASKED if has_secret and (name in {"token", "secret"} or len(text) >= SHORTEST_TOKEN) else text


def _read_workers(value: object) -> tuple[Worker, ...]:
    entries = _read_list(
        value, _worker_fields, WORKERS.allowed, once=(), has_secret=False, together=_do_not_fit_together
    )
    return tuple(Worker(**entry) for entry in entries)


def _do_not_fit_together(entries: Sequence[Mapping[str, Any]]) -> Iterator[RefusedSetting]:
    """Yield the contradictions between several entries of one queue: each must name different tasks."""
    for index, entry in enumerate(entries):
        same = [other for other in entries[:index] if "queue" in entry and other.get("queue") == entry["queue"]]
        if same and not any("tasks" in one for one in (entry, *same)):
            yield RefusedSetting("different in each entry", f"[{index}].queue", entry["queue"])
        elif same and not all("tasks" in one for one in (entry, *same)):
            yield RefusedSetting(
                "different in each entry, unless all entries with this queue have tasks",
                f"[{index}].queue",
                entry["queue"],
            )
        else:
            again = [name for other in same for name in other["tasks"] if name in entry["tasks"]]
            if again:
                yield RefusedSetting("names that are in no other entry of the queue", f"[{index}].tasks", again[0])


def _worker_fields(_given: object) -> Fields:
    return Fields({"queue": QUEUE, "concurrency": CONCURRENCY}, {"tasks": OWN_TASKS})


def _read_own_tasks(value: object) -> tuple[str, ...]:
    names = value if isinstance(value, (list, tuple)) else ()
    if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise RefusedSetting(OWN_TASKS.allowed)
    return tuple(names)


def _read_tokens(value: object) -> tuple[ApiToken, ...]:
    fields = Fields({"name": LINE, "role": choice(*ROLES), "token": TOKEN})
    entries = _read_list(value, lambda _given: fields, TOKENS.allowed, once=("name", "token"), has_secret=True)
    return tuple(ApiToken(**entry) for entry in entries)


def _read_targets(value: object) -> tuple[Target, ...]:
    entries = _read_list(value, _target_fields, TARGETS.allowed, once=("name",), has_secret=True)
    return tuple(WebhookTarget(**entry) if "url" in entry else CommandTarget(**entry) for entry in entries)


def _target_fields(given: object) -> Fields:
    """Return the fields of a target: a command has an `argv`, all others are webhooks."""
    named = given if isinstance(given, Mapping) else {}
    if "argv" in named:
        return Fields({"name": LINE, "argv": ARGV}, {"timeout_s": COMMAND_S, "kinds": NOTICE_KINDS})
    return Fields({"name": LINE, "url": WEBHOOK_URL, "secret": TOKEN}, {"kinds": NOTICE_KINDS})


def _read_sinks(value: object) -> tuple[Sink, ...]:
    entries = _read_list(value, _sink_fields, SINKS.allowed, once=("name",), has_secret=True)
    return tuple(Sink(**entry) for entry in entries)


def _sink_fields(given: object) -> Fields:
    """Return the fields of a sink: a webhook has a `url` and a `secret`, a handler has neither."""
    named = given if isinstance(given, Mapping) else {}
    webhook = {"url": WEBHOOK_URL, "secret": TOKEN}
    optional = {"types": TYPES, "kinds": TOLD_KINDS, "timeout_s": DELIVERY_S, "max_tries": MAX_TRIES}
    if webhook.keys() & named.keys():
        return Fields({"name": SINK_NAME, **webhook}, optional)
    return Fields({"name": SINK_NAME}, {**webhook, **optional})


def _read_sink_name(value: object) -> str:
    try:
        check_name("name", value if isinstance(value, str) else "", MAX_SINK)
    except BadRequest:
        raise RefusedSetting(SINK_NAME.allowed) from None
    if value == MESSAGES:
        raise RefusedSetting(SINK_NAME.allowed)
    return str(value)


def _read_types(value: object) -> tuple[str, ...]:
    given = value if isinstance(value, (list, tuple)) else ()
    try:
        for name in given:
            check_type("types", name if isinstance(name, str) else "")
    except BadRequest:
        raise RefusedSetting(TYPES.allowed) from None
    if not given:
        raise RefusedSetting(TYPES.allowed)
    return tuple(dict.fromkeys(given))


def _read_told_kinds(value: object) -> tuple[Any, ...]:
    given = value if isinstance(value, (list, tuple)) else ()
    if not given or not all(kind in SINK_KINDS for kind in given):
        raise RefusedSetting(TOLD_KINDS.allowed)
    return tuple(dict.fromkeys(given))


def _read_argv(value: object) -> tuple[str, ...]:
    given = value if isinstance(value, (list, tuple)) else ()
    if not given or not all(isinstance(part, str) and "\0" not in part for part in given) or not given[0]:
        raise RefusedSetting(ARGV.allowed, shown=MASKED)
    return tuple(given)


def _read_notice_kinds(value: object) -> tuple[Any, ...]:
    given = value if isinstance(value, (list, tuple)) else ()
    if not given or not all(kind in KINDS for kind in given):
        raise RefusedSetting(NOTICE_KINDS.allowed)
    return tuple(dict.fromkeys(given))


def _read_url(value: object) -> str:
    try:
        parts = urlsplit(value if isinstance(value, str) else "")
        is_address = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0 and not parts.fragment
    except ValueError:
        is_address = False
    if not is_address or not re.fullmatch(r"[!-~]{1,2000}", str(value)):
        raise RefusedSetting(WEBHOOK_URL.allowed, shown=MASKED)
    return str(value)


def _read_queue(value: object) -> str:
    if not isinstance(value, str):
        raise RefusedSetting(QUEUE.allowed)
    try:
        check_name("queue", value, MAX_NAME)
    except BadRequest:
        raise RefusedSetting(QUEUE.allowed) from None
    return value


def _read_token(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(rf"[!-~]{{{SHORTEST_TOKEN},1000}}", value):
        raise RefusedSetting(TOKEN.allowed)
    is_repeated = any(value[length:] == value[:-length] for length in range(1, len(value) // 2 + 1))
    if len(set(value)) < FEWEST_CHARACTERS or is_repeated:
        raise RefusedSetting(
            f"a random one from `openssl rand -hex 24`, with at least {FEWEST_CHARACTERS} different characters "
            "and no repeated text",
            shown=MASKED,
        )
    if value == PLACEHOLDER:
        raise RefusedSetting("a random one from `openssl rand -hex 24`, not the published example", shown=value)
    return value


def _read_tasks(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError:
            raise RefusedSetting(TASKS.allowed) from None
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) and name for name in value):
        raise RefusedSetting(TASKS.allowed)
    return tuple(cast("Iterable[str]", value))


def _show_tasks(tasks: tuple[str, ...]) -> str:
    return msgspec.json.encode(tasks).decode()


def _show_workers(workers: tuple[Worker, ...]) -> str:
    return msgspec.json.encode([attrs.asdict(worker, filter=_is_given) for worker in workers]).decode()


def _show_tokens(tokens: tuple[ApiToken, ...]) -> str:
    return msgspec.json.encode([{**attrs.asdict(token), "token": MASKED} for token in tokens]).decode()


def _show_targets(targets: tuple[Target, ...]) -> str:
    """Return the targets with their names and kinds only: a URL or a command may contain a secret."""
    hidden = {"url": MASKED, "secret": MASKED, "argv": [MASKED]}
    shown = [{name: hidden.get(name, value) for name, value in attrs.asdict(one).items()} for one in targets]
    return msgspec.json.encode(shown).decode()


def _show_sinks(sinks: tuple[Sink, ...]) -> str:
    hidden = {"url": MASKED, "secret": MASKED}
    shown = [
        {name: hidden.get(name, value) for name, value in attrs.asdict(sink, filter=_is_given).items()}
        for sink in sinks
    ]
    return msgspec.json.encode(shown).decode()


QUEUE = SettingKind(f"1 to {MAX_NAME} characters {NAME_RULE}", _read_queue)
CONCURRENCY = whole(1, 1000)
OWN_TASKS = SettingKind('a list of different task names such as ["employee"]', _read_own_tasks)
TASKS = SettingKind('a JSON list of names such as ["load.rates"]', _read_tasks, _show_tasks)
WORKERS = SettingKind('a JSON list such as [{"queue":"load.cbr","concurrency":2}]', _read_workers, _show_workers)
TOKEN = SettingKind(f"{SHORTEST_TOKEN} to 1000 printable ASCII characters without spaces", _read_token)
TOKENS = SettingKind(
    'a JSON list such as [{"name":"ci","role":"operate","token":"…"}], role one of read, operate, admin, '
    "token of 16 or more characters",
    _read_tokens,
    _show_tokens,
)
WEBHOOK_URL = SettingKind("an address that begins with http:// or https://", _read_url)
ARGV = SettingKind("a list of strings: a program and its arguments", _read_argv)
COMMAND_S = seconds("30", most=500)
NOTICE_KINDS = SettingKind(f"a list of some of {', '.join(KINDS)}", _read_notice_kinds)
TARGETS = SettingKind(
    'a JSON list such as [{"name":"ops","url":"https://…","secret":"…"},{"name":"page","argv":["/usr/bin/page"]}], '
    "secret of 16 or more characters",
    _read_targets,
    _show_targets,
)
SINK_NAME = SettingKind(f"1 to {MAX_SINK} characters {NAME_RULE}, and not {MESSAGES!r}", _read_sink_name)
TYPES = SettingKind('a list of names of process types such as ["payment"]', _read_types)
TOLD_KINDS = SettingKind(f"a list of some of {', '.join(SINK_KINDS)}", _read_told_kinds)
DELIVERY_S = seconds("15", most=300)
MAX_TRIES = whole(1, 1000)
SINKS = SettingKind(
    'a JSON list such as [{"name":"books","url":"https://…","secret":"…"},{"name":"ledger"}], secret of 16 or more '
    "characters",
    _read_sinks,
    _show_sinks,
)
_ENTRIES: Final = (Worker, ApiToken, WebhookTarget, CommandTarget, Sink)
