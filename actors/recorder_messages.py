"""Messages of the runs to the recorder, the only writer of outcomes.

listener ── Wake ──► dispatcher ── start ──► runner ── Ended | Shown ──► recorder ── freed ──► dispatcher
"""

from __future__ import annotations

from msgspec import Struct

from dataloader.actors.job_runs import Run
from dataloader.jobs.outcomes import Outcome


class Ended(Struct, frozen=True, eq=False):
    """End of a run with `outcome`; None writes nothing: another worker has the job, or it is already recorded."""

    run: Run
    outcome: Outcome | None


class Shown(Struct, frozen=True, eq=False):
    """Progress or log lines of a run are to be written; not sent again before they are."""

    run: Run


ToRecord = Ended | Shown
