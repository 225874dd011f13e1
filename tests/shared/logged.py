"""Lines of our loggers, for tests in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dataloader.jobs.logger import ROOT, LogMessage


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, LogMessage):
            level = record.levelname.lower()
            error = {"exc_info": record.exc_info[1]} if record.exc_info else {}
            self.lines.append({"event": record.msg.event, "log_level": level, **record.msg.fields, **error})


@contextmanager
def capture_logs() -> Iterator[list[dict[str, Any]]]:
    """Yield the lines of all levels that are logged within the block, as dictionaries; no other handler gets them."""
    logger, kept = logging.getLogger(ROOT), _Kept()
    level, logger.propagate = logger.level, False
    logger.setLevel(logging.DEBUG)
    logger.addHandler(kept)
    try:
        yield kept.lines
    finally:
        logger.removeHandler(kept)
        logger.propagate = True
        logger.setLevel(level)
