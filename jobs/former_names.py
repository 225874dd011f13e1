"""Former names: using one raises an error that gives the new name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")


def renamed(new: str) -> str:
    """Return the message for a former name, whose new one is `new`."""
    return f"is now named {new}"


def former_value(former: str, new: str) -> str:
    """Return the message for a field with a value whose name was `former`."""
    return f"the value {former!r} {renamed(new)}"


def refuse_former_name(module: str, name: str, names: Mapping[str, str]) -> None:
    """Raise `ImportError`, with the new name, if `name` is a former name of `names` in a module.

    With an `AttributeError`, `from module import name` would not show our message.
    """
    if name in names:
        raise ImportError(f"{module}.{name} {renamed(names[name])}", name=name)


def former_arguments(**names: str) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that refuses former names of arguments.

    Args:
        names: the new name of each former one.

    The decorated class raises `TypeError`, with the new name, if it is called with a former one.
    """

    def decorate(kind: type[T]) -> type[T]:
        refusing: Any = kind
        init = refusing.__init__

        @wraps(init)
        def checked_init(self: T, *args: Any, **kwargs: Any) -> None:
            for name in names.keys() & kwargs.keys():
                raise TypeError(f"{kind.__name__}: the argument {name} {renamed(names[name])}")
            init(self, *args, **kwargs)

        refusing.__init__ = checked_init
        return kind

    return decorate
