"""Retry policy: when a failed job runs again. Pure: the caller passes the random generator.

The default is 30 s × attempt, with up to a tenth added so that jobs that failed together are not retried together.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Final

import attrs

MAX_RETRY_DELAY_S: Final = 31_622_400
"""Longest pause before a retry, in seconds: a year."""
_GENERATOR = random.Random()  # noqa: S311 - spreads load, not for security


def _final(value: Iterable[type[BaseException]]) -> tuple[type[BaseException], ...]:
    return tuple(value)  # not `tuple` itself: a type checker could not infer its items


@attrs.frozen
class RetryPolicy:
    """Delay before the next run, in seconds.

    `base_s × attempt` if `factor` is None, else `base_s × factor ** (attempt - 1)`; never more than `cap_s`. Then a
    uniformly random share of up to `jitter` is added. Exceptions of the types in `final` are not retried.
    """

    base_s: float = 30.0
    factor: float | None = None
    cap_s: float = 21_600.0
    jitter: float = 0.1
    final: tuple[type[BaseException], ...] = attrs.field(default=(), converter=_final)

    def __attrs_post_init__(self) -> None:
        """Raise `ValueError` for invalid values."""
        for name, value, low, high in (
            ("base_s", self.base_s, 0, MAX_RETRY_DELAY_S),
            ("factor", 1.0 if self.factor is None else self.factor, 1, 1_000),
            ("cap_s", self.cap_s, 0, MAX_RETRY_DELAY_S),
            ("jitter", self.jitter, 0, 1),
        ):
            if not low <= value <= high:
                message = f"RetryPolicy.{name}: must be a number from {low:,} to {high:,}, not {value!r}"
                raise ValueError(message)
        for kind in self.final:
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                message = f"RetryPolicy.final: must be exception types, for example (ValueError,), not {kind!r}"
                raise ValueError(message)  # noqa: TRY004 - one error for all that is not allowed

    def delay_s(self, attempt: int, generator: random.Random = _GENERATOR) -> float:
        """Return the seconds to wait after run number `attempt` (1 for the first) failed."""
        # The exponent is bounded so that an extreme attempt number cannot overflow a float.
        growth = attempt if self.factor is None else self.factor ** min(attempt - 1, 64)
        delay = min(self.base_s * growth, self.cap_s)
        return delay + delay * self.jitter * generator.random()

    def always(self, delay_s: float) -> RetryPolicy:
        """Return this policy with one delay for all attempts, without jitter."""
        return attrs.evolve(self, base_s=delay_s, factor=1.0, cap_s=delay_s, jitter=0.0)

    def is_final(self, error: BaseException) -> bool:
        """Return True if `error`, or every member of an exception group, is of a type in `final`."""
        if isinstance(error, BaseExceptionGroup):
            return all(self.is_final(member) for member in error.exceptions)
        return isinstance(error, self.final)
