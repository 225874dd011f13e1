"""The settings of a process: one attrs class whose fields carry their variable, their kind and their description (Q13).

The command line calls `load_settings`, which merges defaults < `.env` < `.env.local` < environment < command line, and
`explain` for `dataloader config`; embedders and tests construct `Settings(db_dsn=…, workers=(Worker("q", 2),))`. Both
ways go through the same checks with the same messages: one line for each bad setting, all of them at once. The table in
docs/settings.md comes from the fields; tests compare it and `.env.example` with them.

Must never put a DSN or a token into a message, a repr or an explanation, write to `os.environ`, or expand `$` in a
file: passwords contain it.
"""

import difflib
import io
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import attrs
from dotenv.parser import parse_stream

from dataloader.flows.etl.declare.pipeline_config import PREFIX, PipelineSettings
from dataloader.jobs.errors import ConfigError
from dataloader.jobs.secrets.masking import MASKED
from dataloader.supervisor import values
from dataloader.supervisor.values import ApiToken, Kind, Missing, Refused, Worker, quoted

__all__ = [
    "ApiToken",
    "SettingRow",
    "Settings",
    "Worker",
    "explain",
    "load_settings",
    "settings_table",
    "unknown_variables",
]

CLIENT_VARIABLE: Final = "DL_TOKEN"
"""What the command line takes for a token of its own, and no setting of a service."""
FILES: Final = (".env", ".env.local")
_NOTHING: Final[Mapping[str, object]] = MappingProxyType({})


def _setting(
    name: str, kind: Kind, description: str, default: Any = None, *, optional: str = "", secret: bool = False
) -> Any:
    """Declare a setting. `optional` says what happens without a value, for settings whose default is none."""
    metadata = {"name": name, "kind": kind, "description": description, "optional": optional, "secret": secret}
    return attrs.field(default=default, metadata=metadata, repr=not secret)


