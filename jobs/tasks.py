"""Registry of tasks: names mapped to the user's functions and how to run them.

A user creates one `Tasks`, decorates functions, and names it on the command line (`--tasks my_module:tasks`). `include`
joins the registries of a large program. It is an object that is passed along, not a global, so that tests and embedded
supervisors can have several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from fnmatch import fnmatchcase
from typing import Any, Protocol, TypeVar, Unpack, overload

import attrs

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.hooks import Around, Resource, around_of, resource_of
from dataloader.jobs.job import AioJob, AioProcessJob, Job, ProcessJob, ThreadJob
from dataloader.jobs.limits import Supplier, TaskLimits
from dataloader.jobs.message_source import MessageSource
from dataloader.jobs.model import (
    MAX_NAME,
    check_name,
)
from dataloader.jobs.module_names import Place
from dataloader.jobs.schedules import Schedule
from dataloader.jobs.stages import MIN_STAGES, Stages
from dataloader.jobs.task import BUILT_IN, A, Task, check_task
from dataloader.jobs.task_options import TaskOptions, check_options, task_of

T = TypeVar("T")
W = TypeVar("W", bound=Around)


_LOAD_OF_ROWS = Place("dataloader.flows.etl.run.load_task", "add_load_of_rows")
"""In a layer above this one, so it is imported when it is used."""


class _Typed(Protocol[A]):
    """Decorator for a task with `args=`."""

    def __call__(
        self,
        handler: Callable[[Job[A]], Any]
        | Callable[[AioJob[A]], Any]
        | Callable[[ThreadJob[A]], Any]
        | Callable[[ProcessJob[A]], Any]
        | Callable[[AioProcessJob[A]], Any],
        /,
    ) -> Task[A]: ...  # pragma: no cover


class Tasks(Mapping[str, Task[Any]]):
    """Tasks that a process knows, by name."""

    def __init__(self) -> None:
        """Start with an empty registry."""
        self._tasks: dict[str, Task[Any]] = {}
        self._resources: list[Resource[Any]] = []
        self._around: list[Around] = []
        self._messages: list[MessageSource] = []
        self._schedules: dict[str, Schedule] = {}
        self._suppliers: dict[str, Supplier] = {}

    @overload
    def task(self, name: str, *, args: type[A], **options: Unpack[TaskOptions]) -> _Typed[A]: ...

    @overload
    def task(self, name: str, *, args: None = ..., **options: Unpack[TaskOptions]) -> _Typed[dict[str, Any]]: ...

    def task(
        self, name: str, *, args: type[Any] | None = None, **options: Unpack[TaskOptions]
    ) -> Callable[[Callable[..., Any]], Task[Any]]:
        """Register the decorated function as `name`, and return a `Task`, which can be called like the function.

        An async function is called with a `Job` on Trio or, with `asyncio=True`, with an `AioJob` on asyncio. A plain
        function is called with a `ThreadJob` in a thread. With `process=True` the function runs in a child process,
        with `dask=` in one beside a worker of a Dask cluster: a plain one gets a `ProcessJob`, an asyncio one an
        `AioProcessJob`. Both must be defined at the top level of a module.

        Args:
            name: the task's name.
            args: the type of `job.args`: an attrs class, a dataclass, a msgspec struct or a TypedDict; None: a
                dictionary.
            options: fields of `Task`, `TaskLimits` and `Uniqueness`. `unique` is True (jobs with equal args are the
                same), names of fields, or a template. A `supplier` is a `Supplier`, or the name of a declared one.

        Raises `ValueError` for a name that is taken, built in, or not storable, for values out of range, and for a
        function that a worker cannot call with only the job, or that is a generator. Raises `TypeError` for an option
        that does not exist.
        """
        if not isinstance(name, str):
            raise BadRequest("task", f'must be a name, as in @tasks.task("load.year"), not {name!r:.60}')
        check_name("task", name, MAX_NAME)
        if name in self._tasks:
            message = f"task {name!r} is registered twice: {self._tasks[name].handler!r} already has this name"
            raise ValueError(message)
        if any(fnmatchcase(name, own) for own in BUILT_IN):
            raise ValueError(f"task {name!r}: {', '.join(BUILT_IN)} are names of built-in tasks")
        try:
            check_options(options)
        except TypeError as error:
            raise TypeError(f"task {name!r}: {error}") from None
        supplier = options.get("supplier")
        if isinstance(supplier, Supplier):
            self.supplier(supplier)
            options["supplier"] = supplier.name

        def register(handler: Callable[..., Any]) -> Task[Any]:
            try:
                task = self._tasks[name] = task_of(name, handler, args, options)
            except ValueError as error:
                raise ValueError(f"task {name!r}: {error}") from error
            return task

        return register

    def load(self, name: str, *, table: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
        """Register the decorated generator, which yields the rows of a table, as a load; return the `Load`.

        Args:
            name: name of the load and of its task.
            table: the `dataloader.flows.etl.Table` of the rows.
            options: fields of `dataloader.flows.etl.Load`, and of `dataloader.flows.etl.Rows`.

        Raises `ValueError` and `TypeError` as `Load`, `Rows` and `task` do.
        """
        register: Any = _LOAD_OF_ROWS.find()
        return lambda function: register(self, name, function, table, options)

    def stages(self, name: str, *stages: Task[Any] | Callable[..., Any], queue: str | None = None) -> Task[Any]:
        """Declare jobs with stages, and return the task `name` by which they are enqueued.

        Each stage is a task of this registry called `name.stage`, with its own queue, limits and retry policy. A
        function that is not a task yet becomes the task `name.function`, in `queue`. A job begins with the first stage.
        The return value of a stage's handler is `job.previous` of the next stage, or the job's result after the last
        one, unless it is `Next` or `Finish`. The job stays one row: its args, lock_key and root do not change.

        The `queue`, `priority` and `lease_ttl_sec` of a stage's task apply if they are set, and `max_attempts`, 5 by
        default.

        Raises `ValueError` for fewer than two stages, for tasks with other names or that are stages already, for a
        queue that only some of them have, and for a lock_key of a later stage.
        """
        if len(stages) < MIN_STAGES:
            raise ValueError(f"stages of {name!r}: there must be at least {MIN_STAGES}, not {len(stages)}")
        named: list[str] = []
        for stage in stages:
            task = stage if isinstance(stage, Task) else self.task(f"{name}.{stage.__name__}", queue=queue)(stage)
            short = task.name.removeprefix(f"{name}.")
            if short in {task.name, ""} or self._tasks.get(task.name) is not task:
                raise ValueError(
                    f"stages of {name!r}: each must be a function, or a task of this registry named '{name}.…' that is"
                    f" not yet a stage, not {task.name!r}"
                )
            named.append(short)
            self._check_stage(name, task, first=self._tasks[f"{name}.{named[0]}"], names=named)
        whole = Stages(name, tuple(named))
        for short in named:
            self._tasks[whole.task_of(short)] = attrs.evolve(self._tasks[whole.task_of(short)], stages=whole)
        first = self._tasks[whole.first_task]
        self.task(name)(first.handler)
        # Its jobs are the first stage's, and wait in the limit queue of that stage.
        self._tasks[name] = attrs.evolve(first, name=name, limits=TaskLimits())
        return self._tasks[name]

    def _check_stage(self, whole: str, task: Task[Any], *, first: Task[Any], names: list[str]) -> None:
        if task.stages is not None or names.count(names[-1]) > 1:
            raise ValueError(f"stages of {whole!r}: {task.name!r} is already a stage")
        if (task.queue is None) != (first.queue is None):
            without = first if first.queue is None else task
            raise ValueError(
                f"stages of {whole!r}: {without.name!r} has no queue, but other stages have one; give it a queue"
            )
        if task.unique is not None:
            raise ValueError(f"stages of {whole!r}: unique of {task.name!r}: jobs with stages cannot be unique")
        if task.lock_key is not None and task is not first:
            raise ValueError(
                f"stages of {whole!r}: lock_key of {task.name!r}: set it at the first stage, whose key a job keeps"
            )

    @overload
    def resource(self, function: Callable[[], AbstractAsyncContextManager[T]], /) -> Resource[T]: ...

    @overload
    def resource(
        self, function: None = None, /, *, asyncio: bool = False
    ) -> Callable[[Callable[[], AbstractAsyncContextManager[T]]], Resource[T]]: ...

    def resource(
        self, function: Callable[[], AbstractAsyncContextManager[Any]] | None = None, /, *, asyncio: bool = False
    ) -> Any:
        """Declare a resource, such as a connection pool, which a process opens once for its jobs.

        The decorated function takes no arguments and returns an async context manager
        (`@contextlib.asynccontextmanager`), on Trio or, with `asyncio=True`, on asyncio. It is entered before the first
        job is claimed, after the resources declared before it, and left when the last job has ended. `job.resource()`
        returns the yielded value, by its type or by the declaration that is returned here.

        Raises `ValueError` for a function that does not return an async context manager.
        """

        def register(function: Callable[[], AbstractAsyncContextManager[Any]]) -> Resource[Any]:
            resource = resource_of(function, asyncio=asyncio)
            self._resources.append(resource)
            return resource

        return register if function is None else register(function)

    def check_args(self, name: str, check: Callable[[Mapping[str, Any]], object]) -> None:
        """Check the args of requests where the task `name` is known: `check` raises `BadRequest`."""
        self._tasks[name] = attrs.evolve(self._tasks[name], check=check)

    def call_asyncio(self, name: str) -> None:
        """Open the asyncio loop of handlers for the task `name` too, whose handler on Trio calls asyncio functions."""
        self._tasks[name] = attrs.evolve(self._tasks[name], calls_asyncio=True)

    def schedule(self, name: str, *, task: str | Task[Any], **fields: Any) -> Schedule:
        """Declare a schedule, which adds jobs of `task` automatically; `fields` are those of `Schedule`.

        Processes store it when they start, and the last one wins. A schedule that is no longer declared is retired.

        Raises `ValueError` for a name that is taken, and `BadRequest`, which names the schedule, for values that
        `Schedule` refuses.
        """
        if name in self._schedules:
            raise ValueError(f"schedule {name!r} is declared twice")
        known = self._tasks.get(task) if isinstance(task, str) else task
        args = fields.pop("args", None)
        task_name = task if isinstance(task, str) else task.name
        try:
            if known is not None and known.args is not None:
                args = known.args.encode({} if args is None else args)
            schedule = Schedule.of_spec(name, {**fields, "task": task_name, "args": dict(args or {})})
            check_task(schedule.task)
            schedule.check_job()
        except BadRequest as error:
            raise BadRequest(f"schedule {name!r}: {error.field}", error.message) from None
        self._schedules[name] = schedule
        return schedule

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """Schedules declared by `schedule`, in order."""
        return tuple(self._schedules.values())

    def messages(self, source: MessageSource) -> None:
        """Read a source of messages (`dataloader.flows.messages`) in each process with these tasks.

        Raises `ValueError` if a source of that name is declared already.
        """
        if any(other.name == source.name for other in self._messages):
            raise ValueError(f"messages: the source {source.name!r} is already declared")
        self._messages.append(source)

    def supplier(self, supplier: Supplier) -> Supplier:
        """Declare a supplier, which tasks and sources of loads name, and return it.

        A supplier that is given to a task need not be declared. Raises `ValueError` if another one has its name.
        """
        if self._suppliers.setdefault(supplier.name, supplier) != supplier:
            raise ValueError(f"supplier {supplier.name!r} is declared twice, with other limits")
        return supplier

    @property
    def suppliers(self) -> tuple[Supplier, ...]:
        """Suppliers declared by `supplier` and tasks."""
        return tuple(self._suppliers.values())

    def around(self, function: W) -> W:
        """Wrap every run in the decorated function, and return it unchanged.

        It is called with the job and returns a context manager (`@contextlib.contextmanager`), in which a handler of
        any flavor runs: in the same task or thread, with the same context variables. An error of the handler passes
        through it. The first declared one is the outermost.

        Raises `ValueError` for a function that does not return a context manager.
        """
        self._around.append(around_of(function))
        return function

    @property
    def resources(self) -> tuple[Resource[Any], ...]:
        """Resources declared by `resource`, in order."""
        return tuple(self._resources)

    @property
    def message_sources(self) -> tuple[MessageSource, ...]:
        """Sources declared by `messages`, in order."""
        return tuple(self._messages)

    @property
    def wraps(self) -> tuple[Around, ...]:
        """Functions declared by `around`, in order."""
        return tuple(self._around)

    def include(self, other: Tasks) -> None:
        """Add every task of `other`, its resources, and its wrappers, which then wrap all runs.

        Raises `ValueError` if a name is in both.
        """
        both = self._tasks.keys() & other._tasks.keys()
        if both:
            message = f"tasks registered in both registries: {', '.join(sorted(both))}"
            raise ValueError(message)
        self._tasks.update(other._tasks)
        self._resources += other._resources
        self._around += other._around
        for source in other._messages:
            self.messages(source)
        for supplier in other._suppliers.values():
            self.supplier(supplier)
        for name, schedule in other._schedules.items():
            if name in self._schedules:
                raise ValueError(f"schedule {name!r} is declared in both registries")
            self._schedules[name] = schedule

    def built_in(self, own: Iterable[Task[Any]]) -> None:
        """Register tasks of a library on top of the queue, whose names users cannot take."""
        for task in own:
            if task.name in self._tasks:
                raise ValueError(f"task {task.name!r} is registered twice")
            self._tasks[task.name] = task

    def beside(self, own: Iterable[Task[Any]]) -> Tasks:
        """Return another registry with these tasks and built-in ones of a process."""
        both = Tasks()
        both.include(self)
        both._tasks.update({task.name: task for task in own})
        return both

    def __getitem__(self, name: str) -> Task[Any]:
        """Return the task called `name`. Raises `KeyError` if there is none."""
        return self._tasks[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, in order of registration."""
        return iter(self._tasks)

    def __len__(self) -> int:
        """Return the number of tasks."""
        return len(self._tasks)
