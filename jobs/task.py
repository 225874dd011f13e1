"""Task: a function with a name, and how its jobs run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import translate
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Protocol, Unpack

import attrs

from dataloader.jobs.args import ArgsType
from dataloader.jobs.errors import BadRequest
from dataloader.jobs.keys import KeySpec, check_key_spec
from dataloader.jobs.limits import TaskLimits
from dataloader.jobs.model import (
    MAX_ATTEMPTS,
    MAX_INT,
    MAX_LEASE_S,
    MAX_NAME,
    MIN_LEASE_S,
    Enqueued,
    JobOptions,
    check_between,
    check_name,
)
from dataloader.jobs.retry import RetryPolicy
from dataloader.jobs.stages import Stages
from dataloader.jobs.unique import Uniqueness

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # A bare `Job` belongs to a task without a type of args.
    A = TypeVar("A", default=dict[str, Any])
else:
    from typing import TypeVar

    A = TypeVar("A")

DEFAULT_RETRY: Final = RetryPolicy()
MAX_JOBS_OF_A_CHILD: Final = 1_000
"""Number of jobs after which a child process is replaced."""
MIN_MEMORY_MB: Final = 64
"""Minimum memory limit: an interpreter with our own modules needs half of it."""
BUILT_IN: Final = ("process.*", "notify.*", "migrate")
"""Built-in tasks: users cannot register them, and `dl_enqueue` refuses them (it has the same list)."""


_BUILT_IN_NAME: Final = re.compile("|".join(map(translate, BUILT_IN)))


def check_task(name: str) -> None:
    """Raise `BadRequest` for a built-in task: only we add its jobs."""
    if _BUILT_IN_NAME.match(name):
        raise BadRequest("task", f"must not be {name!r:.60}: {', '.join(BUILT_IN)} are names of built-in tasks")


class Enqueues(Protocol):
    """Object to which a job can be added: a `Jobs`, a job's handle, or a transaction."""

    async def enqueue(self, task: str | Task[A], args: A | Mapping[str, Any] | None = None, **options: Any) -> Enqueued:
        """Add a job."""


@attrs.frozen(kw_only=True)
class Task(Generic[A]):
    """Task: the function to call for a job, and how.

    `timeout_s` bounds one run, in seconds; None leaves only the lease. `is_async` is True for an async function, on
    Trio or, with `asyncio`, on asyncio; a plain function runs in a thread. `args` reads a job's arguments; None means a
    dictionary.

    With `process` the function runs in a separate process, with at most `memory_mb` megabytes of memory. The process is
    replaced after `max_jobs` jobs. With `dask`, a scheduler's address, it runs in such a process beside a worker of
    that Dask cluster; with True the address is DL_DASK.

    `queue`, `priority`, `lock_key`, `max_attempts` and `lease_ttl_sec` (seconds) are defaults for requests, for every
    way to enqueue a job: a process stores them in the database, like the `limits`. `lock_key` is a template,
    `"rates:{year}"`, or names of fields, `("source", "year")`. `unique` says which of its jobs are the same, and how
    they are handled. `stages` are those of which the task is one, or the whole (`Tasks.stages`). `check` raises
    `BadRequest` for args that its jobs refuse, if `args` is not a type. `calls_asyncio` says that its handler, on Trio,
    calls asyncio functions of a load.
    """

    name: str
    handler: Callable[..., Any]
    is_async: bool
    asyncio: bool = False
    calls_asyncio: bool = attrs.field(default=False, eq=False, repr=False)
    process: bool = False
    dask: str | Literal[True] | None = None
    memory_mb: int | None = None
    max_jobs: int = MAX_JOBS_OF_A_CHILD
    retry: RetryPolicy = DEFAULT_RETRY
    timeout_s: float | None = None
    args: ArgsType[A] | None = attrs.field(default=None, eq=False)
    queue: str | None = None
    priority: int | None = None
    lock_key: KeySpec | None = None
    max_attempts: int | None = None
    lease_ttl_sec: int | None = None
    unique: Uniqueness | None = None
    limits: TaskLimits = attrs.field(factory=TaskLimits)
    description: str = ""
    stages: Stages | None = None
    check: Callable[[Mapping[str, Any]], object] | None = attrs.field(default=None, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        """Refuse values out of range."""
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise BadRequest("timeout_s", f"must be a number of seconds greater than 0, not {self.timeout_s!r}")
        if self.queue is not None:
            check_name("queue", self.queue, MAX_NAME)
        for name, value, low, high in (
            ("priority", self.priority, 0, MAX_INT),
            ("max_attempts", self.max_attempts, 1, MAX_ATTEMPTS),
            ("lease_ttl_sec", self.lease_ttl_sec, MIN_LEASE_S, MAX_LEASE_S),
            ("memory_mb", self.memory_mb, MIN_MEMORY_MB, MAX_INT),
            ("max_jobs", self.max_jobs, 1, MAX_INT),
        ):
            if value is not None:
                check_between(name, value, low, high)
        self._check_place()
        if self.lock_key is not None:
            check_key_spec("lock_key", self.lock_key, None if self.args is None else self.args.fields)
        if self.unique is not None:
            self.unique.check_fields(None if self.args is None else self.args.fields)

    def _check_place(self) -> None:
        """Refuse a place where the function cannot run."""
        if not self.in_child and (self.memory_mb is not None or self.max_jobs != MAX_JOBS_OF_A_CHILD):
            raise BadRequest("memory_mb, max_jobs", "need process=True or dask=")
        if self.process and self.dask is not None:
            raise BadRequest("process, dask", "cannot be combined; use one of them")
        if self.dask is not None and self.dask is not True and not (isinstance(self.dask, str) and self.dask):
            raise BadRequest("dask", f"must be the address of a scheduler, or True for DL_DASK, not {self.dask!r:.60}")
        if self.in_child and self.is_async and not self.asyncio:
            raise BadRequest(
                self.kind,
                "needs a plain function, or an async function with asyncio=True; Trio functions are not supported",
            )

    @property
    def in_child(self) -> bool:
        """True if the function runs in a separate process, here or beside a Dask worker."""
        return self.process or self.dask is not None

    @property
    def kind(self) -> Literal["dask", "process", "async", "thread"]:
        """Place where the function runs."""
        if self.in_child:
            return "process" if self.process else "dask"
        return "async" if self.is_async else "thread"

    @property
    def declared_limits(self) -> TaskLimits:
        """Limits that the program declares and operators may override."""
        return attrs.evolve(self.limits, max_attempts=self.max_attempts)

    def __call__(self, job: Any) -> Any:
        """Call the function as if it were not decorated."""
        return self.handler(job)

    async def enqueue(self, jobs: Enqueues, args: A | None = None, **options: Unpack[JobOptions]) -> Enqueued:
        """Add a job of this task by a `Jobs`, or by a job's handle or transaction; `options` are those of `new_job`.

        Raises `BadRequest` for args that are not of the task's type, and the errors of `jobs.enqueue`.
        """
        return await jobs.enqueue(self, args, **options)