@attrs.frozen(kw_only=True)
class Settings:
    """All settings of one process, checked. Durations in seconds; see docs/settings.md for what each one does (Q13).

    Fields also take the text that the environment variable would have. Without a `lock_dsn` all connections go to
    `db_dsn`; who gives one and then evolves `db_dsn` to another database is refused when the service starts.

    Raises:
        ConfigError: one line for each setting with a value that is not allowed.
    """

    db_dsn: str | None = _setting(
        "DL_DB_DSN",
        values.DSN,
        "The database. `postgresql+asyncpg://` and `postgres://` are taken as well.",
        optional="an embedded PostgreSQL in `DL_DATA_DIR`",
        secret=True,
    )
    lock_dsn: str | None = _setting(
        "DL_LOCK_DSN",
        values.DSN,
        "The direct address for the lock session and the listener, when `DL_DB_DSN` goes through PgBouncer.",
        optional="the same as `DL_DB_DSN`",
        secret=True,
    )
    workers: tuple[Worker, ...] = _setting(
        "WORKERS_JSON",
        values.WORKERS,
        "The queues whose jobs this process runs, and how many of each at once.",
        (),
        optional="none; `serve --tasks`: `default`, ten jobs at once",
    )
    heartbeat_s: float = _setting(
        "DL_HEARTBEAT_SEC", values.seconds("10"), "How often the leases of running jobs are renewed.", 10
    )
    default_lease_s: int = _setting(
        "DL_DEFAULT_LEASE_TTL_SEC",
        values.whole(3, 86_400),
        "Seconds a job is held without a heartbeat, for jobs triggered without `lease_ttl_sec`.",
        60,
    )
    reaper_period_s: float = _setting(
        "DL_REAPER_PERIOD_SEC", values.seconds("10"), "How often jobs with an expired lease are looked for.", 10
    )
    claim_backoff_s: float = _setting(
        "DL_CLAIM_BACKOFF_SEC",
        values.seconds("15"),
        "The longest a job waits before its held lock_key is tried again.",
        15,
    )
    poll_s: float = _setting(
        "DL_POLL_SEC", values.seconds("5"), "How often queues are looked at without a notification.", 5
    )
    drain_timeout_s: float = _setting(
        "DL_DRAIN_TIMEOUT_SEC",
        values.seconds("30", zero=True),
        "After SIGTERM: the time running jobs have to finish before they are stopped and given back.",
        30,
    )
    cancel_grace_s: float = _setting(
        "DL_CANCEL_GRACE_SEC",
        values.seconds("10", zero=True),
        "After a cancel: the time before a handler that goes on is reported as stuck.",
        10,
    )
    host: str = _setting(
        "DL_HOST",
        values.HOST,
        "The address the HTTP API listens on. Any but a loopback address needs `DL_TOKENS`.",
        "127.0.0.1",
    )
    port: int = _setting("DL_PORT", values.whole(0, 65_535), "The port of the HTTP API; 0 takes any free one.", 8080)
    tokens: tuple[ApiToken, ...] = _setting(
        "DL_TOKENS", values.TOKENS, "Who may use the HTTP API.", (), optional="everybody on this machine", secret=True
    )
    max_body_bytes: int = _setting(
        "DL_MAX_BODY_BYTES", values.whole(1024, 1 << 30), "The longest body of an HTTP request, in bytes.", 1 << 20
    )
    max_batch_body_bytes: int = _setting(
        "DL_MAX_BATCH_BODY_BYTES",
        values.whole(1024, 1 << 30),
        "The longest body of a batch of triggers, in bytes.",
        8 << 20,
    )
    max_connections: int = _setting(
        "DL_MAX_CONNECTIONS",
        values.whole(8, 100_000),
        "How many HTTP connections there may be; the one that has been idle for longest gives way to another one.",
        500,
    )
    max_waits: int = _setting(
        "DL_MAX_WAITS",
        values.whole(1, 100_000),
        "How many requests may wait for a job's change (`?wait=`) at a time.",
        200,
    )
    data_dir: Path = _setting(  # noqa: RUF009 - declares a field, as attrs.field does
        "DL_DATA_DIR", values.DIRECTORY, "Where the embedded PostgreSQL keeps its data.", ".dataloader"
    )
    pool_size: int = _setting(
        "DL_POOL_SIZE",
        values.whole(1, 50),
        "Connections for everything but the four that have a duty of their own (docs/operations.md).",
        2,
    )
    transaction_pool_size: int = _setting(
        "DL_TRANSACTION_POOL_SIZE",
        values.whole(1, 50),
        "Connections for `job.transaction()`: as many jobs can have one open at once.",
        4,
    )
    statement_timeout_s: float = _setting(
        "DL_STATEMENT_TIMEOUT_SEC",
        values.seconds("30", most=values.MOST_OF_POSTGRES_S),
        "The longest a statement of the queue's own may take.",
        30,
    )
    transaction_timeout_s: float = _setting(
        "DL_TRANSACTION_TIMEOUT_SEC",
        values.seconds("600", most=values.MOST_OF_POSTGRES_S),
        "The longest a statement in `job.transaction()` may take, and the longest pause between two.",
        600,
    )
    connect_timeout_s: float = _setting(
        "DL_CONNECT_TIMEOUT_SEC", values.seconds("10"), "The longest a connection to the database may take.", 10
    )
    migrate: bool = _setting(
        "DL_MIGRATE", values.FLAG, "Whether `serve` brings the schema up to date by itself.", default=True
    )
    retain_succeeded_days: int = _setting(
        "DL_RETAIN_SUCCEEDED_DAYS",
        values.whole(0, 36_500),
        "Days after which succeeded jobs are deleted; 0 keeps them.",
        0,
    )
    retain_failed_days: int = _setting(
        "DL_RETAIN_FAILED_DAYS", values.whole(0, 36_500), "Days after which failed jobs are deleted; 0 keeps them.", 0
    )
    retain_canceled_days: int = _setting(
        "DL_RETAIN_CANCELED_DAYS",
        values.whole(0, 36_500),
        "Days after which canceled jobs are deleted; 0 keeps them.",
        0,
    )
    retain_lost_days: int = _setting(
        "DL_RETAIN_LOST_DAYS", values.whole(0, 36_500), "Days after which lost jobs are deleted; 0 keeps them.", 0
    )
    log_format: Literal["auto", "console", "json"] = _setting(
        "DL_LOG_FORMAT",
        values.choice("auto", "console", "json"),
        "Lines for people or for machines; auto looks whether stderr is a terminal.",
        "auto",
    )
    log_level: Literal["debug", "info", "warning", "error", "critical"] = _setting(
        "DL_LOG_LEVEL",
        values.choice("debug", "info", "warning", "error", "critical"),
        "The least serious lines that are logged.",
        "info",
    )
    log_lines_per_job: int = _setting(
        "DL_LOG_LINES_PER_JOB",
        values.whole(0, 1_000_000),
        "Lines of `job.log` kept with each run of a job; of a flow, with each load.",
        1000,
    )
    job_log_level: Literal["info", "warning", "error", "off"] = _setting(
        "DL_JOB_LOG_LEVEL",
        values.choice("info", "warning", "error", "off"),
        "The least serious lines of `job.log` that also go to this process's log; all are kept with the job.",
        "warning",
    )
    instance: str = _setting(
        "DL_INSTANCE",
        values.LINE,
        "The name of this process in `claimed_by` and in `/status`.",
        default=attrs.Factory(socket.gethostname),
        optional="the name of the host",
    )
    tables_at_once: int = _setting(
        "DL_DWD__PARALLEL_WORKERS",
        values.whole(1, 100),
        "How many tables of a set of dimensions are merged at once.",
        4,
    )
    pipeline: PipelineSettings = _setting(  # noqa: RUF009 - declares a field, as attrs.field does
        f"{PREFIX}…",
        values.PIPELINE,
        "How pipelines run, all of them or one: docs/etl.md has the settings.",
        default=attrs.Factory(PipelineSettings),
        optional="those of docs/etl.md",
    )

    def __attrs_post_init__(self) -> None:
        """Replace texts by values, and refuse all that is not allowed at once."""
        problems: list[str] = []
        for field in attrs.fields(type(self)):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            try:
                object.__setattr__(self, field.name, field.metadata["kind"].read(value))
            except* Refused as several:
                problems += [
                    _refusal(field, value, refused) for refused in several.exceptions if isinstance(refused, Refused)
                ]
            except* ValueError as several:  # the pipelines' own, which name the variable
                problems += map(str, several.exceptions)
        problems = problems or self._contradictions()
        if problems:
            raise ConfigError("\n".join(problems))

    def _contradictions(self) -> list[str]:
        found = []
        if self.heartbeat_s >= self.default_lease_s:
            found.append(
                f"DL_HEARTBEAT_SEC: must be less than DL_DEFAULT_LEASE_TTL_SEC ({self.default_lease_s}), best a sixth "
                f"of it, not '{self.heartbeat_s:g}'"
            )
        if self.max_batch_body_bytes < self.max_body_bytes:
            found.append(
                f"DL_MAX_BATCH_BODY_BYTES: must be at least DL_MAX_BODY_BYTES ({self.max_body_bytes}), "
                f"not '{self.max_batch_body_bytes}'"
            )
        if not self.tokens and not values.is_loopback(self.host):
            found.append(
                "DL_HOST: must be a loopback address such as 127.0.0.1 where DL_TOKENS names nobody who may connect, "
                f"not {quoted(self.host)}"
            )
        if self.lock_dsn is not None and self.db_dsn is None:
            shown = quoted(values.DSN.show(self.lock_dsn))
            found.append(f"DL_LOCK_DSN: must be set together with DL_DB_DSN, not alone ({shown})")
        return found


