"""dataloader: durable jobs and ETL from a queue in PostgreSQL, in one Trio process.

The names below are public; all others may change. Names that a module of tasks needs are imported immediately. Names
that run tasks (the supervisor, the settings) are imported at their first use, so that `dataloader status` loads no web
server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from dataloader.jobs.client.client import Client
from dataloader.jobs.client.jobs import Jobs
from dataloader.jobs.client.processes import ProcessClient
from dataloader.jobs.errors import (
    AccessDenied,
    ActorGaveUp,
    BadRequest,
    ConfigError,
    Conflict,
    DataloaderError,
    Draining,
    EmbeddedDatabaseError,
    IdempotencyConflict,
    JobNotFound,
    JobStopped,
    LeaseLost,
    LimitReached,
    SchemaError,
    StoreError,
    StoreUnavailable,
)
from dataloader.jobs.former_names import refuse_former_name
from dataloader.jobs.hooks import Resource
from dataloader.jobs.job import (
    AioJob,
    AioProcessJob,
    AnyJob,
    Job,
    ProcessJob,
    ThreadJob,
    ThreadTransaction,
    Transaction,
)
from dataloader.jobs.limits import RateLimit, Supplier
from dataloader.jobs.listings import JobFilter
from dataloader.jobs.model import Enqueued, JobEvent, JobRecord, NewJob
from dataloader.jobs.new_job import new_job
from dataloader.jobs.notices import CommandTarget, WebhookTarget
from dataloader.jobs.outcomes import Canceled, Finish, GiveUp, Next, Retry, Snooze
from dataloader.jobs.process_listings import ProcessFilter, ProcessRecord
from dataloader.jobs.process_outbox import (
    Delivery,
    HeldDelivery,
    HeldDeliveryPage,
    HeldFilter,
    Sink,
    SinkRecord,
)
from dataloader.jobs.process_requests import ProcessImport, ProcessRequest
from dataloader.jobs.processes import CallTimeout, ProcessConflict, ProcessFailed, ProcessNotFound, Refused
from dataloader.jobs.retry import RetryPolicy
from dataloader.jobs.run_stats import RunStats, StatsFilter
from dataloader.jobs.states import Status
from dataloader.jobs.task import Task
from dataloader.jobs.tasks import Tasks

if TYPE_CHECKING:
    from dataloader.actors.job_log_handler import JobLogHandler
    from dataloader.store.embedded.postgres import embedded_postgres
    from dataloader.supervisor.drain import DrainReport
    from dataloader.supervisor.logs import configure_logging
    from dataloader.supervisor.open_client import open_client
    from dataloader.supervisor.settings import ApiToken, Settings, Worker
    from dataloader.supervisor.settings_layers import load_settings
    from dataloader.supervisor.supervisor import Supervisor, open_supervisor

__all__ = [
    "AccessDenied",
    "ActorGaveUp",
    "AioJob",
    "AioProcessJob",
    "AnyJob",
    "ApiToken",
    "BadRequest",
    "CallTimeout",
    "Canceled",
    "Client",
    "CommandTarget",
    "ConfigError",
    "Conflict",
    "DataloaderError",
    "Delivery",
    "DrainReport",
    "Draining",
    "EmbeddedDatabaseError",
    "Enqueued",
    "Finish",
    "GiveUp",
    "HeldDelivery",
    "HeldDeliveryPage",
    "HeldFilter",
    "IdempotencyConflict",
    "Job",
    "JobEvent",
    "JobFilter",
    "JobLogHandler",
    "JobNotFound",
    "JobRecord",
    "JobStopped",
    "Jobs",
    "LeaseLost",
    "LimitReached",
    "NewJob",
    "Next",
    "ProcessClient",
    "ProcessConflict",
    "ProcessFailed",
    "ProcessFilter",
    "ProcessImport",
    "ProcessJob",
    "ProcessNotFound",
    "ProcessRecord",
    "ProcessRequest",
    "RateLimit",
    "Refused",
    "Resource",
    "Retry",
    "RetryPolicy",
    "RunStats",
    "SchemaError",
    "Settings",
    "Sink",
    "SinkRecord",
    "Snooze",
    "StatsFilter",
    "Status",
    "StoreError",
    "StoreUnavailable",
    "Supervisor",
    "Supplier",
    "Task",
    "Tasks",
    "ThreadJob",
    "ThreadTransaction",
    "Transaction",
    "WebhookTarget",
    "Worker",
    "configure_logging",
    "embedded_postgres",
    "load_settings",
    "new_job",
    "open_client",
    "open_supervisor",
]

_WHEN_ASKED_FOR: Final = {
    "ApiToken": "dataloader.supervisor.settings",
    "DrainReport": "dataloader.supervisor.drain",
    "JobLogHandler": "dataloader.actors.job_log_handler",
    "Settings": "dataloader.supervisor.settings",
    "Supervisor": "dataloader.supervisor.supervisor",
    "Worker": "dataloader.supervisor.settings",
    "configure_logging": "dataloader.supervisor.logs",
    "embedded_postgres": "dataloader.store.embedded.postgres",
    "load_settings": "dataloader.supervisor.settings_layers",
    "open_client": "dataloader.supervisor.open_client",
    "open_supervisor": "dataloader.supervisor.supervisor",
}
_FORMER: Final = {
    "Budget": "RateLimit",
    "open_jobs": "open_client, and the client has the queue as client.jobs",
    "open_processes": "open_client, and the client has the processes as client.processes",
}
"""Former public names, and their replacements."""


def __getattr__(name: str) -> Any:
    """Import a name of the supervisor's side at its first use.

    Raises `ImportError`, with the new name, for a name that has changed.
    """
    refuse_former_name(__name__, name, _FORMER)
    module = _WHEN_ASKED_FOR.get(name)
    if module is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    value = globals()[name] = getattr(import_module(module), name)
    return value
