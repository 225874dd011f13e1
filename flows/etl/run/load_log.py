"""Log lines of a run, in the process's log and with the job, each with its load and phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

import attrs

from dataloader.jobs.job import Job, JobLog
from dataloader.jobs.logger import get_logger
from dataloader.jobs.secrets.masking import mask_text

log = get_logger("dataloader.flows.etl")

Phase = Literal["requests", "processing", "writing", "run"]
"""Part of the pipeline that a line is about, or the run as a whole."""


@attrs.frozen
class LoadLog:
    """Writes lines about `load` to the process's log and to the job's log of the load."""

    job: JobLog
    load: str
    hide: Callable[[str], str] = mask_text

    @classmethod
    def of(cls, job: Job, load: str, hide: Callable[[str], str] = mask_text) -> Self:
        """Return the log of a load in a job's run; `hide` removes the secrets of its sources from texts."""
        return cls(job.log_of(load), load, hide)

    def info(self, message: str, *, phase: Phase, **fields: object) -> None:
        """Log an event of the run."""
        shown = self._without_secrets(fields)
        log.info(message, load=self.load, phase=phase, **shown)
        self.job.info(message, phase=phase, **shown)

    def warning(self, message: str, *, phase: Phase, **fields: object) -> None:
        """Log an error that does not end the run, or a cause of slowness."""
        shown = self._without_secrets(fields)
        log.warning(message, load=self.load, phase=phase, **shown)
        self.job.warning(message, phase=phase, **shown)

    def _without_secrets(self, fields: Mapping[str, object]) -> dict[str, Any]:
        return {name: self.hide(value) if isinstance(value, str) else value for name, value in fields.items()}
