"""Checks that another process can get what a load needs there: its functions by their modules and names, its source."""

from __future__ import annotations

import io
import pickle
from types import FunctionType
from typing import Any


class _Pickler(pickle.Pickler):
    """Refuses what stands in the program's main file, which another process can't import."""

    def persistent_id(self, value: Any) -> None:
        """No value has one. Raises `ValueError`."""
        if isinstance(value, (FunctionType, type)) and value.__module__ == "__main__":
            raise ValueError(f"{value.__qualname__} must stand in a module, not in the program's main file")


def why_not(value: object) -> str | None:
    """Why another process can't get the value; None if it can."""
    try:
        _Pickler(io.BytesIO()).dump(value)
    except Exception as error:  # noqa: BLE001 - whatever an object says of it
        return str(error) or type(error).__name__
    return None
