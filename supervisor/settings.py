"""Settings of a process: one attrs class whose fields carry their variable, their kind and their description.

A new setting needs only a field here. settings_layers.py reads them from files, environment and command line. Embedding
programs and tests construct `Settings(db_dsn=…, workers=(Worker("q", 2),))`. Both get the same checks and messages: one
error with a line for each bad setting. The table in docs/settings.md is generated from the fields; tests compare it and
`.env.example` with them.

Never put a DSN or a token into a message, a repr or an explanation.
"""

import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import attrs

from dataloader.flows.etl.declare.pipeline_config import PREFIX, PipelineSettings, read_settings
from dataloader.jobs.errors import ConfigError
from dataloader.jobs.former_names import former_arguments
from dataloader.jobs.loopback import is_loopback
from dataloader.jobs.model import DEFAULT_LEASE_S, MAX_LEASE_S, MIN_LEASE_S
from dataloader.jobs.notices import Target
from dataloader.jobs.process_outbox import Sink
from dataloader.jobs.secrets.masking import MASKED
from dataloader.supervisor import setting_kinds as kinds
from dataloader.supervisor.setting_kinds import Missing, RefusedSetting, SettingKind, quoted
from dataloader.supervisor.setting_lists import SINKS, TARGETS, TASKS, TOKENS, WORKERS, ApiToken, Worker

__all__ = ["ApiToken", "Settings", "Worker", "settings_table"]

CLIENT_VARIABLE: Final = "DL_TOKEN"
CLIENT_DESCRIPTION: Final = "API token that commands send with `--url`; not a setting of the service."


def _read_pipeline(value: object) -> PipelineSettings:
    if isinstance(value, PipelineSettings):
        return value
    if not isinstance(value, Mapping):
        raise RefusedSetting(_PIPELINE.allowed)
    return read_settings(value)


def _show_pipeline(settings: PipelineSettings) -> str:
    given = {PREFIX + name.upper(): value for name, value in settings.of_all.items()}
    for load, one in settings.of_one.items():
        given |= {f"{PREFIX}{load}__{name.upper()}": value for name, value in one.items()}
    return " ".join(f"{name}={value}" for name, value in given.items())


_PIPELINE: Final = SettingKind("variables such as DL_PIPELINE__RATE_MIN", _read_pipeline, _show_pipeline)


def _setting(
    name: str, kind: SettingKind, description: str, default: Any = None, *, optional: str = "", secret: bool = False
) -> Any:
    """Declare a setting. `optional` is the text for the table if there is no default value."""
    metadata = {"name": name, "kind": kind, "description": description, "optional": optional, "secret": secret}
    return attrs.field(default=default, metadata=metadata, repr=not secret)


