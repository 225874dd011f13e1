"""Destination and format of log lines: stdlib logging and structlog through one chain to stderr.

The command line calls `configure_logging` once. An embedding program has its own logging and calls it only to use ours.
All other code uses `log = get_logger(__name__)` (`dataloader.jobs.logger`) and binds `job_id`, `queue`, `task`,
`attempt` and `request_id` as context variables, which then are in every line. Our lines pass through stdlib's root
logger, like those of Hypercorn, Quart, asyncio, asyncpg and `warnings`. Lines of tasks use it or structlog. A terminal
gets readable text, any other stream one JSON object per line.

A log call must never raise because of a logged value or a closed stderr, never wait long for the reader of the log
(log_stream.py), and never show a secret: the whole line is masked, including the rendered exception. Rejected:
structlog's rich tracebacks, which print local variables.
"""

import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, MutableMapping
from datetime import UTC, datetime
from typing import Any, Final, Literal, TextIO

import attrs
import msgspec
import structlog

from dataloader.actors.job_log_handler import JobLogHandler
from dataloader.jobs.logger import LogMessage, message_of, traceback_of
from dataloader.jobs.secrets.masking import mask, mask_text
from dataloader.jobs.text import MAX_MASKED, cut_texts, storable_text
from dataloader.jobs.visible import visible, visible_json
from dataloader.supervisor.log_stream import LogStream

LogFormat = Literal["auto", "console", "json"]
LogLevel = Literal["debug", "info", "warning", "error", "critical"]

MAX_TRACEBACK: Final = 20_000
"""Characters kept of an exception's text: its beginning and its end."""
_CLIENTS: Final = ("httpx2", "httpcore2")
"""Loggers that write a line for each request and each of its steps; our own line has the same facts."""

_EventDict = MutableMapping[str, Any]


@attrs.frozen
class _LineLogger:
    """End of the chain, with the methods that structlog expects."""

    name: str
    stream: LogStream

    def write(self, line: str) -> None:
        self.stream.write(line)

    msg = debug = info = warning = warn = error = critical = fatal = exception = log = failure = write


class _RootHandler(logging.Handler):
    """Passes the records of stdlib loggers to the same chain."""

    def __init__(self, chain: list[Callable[[Any, str, _EventDict], Any]], lines: _LineLogger) -> None:
        super().__init__()
        self._chain = chain
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        try:
            ours = {"event": record.msg.event, **record.msg.fields} if isinstance(record.msg, LogMessage) else None
            line: Any = (ours or {"event": message_of(record)}) | {"exc_info": record.exc_info, "logger": record.name}
            for processor in self._chain:
                line = processor(self._lines, record.levelname.lower(), line)
        except Exception:  # noqa: BLE001 - a log call never raises, as in stdlib's own handlers
            self.handleError(record)
        else:
            self._lines.write(line)


def configure_logging(
    format: LogFormat = "auto",  # noqa: A002 - the usual name
    level: LogLevel = "info",
    stream: TextIO | None = None,
) -> None:
    """Send all logging of this process, the standard library's and structlog's, to `stream`, by default stderr (Q16).

    For programs that want the log of `dataloader serve`. It replaces the previous configuration. Secrets are masked in
    each line, including the lines of other libraries.

    Args:
        format: `console` for readable text, `json` for machines, `auto` for `console` if the stream is a terminal.
        level: the lowest level that is written, also for stdlib loggers. The HTTP client's loggers, `httpx2` and
            `httpcore2`, write from `warning` on, unless they have their own level.
        stream: destination of the lines; any object with `write`, `flush` and `isatty`.
    """
    to = sys.stderr if stream is None else stream
    if isinstance(to, io.TextIOWrapper):
        to.reconfigure(encoding="utf-8", errors="backslashreplace")  # JSON is UTF-8 in any locale
    on_terminal = to.isatty()
    people = format == "console" or (format == "auto" and on_terminal)
    render = _console(colors=on_terminal and "NO_COLOR" not in os.environ) if people else _json_line
    chain: list[Callable[[Any, str, _EventDict], Any]] = [
        structlog.contextvars.merge_contextvars,
        _stamp,
        _render_exception,
        _masking(render),
    ]

    def notice(dropped: int) -> str:
        said = {"event": "dropped log lines: the log was not read", "lines": dropped, "logger": __name__}
        return render({**_stamp(None, "warning", said)})

    lines = LogStream(to, notice)
    structlog.configure(
        processors=[*chain],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda name="", *_: _LineLogger(str(name), lines),
        # Not cached, so that loggers created before this call also use it.
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(
        handlers=[_RootHandler(chain, _LineLogger("", lines)), JobLogHandler()],
        level=level.upper(),
        force=True,
    )
    for name in _CLIENTS:
        if logging.getLogger(name).level == logging.NOTSET:
            logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(capture=True)


def _stamp(logger: Any, method: str, event: _EventDict) -> _EventDict:
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    level = {"exception": "error", "warn": "warning", "fatal": "critical"}.get(method, method)
    stamped = {"timestamp": now, "level": level, "logger": event.pop("logger", "") or logger.name, "event": ""}
    return {**stamped, **event}


def _render_exception(logger: Any, method: str, event: _EventDict) -> _EventDict:  # noqa: ARG001 - structlog's signature
    exc_info = event.pop("exc_info", None)
    if event.pop("stack_info", None):
        event["stack"] = "".join(traceback.format_stack())
    if not exc_info:
        return event
    if isinstance(exc_info, BaseException):
        error: BaseException | None = exc_info
    else:
        error = exc_info[1] if isinstance(exc_info, tuple) else sys.exception()
    if error is not None:
        # First cut to MAX_MASKED characters, since masking takes time, and to the kept length only after masking: a
        # shorter cut could separate a secret from the name by which it is recognized.
        event["exception"] = storable_text(mask_text(storable_text(traceback_of(error), MAX_MASKED)), MAX_TRACEBACK)
    return event


def _masking(render: Callable[[dict[str, Any]], str]) -> Callable[[Any, str, _EventDict], str]:
    def finish(logger: Any, method: str, event: _EventDict) -> str:  # noqa: ARG001 - structlog's signature
        try:
            fields = mask(cut_texts(event))
            return render(fields if isinstance(fields, dict) else {"event": fields})
        except Exception as error:  # noqa: BLE001 - a log call never raises
            return _json_line(
                {"level": method, "event": "a log line could not be rendered", "error": type(error).__name__}
            )

    return finish


_encode = msgspec.json.Encoder().encode


def _json_line(fields: dict[str, Any]) -> str:
    try:
        return visible_json(_encode(fields).decode())
    except (UnicodeEncodeError, OverflowError, ValueError, TypeError):
        texts = {name: storable_text(str(value), MAX_TRACEBACK) for name, value in fields.items()}
        return visible_json(_encode(texts).decode())


def _console(*, colors: bool) -> Callable[[dict[str, Any]], str]:
    renderer = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)

    def render(fields: dict[str, Any]) -> str:
        shown = {
            visible(name): visible(value, lines=name in {"exception", "stack"}) if isinstance(value, str) else value
            for name, value in fields.items()
        }
        return str(renderer(None, "", shown))

    return render
