"""Defines types of processes: their steps, and how these are run.

    payments = processes.define("payment", state=Payment, step_timeout_s=30)

    @payments.init
    async def begin(p: Process[Payment], amount: int) -> Done: ...

A step takes the process, and one argument if it is given any; its type is read from the annotation.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, Generic, Literal, TypeVar, overload

import attrs
import msgspec
import trio

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.fault_texts import in_our_words
from dataloader.jobs.model import check_name
from dataloader.jobs.process_outbox import MAX_SINK, SinkHandler
from dataloader.jobs.processes import MAX_METHOD, StepResult, Transient, check_type
from dataloader.jobs.retry import RetryPolicy

S = TypeVar("S")
Step = Callable[..., Awaitable[StepResult]]
F = TypeVar("F", bound=Step)
U = TypeVar("U", bound=Callable[[Any, int], Any])
H = TypeVar("H", bound=SinkHandler)

DEFAULT_RETRY: Final = RetryPolicy(base_s=5, factor=1)
MAX_TRIES: Final = 3
CRASHES_AGAIN: Final = 3
"""How often a step is run again that has lost its worker, where that is allowed."""


@attrs.frozen
class StepFunction:
    """A step's function, and the type of its argument; `takes` tells whether it has one."""

    function: Step
    takes: bool
    args: Any = Any

    def arguments(self, args: Any) -> tuple[Any, ...]:
        """What the function is called with besides the process. Raises `BadRequest` for args that do not fit."""
        if not self.takes:
            if args is not None:
                raise BadRequest("args", "must be left out: this step takes none")
            return ()
        return (decoded("args", args, self.args),)


def decoded(name: str, value: Any, kind: Any) -> Any:
    """A JSON value as an instance of a type. Raises `BadRequest` with the path of what does not fit."""
    if kind is Any:
        return value
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise BadRequest(f"{name}{path.removesuffix('`')}", in_our_words(message, kind)) from error


@attrs.define(eq=False, kw_only=True)
class ProcessType(Generic[S]):
    """A type of processes. Made by `Processes.define`."""

    name: str
    state: Any = Any
    version: int = 1
    step_timeout_s: float = 60.0
    retry: RetryPolicy = DEFAULT_RETRY
    max_tries: int = MAX_TRIES
    retry_on: tuple[type[Exception], ...] = (Transient, OSError, TimeoutError, trio.TooSlowError)
    on_crash: Literal["error", "again"] = "error"
    steps: dict[str, StepFunction] = attrs.field(factory=dict, init=False)
    calls: dict[str, StepFunction] = attrs.field(factory=dict, init=False)
    upgrades: Callable[[Any, int], Any] | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        """Refuse settings that are out of range."""
        check_type("name", self.name)
        if not self.step_timeout_s > 0:
            raise BadRequest(
                "step_timeout_s", f"must be a number of seconds greater than 0, not {self.step_timeout_s!r}"
            )
        if self.version < 1:
            raise BadRequest("version", f"must be an integer of at least 1, not {self.version}")
        if self.max_tries < 1:
            raise BadRequest("max_tries", f"must be an integer of at least 1, not {self.max_tries}")

    @property
    def queue(self) -> str:
        """The queue of its wake-up jobs."""
        return f"process.{self.name}"

    @property
    def tasks(self) -> list[str]:
        """The tasks of its wake-up jobs: of its version, and of all before it if it can upgrade their states.

        Workers of older versions do not know them, and leave the jobs to others.
        """
        first = self.version if self.upgrades is None else 1
        return [f"process.{self.name}.v{version}" for version in range(self.version, first - 1, -1)]

    @property
    def crashes(self) -> int:
        """How often in a row a step is run again that has lost its worker."""
        return CRASHES_AGAIN if self.on_crash == "again" else 0

    def init(self, function: F) -> F:
        """Declare the decorated function as the first step."""
        return self._declare("init", function)

    def timeout(self, function: F) -> F:
        """Declare the decorated function as what a timer runs."""
        return self._declare("timeout", function)

    def repair(self, function: F) -> F:
        """Declare the decorated function as what mends a process in error."""
        return self._declare("repair", function)

    def call(self, function: F) -> F:
        """Declare the decorated function as a method that clients call by its name."""
        name = function.__name__
        check_name("method", name, MAX_METHOD)
        if name in self.calls:
            raise ValueError(f"process type {self.name!r}: the method {name!r} is declared twice")
        self.calls[name] = _step(self.name, function)
        return function

    def upgrade(self, function: U) -> U:
        """Declare the decorated function as the one that upgrades states of older versions.

        It takes the state as JSON and its version, and returns the state of this version: an instance of `state=`, or
        the JSON that stands for one. Its result is stored with the next step that is done. Without it, processes of
        older versions wait for workers of those versions.
        """
        if self.upgrades is not None:
            raise ValueError(f"process type {self.name!r}: upgrade is declared twice")
        if inspect.iscoroutinefunction(function):
            raise ValueError(f"process type {self.name!r}: {function.__qualname__} must be a plain function, not async")
        self.upgrades = function
        return function

    def _declare(self, kind: str, function: F) -> F:
        if kind in self.steps:
            raise ValueError(f"process type {self.name!r}: {kind} is declared twice")
        self.steps[kind] = _step(self.name, function)
        return function

    def step(self, kind: str, method: str | None) -> StepFunction:
        """The function of a task. Raises `BadRequest` for what the type does not have."""
        found = self.calls.get(method or "") if kind == "call" else self.steps.get(kind)
        if found is None:
            if kind == "call":
                known = ", ".join(self.calls) or "none"
                raise BadRequest("method", f"must be a method of {self.name} ({known}), not {method!r:.60}")
            raise BadRequest("kind", f"must be a step of {self.name}, which has no {kind}")
        return found


