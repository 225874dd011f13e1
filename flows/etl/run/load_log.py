"""The lines of a run (E11): in the process's log and with the job, each with the load and the phase it is about."""

from __future__ import annotations

from typing import Literal, Self

import attrs

from dataloader.jobs.job import Job, JobLog
from dataloader.jobs.logger import get_logger

log = get_logger("dataloader.flows.etl")

Phase = Literal["requests", "processing", "writing", "run"]
"""The part of the pipeline that a line is about, or the run as a whole."""


@attrs.frozen
class LoadLog:
    """Writes lines about `load`, in the job's log of it."""

    job: JobLog
    load: str

    @classmethod
    def of(cls, job: Job, load: str) -> Self:
        """The log of a load in a job's run."""
        return cls(job.log_of(load), load)

    def info(self, message: str, *, phase: Phase, **fields: object) -> None:
        """Log an event of the run."""
        log.info(message, load=self.load, phase=phase, **fields)
        self.job.info(message, phase=phase, **fields)

    def warning(self, message: str, *, phase: Phase, **fields: object) -> None:
        """Log an error that does not end the run, or what slows it down."""
        log.warning(message, load=self.load, phase=phase, **fields)
        self.job.warning(message, phase=phase, **fields)