@former_arguments(lock_dsn="direct_dsn")
@attrs.frozen(kw_only=True)
class Settings:
    """All settings of one process, checked. Durations are in seconds; docs/settings.md describes each setting (Q13).

    A field also takes the text that the environment variable would have. Without a `direct_dsn` all connections use
    `db_dsn`. If the two lead to different databases, the start of the service fails.

    Raises:
        ConfigError: one line for each setting with a value that is not allowed.
    """

    db_dsn: str | None = _setting(
        "DL_DB_DSN",
        kinds.DSN,
        "The database; also `postgresql+asyncpg://` and `postgres://`.",
        optional="an embedded PostgreSQL in `DL_DATA_DIR`",
        secret=True,
    )
    direct_dsn: str | None = _setting(
        "DL_DIRECT_DSN",
        kinds.DSN,
        "Address for the lock session and the listener that bypasses PgBouncer, if `DL_DB_DSN` leads there.",
        optional="the same as `DL_DB_DSN`",
        secret=True,
    )
    workers: tuple[Worker, ...] = _setting(
        "WORKERS_JSON",
        WORKERS,
        "Queues whose jobs this process runs, with the number of concurrent jobs of each.",
        (),
        optional="none; `serve --tasks`: `default` and the tasks' queues, each with ten concurrent jobs",
    )
    heartbeat_s: float = _setting(
        "DL_HEARTBEAT_SEC", kinds.seconds("10"), "Interval at which the leases of running jobs are renewed.", 10
    )
    default_lease_s: int = _setting(
        "DL_DEFAULT_LEASE_TTL_SEC",
        kinds.whole(MIN_LEASE_S, MAX_LEASE_S),
        "Lease of jobs without `lease_ttl_sec`: seconds without a heartbeat until another worker may run the job.",
        DEFAULT_LEASE_S,
    )
    reaper_period_s: float = _setting(
        "DL_REAPER_PERIOD_SEC", kinds.seconds("10"), "Interval at which the reaper searches for expired leases.", 10
    )
    claim_backoff_s: float = _setting(
        "DL_CLAIM_BACKOFF_SEC",
        kinds.seconds("15"),
        "Maximum time until a job whose `lock_key` is held is tried again.",
        15,
    )
    poll_s: float = _setting(
        "DL_POLL_SEC", kinds.seconds("5"), "Interval at which queues are polled without a notification.", 5
    )
    drain_timeout_s: float = _setting(
        "DL_DRAIN_TIMEOUT_SEC",
        kinds.seconds("30", zero=True),
        "After SIGTERM: time for running jobs to finish before they are stopped and returned to their queue.",
        30,
    )
    cancel_grace_s: float = _setting(
        "DL_CANCEL_GRACE_SEC",
        kinds.seconds("10", zero=True),
        "After a cancel: time before a handler that still runs is reported as stuck.",
        10,
    )
    child_grace_s: float = _setting(
        "DL_CHILD_GRACE_SEC",
        kinds.seconds("5", zero=True),
        "After SIGTERM to a task's child process: time before it is killed with its own child processes.",
        5,
    )
    child_idle_s: float = _setting(
        "DL_CHILD_IDLE_SEC", kinds.seconds("60"), "Time for which an idle child process is kept for the next job.", 60
    )
    dask: str | None = _setting(
        "DL_DASK",
        kinds.SCHEDULER,
        "Scheduler of the Dask cluster on which tasks with `dask=True` run (docs/process-isolation.md).",
        optional="none",
    )
    dask_tls_ca: Path | None = _setting(  # noqa: RUF009 - declares a field, as attrs.field does
        "DL_DASK_TLS_CA",
        kinds.FILE,
        "Trusted certificates for connections to tls:// schedulers.",
        optional="none",
    )
    dask_tls_cert: Path | None = _setting(  # noqa: RUF009 - as above
        "DL_DASK_TLS_CERT", kinds.FILE, "Certificate of this process for these connections.", optional="none"
    )
    dask_tls_key: Path | None = _setting(  # noqa: RUF009 - as above
        "DL_DASK_TLS_KEY", kinds.FILE, "Key of `DL_DASK_TLS_CERT`.", optional="in the certificate's file"
    )
    host: str = _setting(
        "DL_HOST",
        kinds.HOST,
        "Address of the HTTP API. All but loopback addresses need `DL_TOKENS`.",
        "127.0.0.1",
    )
    port: int = _setting("DL_PORT", kinds.whole(0, 65_535), "Port of the HTTP API; 0 selects a free one.", 8080)
    tokens: tuple[ApiToken, ...] = _setting(
        "DL_TOKENS",
        TOKENS,
        "API tokens with their roles.",
        (),
        optional="none: all users of this machine have access",
        secret=True,
    )
    public_url: str | None = _setting(
        "DL_PUBLIC_URL",
        kinds.PUBLIC_URL,
        "Address of the pages behind a proxy, which may strip its path.",
        optional="the address in the browser's request",
    )
    environment: str | None = _setting(
        "DL_ENVIRONMENT",
        kinds.LINE,
        "Name of this installation, shown on the admin pages. `production`, `staging`, `test` and `development` each "
        "have a color.",
        optional="none",
    )
    trusted_proxies: tuple[kinds.Network, ...] = _setting(
        "DL_TRUSTED_PROXIES",
        kinds.NETWORKS,
        "Proxies whose `X-Forwarded-For` names the client. Wrong tokens are throttled by the client's address.",
        (),
        optional="none: the client is the other end of the connection",
    )
    notify: tuple[Target, ...] = _setting(
        "DL_NOTIFY",
        TARGETS,
        "Webhooks and commands that receive failures (docs/notifications.md).",
        (),
        optional="none",
        secret=True,
    )
    sinks: tuple[Sink, ...] = _setting(
        "DL_SINKS",
        SINKS,
        "Webhooks and handlers that receive events of durable processes (docs/processes.md).",
        (),
        optional="none",
        secret=True,
    )
    max_body_bytes: int = _setting(
        "DL_MAX_BODY_BYTES", kinds.whole(1024, 1 << 30), "Maximum body of an HTTP request, in bytes.", 1 << 20
    )
    max_batch_body_bytes: int = _setting(
        "DL_MAX_BATCH_BODY_BYTES",
        kinds.whole(1024, 1 << 30),
        "Maximum body of a batch of triggers, in bytes.",
        8 << 20,
    )
    max_connections: int = _setting(
        "DL_MAX_CONNECTIONS",
        kinds.whole(8, 100_000),
        "Maximum number of HTTP connections; a new one closes the one that has been idle longest.",
        500,
    )
    max_waits: int = _setting(
        "DL_MAX_WAITS",
        kinds.whole(1, 100_000),
        "Maximum number of requests that wait for a job's change (`?wait=`).",
        200,
    )
    data_dir: Path = _setting(  # noqa: RUF009 - declares a field, as attrs.field does
        "DL_DATA_DIR", kinds.DIRECTORY, "Data directory of the embedded PostgreSQL.", ".dataloader"
    )
    pool_size: int = _setting(
        "DL_POOL_SIZE",
        kinds.whole(1, 50),
        "Connections in addition to the four dedicated ones. Reads over HTTP use all but one of them.",
        3,
    )
    transaction_pool_size: int = _setting(
        "DL_TRANSACTION_POOL_SIZE",
        kinds.whole(1, 50),
        "Maximum number of open connections for `job.transaction()`.",
        4,
    )
    statement_timeout_s: float = _setting(
        "DL_STATEMENT_TIMEOUT_SEC",
        kinds.seconds("30", most=kinds.MOST_OF_POSTGRES_S),
        "Maximum time of a statement of the queue.",
        30,
    )
    transaction_timeout_s: float = _setting(
        "DL_TRANSACTION_TIMEOUT_SEC",
        kinds.seconds("600", most=kinds.MOST_OF_POSTGRES_S),
        "Maximum time of a statement in `job.transaction()`, and of a pause between two.",
        600,
    )
    connect_timeout_s: float = _setting(
        "DL_CONNECT_TIMEOUT_SEC", kinds.seconds("10"), "Maximum time to connect to the database.", 10
    )
    migrate: bool = _setting("DL_MIGRATE", kinds.FLAG, "Whether `serve` migrates the schema.", default=True)
    retain_succeeded_days: int = _setting(
        "DL_RETAIN_SUCCEEDED_DAYS",
        kinds.whole(0, 36_500),
        "Days after which succeeded jobs are deleted; 0 keeps them.",
        0,
    )
    retain_failed_days: int = _setting(
        "DL_RETAIN_FAILED_DAYS", kinds.whole(0, 36_500), "Days after which failed jobs are deleted; 0 keeps them.", 0
    )
    retain_canceled_days: int = _setting(
        "DL_RETAIN_CANCELED_DAYS",
        kinds.whole(0, 36_500),
        "Days after which canceled jobs are deleted; 0 keeps them.",
        0,
    )
    retain_lost_days: int = _setting(
        "DL_RETAIN_LOST_DAYS", kinds.whole(0, 36_500), "Days after which lost jobs are deleted; 0 keeps them.", 0
    )
    retain_stats_days: int = _setting(
        "DL_RETAIN_STATS_DAYS",
        kinds.whole(0, 36_500),
        "Days after which statistics of runs are deleted; 0 keeps them.",
        400,
    )
    retain_errors_days: int = _setting(
        "DL_RETAIN_ERRORS_DAYS",
        kinds.whole(0, 36_500),
        "Days after which rows of the error log are deleted; 0 keeps them.",
        90,
    )
    retain_schedule_events_days: int = _setting(
        "DL_RETAIN_SCHEDULE_EVENTS_DAYS",
        kinds.whole(0, 36_500),
        "Days after which events of schedules (skipped times, pauses, changes) are deleted; 0 keeps them.",
        90,
    )
    retain_audit_days: int = _setting(
        "DL_RETAIN_AUDIT_DAYS",
        kinds.whole(0, 36_500),
        "Days after which rows of the audit log are deleted; 0 keeps them.",
        0,
    )
    retain_process_tasks_days: int = _setting(
        "DL_RETAIN_PROCESS_TASKS_DAYS",
        kinds.whole(0, 36_500),
        "Days after which ended tasks of processes are deleted, with their answers and idempotency keys; 0 keeps them.",
        0,
    )
    keep_process_events: int = _setting(
        "DL_KEEP_PROCESS_EVENTS",
        kinds.whole(0, 1_000_000_000),
        "Number of newest events that a durable process keeps; 0 keeps all.",
        0,
    )
    cancel_duplicates_of: tuple[str, ...] = _setting(
        "DL_CANCEL_DUPLICATES_OF",
        TASKS,
        "Tasks whose duplicates are canceled once a minute: of waiting jobs with the same args, only the best remains.",
        (),
        optional="none",
    )
    log_format: Literal["auto", "console", "json"] = _setting(
        "DL_LOG_FORMAT",
        kinds.choice("auto", "console", "json"),
        "Text or JSON; auto writes text if stderr is a terminal.",
        "auto",
    )
    log_level: Literal["debug", "info", "warning", "error", "critical"] = _setting(
        "DL_LOG_LEVEL",
        kinds.choice("debug", "info", "warning", "error", "critical"),
        "Lowest level that is logged.",
        "info",
    )
    log_lines_per_job: int = _setting(
        "DL_LOG_LINES_PER_JOB",
        kinds.whole(0, 1_000_000),
        "Lines of `job.log` that are stored per run of a job; in a flow, per load.",
        1000,
    )
    job_log_level: Literal["info", "warning", "error", "off"] = _setting(
        "DL_JOB_LOG_LEVEL",
        kinds.choice("info", "warning", "error", "off"),
        "Lowest level of `job.log` that also goes to the process's log; all lines are stored with the job.",
        "warning",
    )
    instance: str = _setting(
        "DL_INSTANCE",
        kinds.LINE,
        "Name of this process in `claimed_by` and in `/status`.",
        default=attrs.Factory(socket.gethostname),
        optional="the name of the host",
    )
    tables_at_once: int = _setting(
        "DL_DWD__PARALLEL_WORKERS",
        kinds.whole(1, 100),
        "Number of tables of a set of dimensions that are merged concurrently.",
        4,
    )
    pipeline: PipelineSettings = _setting(  # noqa: RUF009 - declares a field, as attrs.field does
        f"{PREFIX}…",
        _PIPELINE,
        "Settings of all loads, or of one (docs/loads/politeness.md).",
        default=attrs.Factory(PipelineSettings),
        optional="those of docs/loads/politeness.md",
    )

    def __attrs_post_init__(self) -> None:
        """Replace texts by values, and raise one error for all values that are not allowed."""
        problems: list[str] = []
        for field in attrs.fields(type(self)):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            try:
                object.__setattr__(self, field.name, field.metadata["kind"].read(value))
            except* RefusedSetting as several:
                problems += [
                    _refused_setting(field, value, refused)
                    for refused in several.exceptions
                    if isinstance(refused, RefusedSetting)
                ]
            except* ValueError as several:  # errors of the load settings, which name the variable
                problems += map(str, several.exceptions)
        problems = problems or self._contradictions()
        if problems:
            raise ConfigError("\n".join(problems))

    def _contradictions(self) -> list[str]:
        found = []
        if self.heartbeat_s >= self.default_lease_s:
            found.append(
                f"DL_HEARTBEAT_SEC: must be less than DL_DEFAULT_LEASE_TTL_SEC ({self.default_lease_s}), preferably a "
                f"sixth of it, not '{self.heartbeat_s:g}'"
            )
        if self.max_batch_body_bytes < self.max_body_bytes:
            found.append(
                f"DL_MAX_BATCH_BODY_BYTES: must be at least DL_MAX_BODY_BYTES ({self.max_body_bytes}), "
                f"not '{self.max_batch_body_bytes}'"
            )
        if not self.tokens and not is_loopback(self.host):
            found.append(
                "DL_HOST: must be a loopback address such as 127.0.0.1 unless DL_TOKENS is set, "
                f"not {quoted(self.host)}"
            )
        if self.direct_dsn is not None and self.db_dsn is None:
            shown = quoted(kinds.DSN.show(self.direct_dsn))
            found.append(f"DL_DIRECT_DSN: must be set together with DL_DB_DSN, not alone ({shown})")
        return found


