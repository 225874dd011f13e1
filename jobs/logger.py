"""Loggers of all layers: stdlib loggers below `dataloader`, silent until a program configures them.

    log = get_logger(__name__)
    log.warning("the job failed", error="…", next="retry")

An embedding program sees such a line like those of other libraries: by its handlers and levels for `dataloader` or the
root logger, with the fields after the message, and secrets masked. `dataloader serve` has its own handler, which takes
the fields as they are (`configure_logging`). structlog's global configuration belongs to the host and is not changed.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import MutableMapping
from typing import Any, Final, cast

import attrs
import structlog

from dataloader.jobs.secrets.masking import mask, mask_text

ROOT: Final = "dataloader"

logging.getLogger(ROOT).addHandler(logging.NullHandler())

_STACK: Final = 4
"""Frames from a log call to the standard library's, so that a record names the caller's line."""


@attrs.frozen
class LogMessage:
    """Message of a record: readable text for other handlers, the event and its fields for our own handler."""

    event: str
    fields: dict[str, Any]

    def __str__(self) -> str:
        """Return the event and its fields, without secrets; computed when a handler asks for it."""
        masked = cast("dict[str, object]", mask(self.fields))
        shown = (f"{name}={value!r}" for name, value in masked.items())
        return " ".join([mask_text(self.event), *shown])


def _as_record(
    _logger: object, _method: str, event: MutableMapping[str, Any]
) -> tuple[tuple[LogMessage], dict[str, Any]]:
    given = {name: event.pop(name, None) for name in ("exc_info", "stack_info")}
    line = LogMessage(str(event.pop("event", "")), dict(event))
    return (line,), given | {"stacklevel": _STACK}


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return the logger of a module: `log.info("what happened", field=value)`. It adds bound context variables."""
    logger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[structlog.stdlib.filter_by_level, structlog.contextvars.merge_contextvars, _as_record],
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=True,
    )
    return cast("structlog.stdlib.BoundLogger", logger)


def message_of(record: logging.LogRecord) -> str:
    """Return the message of a record, even if its arguments do not fit."""
    try:
        return record.getMessage()
    except Exception as error:  # noqa: BLE001 - the message must not be lost if its arguments do not fit
        return f"{record.msg!s} {record.args!r} ({type(error).__name__} while formatting)"


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an exception as text, neither masked nor bounded."""
    try:
        return "".join(traceback.format_exception(error)).rstrip()
    except Exception as failure:  # noqa: BLE001 - an exception that cannot be printed still has a name
        return f"{type(error).__name__} (its traceback cannot be rendered: {type(failure).__name__})"
