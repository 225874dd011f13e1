"""Places of functions: the module and the name by which another process finds the same function."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import attrs


@attrs.frozen
class Place:
    """Module, and the dotted name of an object in it."""

    module: str
    name: str

    def find(self) -> Any:
        """Return the object: the function, or the `Task` that its decorator returned. Imports the module."""
        return operator.attrgetter(self.name)(import_module(self.module))


def place_of(function: Callable[..., Any]) -> Place:
    """Return the place of a function. Raises `ValueError` if another process cannot find it, such as a local one."""
    place = Place(getattr(function, "__module__", None) or "", getattr(function, "__qualname__", None) or "")
    if place.module in {"", "__main__"}:
        raise ValueError("must be in a module that can be imported, not in the main file of the program")
    if place.module not in sys.modules or "<" in place.name:
        raise ValueError(f"must be at the top level of its module, not in a function ({place.name})")
    try:
        found = operator.attrgetter(place.name)(sys.modules[place.module])
    except AttributeError:
        found = None
    if getattr(found, "handler", found) is not function:
        raise ValueError(f"must be {place.module}.{place.name}, but another object has this name")
    return place