def settings_table() -> str:
    """Return the table for docs/settings.md."""
    lines = ["| variable | default | allowed | what it does |", "| --- | --- | --- | --- |"]
    for field in attrs.fields(Settings):
        about = field.metadata
        default = about["optional"] or f"`{about['kind'].show(field.default)}`"
        allowed = about["kind"].allowed
        if not about["optional"]:  # the default is an example
            allowed = allowed.partition(", for example ")[0]
        cells = (f"`{about['name']}`", default, allowed, about["description"])
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    lines.append(f"| `{CLIENT_VARIABLE}` | none | text | {CLIENT_DESCRIPTION} |")
    return "\n".join(lines) + "\n"


def _refused_setting(field: "attrs.Attribute[Any]", value: object, refused: RefusedSetting) -> str:
    about = field.metadata
    if isinstance(refused, Missing):
        return f"{about['name']}: {refused.where} is required; it must be {refused.allowed}"
    if refused.shown is not None:
        shown = refused.shown
    elif about["secret"]:
        # Show only the scheme, which is the most common mistake; any other part may be the password.
        scheme = re.match(r"[a-z+]{1,30}://", str(value))
        shown = f"{scheme[0] if scheme else ''}{MASKED}"
    else:
        shown = str(value)
    where = f"{refused.where} " if refused.where else ""
    return f"{about['name']}: {where}must be {refused.allowed}, not {quoted(shown)}"