@attrs.frozen
class SettingRow:
    """One line of `dataloader config`: the variable, its value without secrets, and the layer it came from."""

    name: str
    value: str
    source: Literal["default", ".env", ".env.local", "environment", "command line", "embedded"]
    description: str


def load_settings(
    env: Mapping[str, str] | None = None,
    *,
    directory: Path | None = None,
    overrides: Mapping[str, object] = _NOTHING,
    defaults: Mapping[str, Any] = _NOTHING,
) -> Settings:
    """Return the settings from all layers: defaults < `.env` < `.env.local` < environment < command line (Q13, E5).

    Args:
        env: the environment; by default that of the process.
        directory: where `.env` and `.env.local` are looked for; by default the current one.
        overrides: values from the command line by field name (`port`); `None` means not given. `pipeline` are
            variables, which override single ones of the other layers.
        defaults: values by field name of what is given nowhere, instead of the setting's own.

    Raises:
        ConfigError: one line for each bad value, or for a line in a file that can't be read.
    """
    given = _given(env, directory, overrides)
    return Settings(**{**defaults, **{field: value for field, (value, _) in given.items()}})


def explain(
    env: Mapping[str, str] | None = None, *, directory: Path | None = None, overrides: Mapping[str, object] = _NOTHING
) -> list[SettingRow]:
    """Return every setting with its value, secrets masked, and where that came from.

    Arguments and errors as `load_settings`.
    """
    given = _given(env, directory, overrides)
    settings = Settings(**{field: value for field, (value, _) in given.items()})  # type: ignore[arg-type]
    rows = []
    for field in attrs.fields(Settings):
        value = getattr(settings, field.name)
        if field.name == "lock_dsn" and value is None:
            value = settings.db_dsn
        shown = "" if value is None else field.metadata["kind"].show(value)
        source: Any = given[field.name][1] if field.name in given else "default"
        rows.append(SettingRow(field.metadata["name"], shown, source, field.metadata["description"]))
    return rows


