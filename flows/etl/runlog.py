"""The lines of a run (E11): in the process's log and with the job, each with the load and the phase it is about."""

from __future__ import annotations

from typing import Literal

import attrs
import structlog

from dataloader.jobs.job import JobLog

log = structlog.get_logger("dataloader.flows.etl")

Phase = Literal["requests", "processing", "writing", "run"]


@attrs.frozen
class RunLog:
    """Writes lines about `load`. The job keeps so many of a run as it keeps of any handler's."""

    job: JobLog
    load: str

    def info(self, message: str, *, phase: Phase, **fields: object) -> None:
        """What happened."""
        log.info(message, load=self.load, phase=phase, **fields)
        self.job.info(message, load=self.load, phase=phase, **fields)

    def warning(self, message: str, *, phase: Phase, **fields: object) -> None:
        """What went wrong while the run goes on, or slows it down."""
        log.warning(message, load=self.load, phase=phase, **fields)
        self.job.warning(message, load=self.load, phase=phase, **fields)
