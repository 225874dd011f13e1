"""The single errors within exception groups: Trio's nurseries wrap what is raised in them, in groups of groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast


def single_errors(error: BaseException) -> Iterator[BaseException]:
    """The errors of a group and of the groups within it, in their order; an error that is no group is the only one."""
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from single_errors(member)
    else:
        yield error


def first_error(error: Exception) -> Exception:
    """The first error that is no group."""
    return cast("Exception", next(single_errors(error)))  # a group that is an Exception has no others


def only_error(error: BaseException) -> BaseException:
    """The one error of a group; the group itself if it has several."""
    first, *others = single_errors(error)
    return error if others else first
