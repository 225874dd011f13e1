"""Contenders: dataloader, and each peer in each of its modes.

`done` counts the jobs that are recorded as complete in the peer's own table; `rows` is any cheap read of it, for
holding a snapshot. A peer whose package is missing is skipped, with a line that says so.
"""

from __future__ import annotations

import importlib.util
from typing import Final

import attrs

from benchmarks.peers.progress import say

OURS: Final = "dataloader"


@attrs.frozen(kw_only=True)
class Contender:
    """One tool in one mode."""

    peer: str
    mode: str = "default"
    done: str
    rows: str

    @property
    def name(self) -> str:
        """Name in tables: the tool, and its mode if that is not its default."""
        return self.peer if self.mode == "default" else f"{self.peer} {self.mode}"

    @property
    def module(self) -> str:
        """Program that drives it."""
        return f"benchmarks.peers.adaptors.{self.peer}_adaptor"

    @property
    def is_installed(self) -> bool:
        """True if its package can be imported here."""
        return importlib.util.find_spec(self.peer) is not None


_AWA_DONE: Final = """
SELECT (SELECT coalesce(sum(completed_count), 0) FROM awa.receipt_completion_batches)
     + (SELECT count(*) FROM awa.done_entries WHERE state = 'completed')
     + (SELECT coalesce(sum(pruned_completed_count), 0) FROM awa.queue_terminal_rollups)
"""
"""Batches of completed jobs, those that need their own row, and the sum of those that it has deleted."""


def _in_modes(peer: str, modes: tuple[str, ...], done: str, rows: str) -> list[Contender]:
    return [Contender(peer=peer, mode=mode, done=done, rows=rows) for mode in modes]


ALL: Final = {
    contender.name: contender
    for contender in (
        *_in_modes(
            OURS,
            ("default", "tuned", "keyed", "http"),
            "SELECT count(*) FROM dl_jobs WHERE status = 'succeeded'",
            "SELECT count(*) FROM dl_jobs",
        ),
        *_in_modes(
            "pgqueuer",
            ("default", "tuned"),
            "SELECT count(*) FROM pgqueuer_log WHERE status = 'successful'",
            "SELECT count(*) FROM pgqueuer",
        ),
        *_in_modes(
            "procrastinate",
            ("default",),
            "SELECT count(*) FROM procrastinate_jobs WHERE status = 'succeeded'",
            "SELECT count(*) FROM procrastinate_jobs",
        ),
        *_in_modes(
            "chancy",
            ("default", "tuned"),
            "SELECT count(*) FROM chancy_jobs WHERE state = 'succeeded'",
            "SELECT count(*) FROM chancy_jobs",
        ),
        *_in_modes("awa", ("default", "tuned"), _AWA_DONE, "SELECT count(*) FROM awa.ready_entries"),
    )
}


def chosen(names: list[str]) -> list[Contender]:
    """Return the contenders of these names; a tool's name means all its modes. Raises `SystemExit` for another name."""
    found = [contender for contender in ALL.values() if {contender.name, contender.peer} & set(names)]
    unknown = set(names) - {contender.name for contender in found} - {contender.peer for contender in found}
    if unknown:
        raise SystemExit(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    for peer in sorted({contender.peer for contender in found if not contender.is_installed}):
        say(f"{peer} is left out: its package is not installed here (dependency group `bench`)")
    return [contender for contender in found if contender.is_installed]