def unknown_variables(env: Mapping[str, str] | None = None, *, directory: Path | None = None) -> list[str]:
    """Return a sentence for each `DL_…` variable that is no setting, with the nearest name.

    Names that begin with `DL_PIPELINE__` are checked when the settings are read. Arguments as `load_settings`.
    """
    known = [*(field.metadata["name"] for field in attrs.fields(Settings)), CLIENT_VARIABLE]
    warnings = []
    for source, layer in _layers(env, directory):
        for name in layer:
            if name.startswith("DL_") and not name.startswith(PREFIX) and name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                warnings.append(f"{quoted(name)[1:-1]} ({source}) is no setting and has no effect{hint}")
    return warnings


def settings_table() -> str:
    """Return the table of docs/settings.md."""
    lines = ["| variable | default | allowed | what it does |", "| --- | --- | --- | --- |"]
    for field in attrs.fields(Settings):
        about = field.metadata
        default = about["optional"] or f"`{about['kind'].show(field.default)}`"
        cells = (f"`{about['name']}`", default, about["kind"].allowed, about["description"])
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _refusal(field: "attrs.Attribute[Any]", value: object, refused: Refused) -> str:
    about = field.metadata
    if isinstance(refused, Missing):
        return f"{about['name']}: {refused.where} must be {refused.allowed}, and is missing"
    if refused.shown is not None:
        shown = refused.shown
    elif about["secret"]:
        # The scheme is what most often is wrong; all the rest may be the password, whatever it looks like.
        scheme = re.match(r"[a-z+]{1,30}://", str(value))
        shown = f"{scheme[0] if scheme else ''}{MASKED}"
    else:
        shown = str(value)
    where = f"{refused.where} " if refused.where else ""
    return f"{about['name']}: {where}must be {refused.allowed}, not {quoted(shown)}"


def _given(
    env: Mapping[str, str] | None, directory: Path | None, overrides: Mapping[str, object]
) -> dict[str, tuple[object, str]]:
    """Return what was set, by field: the value of the highest layer that has one, and the layer."""
    given: dict[str, tuple[object, str]] = {}
    fields = {field.metadata["name"]: field.name for field in attrs.fields(Settings)}
    pipeline: dict[str, str] = {}
    layers = _layers(env, directory)
    if isinstance(variables := overrides.get("pipeline"), Mapping):
        layers.append(("command line", variables))
    for source, layer in layers:
        for name, field in fields.items():
            # `DL_DB_DSN=` and compose's `${DL_DB_DSN:-}` mean "not set", not a wrong value.
            if value := layer.get(name, "").strip():
                given[field] = (value, source)
        if variables := {name: text for name, text in layer.items() if name.startswith(PREFIX)}:
            pipeline |= variables
            given["pipeline"] = (pipeline, source)
    given |= {
        field: (value, "command line")
        for field, value in overrides.items()
        if value is not None and field != "pipeline"
    }
    if {"db_dsn", "lock_dsn"} <= given.keys():
        (_, lock_source), (_, source) = given["lock_dsn"], given["db_dsn"]
        order = [*(name for name, _ in layers), "command line"]
        if order.index(lock_source) < order.index(source):
            raise ConfigError(
                f"DL_LOCK_DSN: is of {lock_source} and DL_DB_DSN of {source}, which goes before: they might lead to "
                "two databases; set both in the same place"
            )
    return given


def _layers(env: Mapping[str, str] | None, directory: Path | None) -> list[tuple[str, Mapping[str, str]]]:
    directory = Path.cwd() if directory is None else directory
    return [
        *((name, _read_file(directory / name)) for name in FILES),
        ("environment", os.environ if env is None else env),
    ]


def _read_file(path: Path) -> dict[str, str]:
    """Return the variables of one file; a line that is none is an error, since dotenv itself would only drop it."""
    try:
        text = path.read_text("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ConfigError(f"{path.name}: can't be read: {reason}") from None
    found: dict[str, str] = {}
    for binding in parse_stream(io.StringIO(text)):
        if binding.error:
            line = binding.original.line + len(binding.original.string) - len(binding.original.string.lstrip("\n"))
            raise ConfigError(f"{path.name}: line {line} must be NAME=value, with quotes that are closed")
        if binding.key is not None and binding.value is not None:
            found[binding.key] = binding.value
    return found
