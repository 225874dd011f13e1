"""Progress of a benchmark on stderr, so that stdout has only the table: lines; on a terminal a bar below them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")


def say(text: str) -> None:
    """Print one line."""
    print(f"# {text}", file=sys.stderr, flush=True)


def tracked(steps: Sequence[T]) -> Iterable[T]:
    """Yield the steps, one after the other; the bar shows how many are done."""
    console = Console(stderr=True)
    return track(steps, "measuring", console=console, disable=not console.is_terminal)
