"""Checks that another process can get the objects of a load: its source, and its functions by module and name."""

from __future__ import annotations

import io
import pickle
from types import FunctionType
from typing import Any


class _Pickler(pickle.Pickler):
    """Refuses objects of the program's main file, which another process cannot import."""

    def persistent_id(self, value: Any) -> None:
        """Return None: no object has a persistent ID. Raises `ValueError` for objects of the main file."""
        if isinstance(value, (FunctionType, type)) and value.__module__ == "__main__":
            raise ValueError(f"{value.__qualname__} must be in a module, not in the main file of the program")


def why_not(value: object) -> str | None:
    """Return the reason why another process cannot get the value; None if it can."""
    try:
        _Pickler(io.BytesIO()).dump(value)
    except Exception as error:  # noqa: BLE001 - any error of an object's own pickling
        return str(error) or type(error).__name__
    return None
