"""What the runs send to the recorder, the one writer of outcomes.

listener ── Wake ──► dispatcher ── start ──► runner ── Ended | Shown ──► recorder ── freed ──► dispatcher
"""

from __future__ import annotations

import attrs

from dataloader.actors.job_runs import Run
from dataloader.jobs.outcomes import Outcome


@attrs.frozen(eq=False)
class Ended:
    """A run has ended and this is to be written; None: nothing, the job is somebody else's or recorded already."""

    run: Run
    outcome: Outcome | None


@attrs.frozen(eq=False)
class Shown:
    """A run has progress or log lines to be written; sent once until they are."""

    run: Run


ToRecord = Ended | Shown
