"""Where a benchmark stands, on stderr, so that stdout has the table alone: lines; on a terminal a bar below them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")


def say(text: str) -> None:
    """One line."""
    print(f"# {text}", file=sys.stderr, flush=True)


def tracked(steps: Sequence[T]) -> Iterable[T]:
    """The steps, one after the other; the bar tells how many are done."""
    console = Console(stderr=True)
    return track(steps, "measuring", console=console, disable=not console.is_terminal)