def _step(name: str, function: Step) -> StepFunction:
    if not inspect.iscoroutinefunction(function):
        raise ValueError(f"process type {name!r}: {function.__qualname__} must be an async function")
    parameters = list(inspect.signature(function).parameters.values())
    if not 1 <= len(parameters) <= 2:
        raise ValueError(
            f"process type {name!r}: {function.__qualname__} must take the process, and at most one argument"
        )
    if len(parameters) == 1:
        return StepFunction(function, takes=False)
    kind = typing.get_type_hints(function).get(parameters[1].name, Any)
    return StepFunction(function, takes=True, args=kind)


@attrs.define(eq=False)
class Processes:
    """The types of processes of a program."""

    types: dict[str, ProcessType[Any]] = attrs.field(factory=dict, init=False)
    sinks: dict[str, SinkHandler] = attrs.field(factory=dict, init=False)

    def sink(self, name: str) -> Callable[[H], H]:
        """Declare the decorated async function as the handler of a sink, which `DL_SINKS` names to be told.

        It gets one `Delivery` at a time of a process, in the process's order, at least once; what it raises is tried
        again, and the process's next ones wait.

            @processes.sink("books")
            async def book(delivery: Delivery) -> None: ...

        Args:
            name: the sink's name, 1 to 100 characters.
        """
        check_name("sink", name, MAX_SINK)

        def declare(function: H) -> H:
            is_async: bool = inspect.iscoroutinefunction(function)
            if not is_async:
                raise ValueError(f"sink {name!r}: {function!r} must be an async function")
            if name in self.sinks:
                raise ValueError(f"sink {name!r} is declared twice")
            self.sinks[name] = function
            return function

        return declare

    @overload
    def define(self, name: str, *, state: type[S], **options: Any) -> ProcessType[S]: ...
    @overload
    def define(self, name: str, *, state: Any = ..., **options: Any) -> ProcessType[Any]: ...
    def define(self, name: str, *, state: Any = Any, **options: Any) -> ProcessType[Any]:
        """Define a type.

        Args:
            name: its name, 1 to 192 characters.
            state: the type of its state, which is kept as JSON: an attrs class, a dataclass, a msgspec.Struct, a
                TypedDict, another type that msgspec reads from JSON, or a union with None; any JSON if left out.
            options: `version`, an integer that grows when older programs can't go on with its states;
                `step_timeout_s`, the seconds that a step may take before it fails for good; `retry`, when a failed
                timeout is tried again, `max_tries` how often in all, `retry_on` for which errors that it raises;
                `on_crash`: "error" (a step that has lost its worker is an error, to be repaired) or "again" (it is
                run again, three times in a row).
        """
        if name in self.types:
            raise ValueError(f"process type {name!r} is defined twice")
        made: ProcessType[Any] = ProcessType(name=name, state=state, **options)
        self.types[name] = made
        return made

    def __iter__(self) -> Iterator[ProcessType[Any]]:
        """The types, in the order of their definition."""
        return iter(self.types.values())
