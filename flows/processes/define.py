"""Definition of process types: their steps and options.

    payments = processes.define("payment", state=Payment, step_timeout_s=30)

    @payments.init
    async def begin(p: Process[Payment], amount: int) -> Done: ...

A step takes the process and at most one argument. The argument's type is read from its annotation.
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
"""Maximum number of consecutive runs of a step again after its worker died, with `on_crash="again"`."""


@attrs.frozen
class StepFunction:
    """Function of a step and the type of its argument. `takes` is true if it has an argument."""

    function: Step
    takes: bool
    args: Any = Any

    def arguments(self, args: Any) -> tuple[Any, ...]:
        """Return the function's arguments after the process. Raises `BadRequest` for args of the wrong type."""
        if not self.takes:
            if args is not None:
                raise BadRequest("args", "must be omitted: this step takes none")
            return ()
        return (decoded("args", args, self.args),)


def decoded(name: str, value: Any, kind: Any) -> Any:
    """Convert a JSON value to a type. Raises `BadRequest` with the path of the wrong value."""
    if kind is Any:
        return value
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise BadRequest(f"{name}{path.removesuffix('`')}", in_our_words(message, kind)) from error


@attrs.define(eq=False, kw_only=True)
class ProcessType(Generic[S]):
    """Type of durable processes. Made by `Processes.define`."""

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
        """Raise `BadRequest` for options that are out of range."""
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
        """Return the queue of the type's wake-up jobs."""
        return f"process.{self.name}"

    @property
    def tasks(self) -> list[str]:
        """Return the tasks of the wake-up jobs: for the type's version, and for all earlier ones if it has an upgrade.

        Workers of older versions do not know the newer tasks, so they do not claim these jobs.
        """
        first = self.version if self.upgrades is None else 1
        return [f"process.{self.name}.v{version}" for version in range(self.version, first - 1, -1)]

    @property
    def crashes(self) -> int:
        """Return the number of consecutive times that a step runs again after its worker died."""
        return CRASHES_AGAIN if self.on_crash == "again" else 0

    def init(self, function: F) -> F:
        """Declare the decorated function as the first step."""
        return self._declare("init", function)

    def timeout(self, function: F) -> F:
        """Declare the decorated function as the step that a timer runs."""
        return self._declare("timeout", function)

    def repair(self, function: F) -> F:
        """Declare the decorated function as the step that repairs a process in error."""
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

        It takes the state as JSON and the version of the state. It returns the state of this version: an instance of
        `state=` or the JSON for one. The result is stored with the next successful step. Without an upgrade, processes
        of older versions wait for workers of those versions.
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
        """Return the function of a step. Raises `BadRequest` if the type does not have that step."""
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
    """Process types of a program."""

    types: dict[str, ProcessType[Any]] = attrs.field(factory=dict, init=False)
    sinks: dict[str, SinkHandler] = attrs.field(factory=dict, init=False)

    def sink(self, name: str) -> Callable[[H], H]:
        """Declare the decorated async function as the handler of a sink that `DL_SINKS` names.

        It receives the deliveries of a process one at a time, in order, each at least once. If it raises an error, the
        delivery is tried again, and the later deliveries of the process wait.

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
        """Define a process type.

        Args:
            name: name of the type, 1 to 192 characters.
            state: type of the state, which is stored as JSON: an attrs class, a dataclass, a msgspec.Struct, a
                TypedDict, another type that msgspec reads from JSON, or a union with None. By default any JSON.
            options: `version`, an integer to increase when older programs cannot continue with the new states;
                `step_timeout_s`, the seconds after which a step fails without a retry; `retry`, the policy for failed
                timeouts, `max_tries`, their maximum number of tries, `retry_on`, the errors that are retried;
                `on_crash`, for a step whose worker died: "error" (the process is in error until it is repaired) or
                "again" (the step runs again, up to three times in a row).
        """
        if name in self.types:
            raise ValueError(f"process type {name!r} is defined twice")
        made: ProcessType[Any] = ProcessType(name=name, state=state, **options)
        self.types[name] = made
        return made

    def __iter__(self) -> Iterator[ProcessType[Any]]:
        """Iterate over the types in definition order."""
        return iter(self.types.values())
