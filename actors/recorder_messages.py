"""What the runs send to the recorder, the one writer of outcomes.

listener ── Wake ──► dispatcher ── start ──► runner ── Ended | Shown ──► recorder ── freed ──► dispatcher
"""

from __future__ import annotations

from msgspec import Struct

from dataloader.actors.job_runs import Run
from dataloader.jobs.outcomes import Outcome


class Ended(Struct, frozen=True, eq=False):
    """A run has ended with `outcome`. None: write nothing; another worker has the job, or it is recorded already."""

    run: Run
    outcome: Outcome | None


class Shown(Struct, frozen=True, eq=False):
    """A run has progress or log lines to be written; not sent again before they are."""

    run: Run


ToRecord = Ended | Shown
