"""Generator of docs/api.md and docs/loads/reference.md from the docstrings of the public names: `just reference`."""

from __future__ import annotations

import ast
import enum
import inspect
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import attrs
import msgspec

import dataloader
import dataloader.testing
from dataloader.flows import etl
from dataloader.jobs.client.loads import Loads
from dataloader.jobs.limits import TaskLimits
from dataloader.jobs.load_listings import FailureLine, LoadRecord, RunTimeline
from dataloader.jobs.schedules import Schedule
from dataloader.jobs.unique import Uniqueness

PAGE: Final = Path(__file__).parents[1] / "api.md"
SECTIONS: Final[dict[str, tuple[str, ...]]] = {
    "Tasks": ("Tasks", "Task", "RetryPolicy", "Resource"),
    "Handles of a job": (
        "Job", "AioJob", "ThreadJob", "ProcessJob", "AioProcessJob", "AnyJob", "Transaction", "ThreadTransaction",
    ),
    "Outcomes": ("Retry", "Snooze", "GiveUp", "Canceled", "Next", "Finish"),
    "Limits": ("Supplier", "RateLimit"),
    "The queue": (
        "open_client", "Client", "Jobs", "NewJob", "new_job", "Enqueued", "JobRecord", "JobFilter", "JobEvent",
        "Status", "RunStats", "StatsFilter",
    ),
    "Durable processes": (
        "ProcessClient", "ProcessRequest", "ProcessRecord", "ProcessFilter", "ProcessImport", "Sink", "Delivery",
        "SinkRecord", "HeldFilter", "HeldDelivery", "HeldDeliveryPage",
    ),
    "Embedding": (
        "open_supervisor", "Supervisor", "DrainReport", "embedded_postgres", "configure_logging", "JobLogHandler",
    ),
    "Settings": ("Settings", "load_settings", "Worker", "ApiToken", "WebhookTarget", "CommandTarget"),
    "Errors": (
        "DataloaderError", "AccessDenied", "ActorGaveUp", "BadRequest", "CallTimeout", "ConfigError", "Conflict",
        "Draining", "EmbeddedDatabaseError", "IdempotencyConflict", "JobNotFound", "JobStopped", "LeaseLost",
        "LimitReached", "ProcessConflict", "ProcessFailed", "ProcessNotFound", "Refused", "SchemaError", "StoreError",
        "StoreUnavailable",
    ),
}  # fmt: skip
"""Public names of `dataloader`, by the sections of the page. A test compares them with `dataloader.__all__`."""
BESIDE: Final[dict[str, tuple[Any, ...]]] = {
    "Tasks": (Uniqueness, Schedule),
    "Limits": (TaskLimits,),
    "The queue": (Loads, LoadRecord, RunTimeline, FailureLine),
}
"""Classes that public ones have as values, by section."""
HEAD: Final = """\
# Python reference

<!-- Generated from docstrings by `just reference`. Do not edit it. -->

All public names of the package `dataloader`. Names of loads are in [their own reference](loads/reference.md), commands
in [command line](cli.md). Everything else may change without notice ([policy](support.md)).
"""


LOADS_PAGE: Final = Path(__file__).parents[1] / "loads" / "reference.md"
LOADS: Final[dict[str, tuple[str, ...]]] = {
    "Declarations": (
        "Load", "Table", "History", "Detail", "Windows", "Flow", "Dimensions", "Dimension", "PipelineConfig",
        "CancellationToken", "add_loads", "add_flows", "add_dimensions", "run_load",
    ),
    "Sources": ("Http", "Files", "S3", "Routing", "Auth"),
    "Rows from a function": ("Rows", "RowsRun", "Checkpoint"),
    "Formats": ("Json", "JsonLines", "Csv", "Xml", "Zip", "Compressed"),
    "Pages": ("PageNumber", "Offset", "Cursor", "LinkHeader", "NextUrl"),
    "Your own source": ("Source", "Window", "Request", "Response", "Page", "SourceError", "Reader"),
}  # fmt: skip
"""Public names of `dataloader.flows.etl`, by the sections of their page."""
WITH_METHODS: Final = {"CancellationToken", "Auth", "Source", "Reader", "RowsRun"}
"""Those whose methods users call or define."""
LOADS_HEAD: Final = """\
# Reference of loads

<!-- Generated from docstrings by `just reference`. Do not edit it. -->

All public names of `dataloader.flows.etl`, except `RateLimit`, which is in the [Python reference](../api.md#ratelimit).
The first three arguments of `Load` and the first one of `Table`, a source or a format may be positional; give all
others by name. Durations are in seconds if the name ends in `_s`, otherwise a `timedelta`. An invalid value raises
`ValueError`, which names the argument, the value and what is allowed.
"""

_INTERNAL: Final = {"port"}
"""Fields that only the package itself sets."""
_WIDTH: Final = 110
"""Columns of a signature on one line."""


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD]
    shown: dict[Any, str] = {}
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        for name in names:
            parts += _name(name, getattr(dataloader, name), shown)
        for kind in BESIDE.get(title, ()):
            parts += _name(kind.__name__, kind, shown)
    parts.append(f"## Testing\n\n{_text(dataloader.testing)}\n")
    for name in dataloader.testing.__all__:
        parts += _name(f"dataloader.testing.{name}", getattr(dataloader.testing, name), shown)
    return "\n".join(parts)


def loads_page() -> str:
    """Return the text of the page of loads."""
    parts = [LOADS_HEAD]
    for title, names in LOADS.items():
        parts.append(f"## {title}\n")
        for name in names:
            parts += _name(name, getattr(etl, name), {}, with_methods=name in WITH_METHODS)
    return "\n".join(parts)


def _name(name: str, value: Any, shown: dict[Any, str], *, with_methods: bool = True) -> Iterator[str]:
    """Yield the text of a name. `shown` has the class in which each method is on the page already."""
    yield f"### {name}\n"
    if not inspect.isclass(value):
        if inspect.isroutine(value):
            yield f"{_signature(name.rpartition('.')[2], value)}\n"
            yield f"{_text(value)}\n"
        else:
            yield f"`{value}`\n".replace("typing.", "").replace("dataloader.jobs.job.", "")
        return
    bases = [base.__name__ for base in value.__bases__ if base.__name__ in dataloader.__all__]
    if bases:
        yield f"Subclass of {', '.join(f'[{base}](#{base.lower()})' for base in bases)}.\n"
    fields = list(_fields(value))
    yield f"{_text(value, with_args=not fields)}\n"
    if issubclass(value, enum.Enum):
        yield f"Values: {', '.join(f'`{one.name}`' for one in value)}.\n"
        return
    yield from fields
    if not with_methods:
        return
    repeated: dict[str, list[str]] = {}
    for member, found in _members(value):
        if found in shown:
            repeated.setdefault(shown[found], []).append(f"`{member}`")
            continue
        shown[found] = name
        yield from _member(f"{name}.{member}", found)
    for other, members in repeated.items():
        yield f"The same as in [{other}](#{other.lower()}): {', '.join(members)}.\n"


def _fields(kind: type) -> Iterator[str]:
    """Yield a table of the fields of an attrs class or a struct, which are the arguments of its constructor."""
    rows = []
    hints = typing.get_type_hints(kind, include_extras=True) if attrs.has(kind) or _is_struct(kind) else {}
    if attrs.has(kind):
        found = [(one.alias, one.name, _default(one)) for one in attrs.fields(kind) if one.init]
    elif _is_struct(kind):
        found = [(one.name, one.name, _default(one)) for one in msgspec.structs.fields(kind)]
    else:
        return
    described = _arguments(kind)
    for alias, name, default in found:
        if alias.startswith("_") or alias in _INTERNAL:
            continue
        about = next((str(meta.description) for meta in _metas(hints[name]) if meta.description), None)
        about = about or described.get(name, "")
        rows.append(
            [f"`{alias}`", f"`{_annotation(kind, name)}`", default, " ".join(about.split()).replace("|", "\\|")]
        )
    columns = 4 if any(row[3] for row in rows) else 3
    if rows:
        head = [["field", "type", "default", "meaning"], ["---"] * 4]
        yield "\n".join(f"| {' | '.join(row[:columns])} |" for row in (*head, *rows)) + "\n"


def _arguments(value: Any) -> dict[str, str]:
    """Return the descriptions in the section of arguments of a docstring, by name."""
    _, _, section = (inspect.getdoc(value) or "").partition("Args:\n")
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if line and not line.startswith(" "):
            break
        if begun := re.match(r"    (\w+): (.*)", line):
            name, found[begun[1]] = begun[1], begun[2]
        elif name and line:
            found[name] += f" {line.strip()}"
    return found


def _metas(hint: Any) -> Iterator[msgspec.Meta]:
    if typing.get_origin(hint) is typing.Annotated:
        yield from (one for one in hint.__metadata__ if isinstance(one, msgspec.Meta))
    for argument in typing.get_args(hint):
        if not isinstance(argument, msgspec.Meta):
            yield from _metas(argument)


def _is_struct(kind: type) -> bool:
    return issubclass(kind, msgspec.Struct)


def _default(field: Any) -> str:
    value = field.default
    if value in (attrs.NOTHING, msgspec.NODEFAULT):
        factory = getattr(field, "default_factory", msgspec.NODEFAULT)
        return "required" if factory is msgspec.NODEFAULT else f"`{factory.__name__}()`"
    if hasattr(value, "takes_self"):  # attrs.Factory
        return f"`{value.factory.__name__}()`" if not value.takes_self else "computed"
    return f"`{_shown(value)}`"


def _annotation(kind: type, name: str) -> str:
    for base in kind.__mro__:
        if name in (found := inspect.get_annotations(base)):
            return _plain(found[name]).replace("|", "\\|")
    raise LookupError(name)


def _plain(annotation: Any) -> str:
    """Return an annotation without `Annotated` and its texts."""
    if not isinstance(annotation, str):
        return getattr(annotation, "__name__", str(annotation))

    class Plain(ast.NodeTransformer):
        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            self.generic_visit(node)
            if isinstance(node.value, ast.Name) and node.value.id == "Annotated" and isinstance(node.slice, ast.Tuple):
                return node.slice.elts[0]
            return node

    return ast.unparse(Plain().visit(ast.parse(annotation, mode="eval")))


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of a class and of its bases in this package, in their order."""
    seen = set()
    for base in kind.__mro__:
        if not base.__module__.startswith("dataloader."):
            continue
        for name, found in vars(base).items():
            is_member = isinstance(found, (property, classmethod, staticmethod)) or inspect.isfunction(found)
            if is_member and not name.startswith("_") and name not in seen:
                seen.add(name)
                yield name, found


def _member(name: str, found: Any) -> Iterator[str]:
    if isinstance(found, property):
        kind = found.fget.__annotations__.get("return", "") if found.fget else ""
        yield f"#### {name}\n\nProperty, `{_plain(kind)}`. {_text(found)}\n"
    else:
        function = found.__func__ if isinstance(found, (classmethod, staticmethod)) else found
        yield f"#### {name}()\n\n{_signature(name.rpartition('.')[2], function)}\n"
        yield f"{_text(function)}\n"


def _signature(name: str, function: Callable[..., Any]) -> str:
    """Return the signature in a block of code."""
    signature = inspect.signature(function)
    parameters = [
        one.replace(default=_Shown(one.default)) if one.default is not one.empty else one
        for one in signature.parameters.values()
        if one.name not in {"self", "cls"}
    ]
    plain = [
        one if one.annotation is one.empty else one.replace(annotation=_Bare(one.annotation)) for one in parameters
    ]
    shown = str(inspect.Signature(plain)).removesuffix(")").removeprefix("(")
    returns = "" if signature.return_annotation is signature.empty else f" -> {_plain(signature.return_annotation)}"
    head = f"{_kind(function)}def {name}"
    line = f"{head}({shown}){returns}: ..."
    if len(line) > _WIDTH:
        wrapped = ",\n    ".join(_split(plain))
        line = f"{head}(\n    {wrapped},\n){returns}: ...".replace("**kwargs: Any,\n)", "**kwargs: Any\n)")
    return f"```python\n{line}\n```"


def _kind(function: Callable[..., Any]) -> str:
    """Return what precedes `def`."""
    if inspect.isasyncgenfunction(inspect.unwrap(function)):
        return "@asynccontextmanager\nasync "
    if inspect.isgeneratorfunction(inspect.unwrap(function)):
        return "@contextmanager\n"
    return "async " if inspect.iscoroutinefunction(function) else ""


def _split(parameters: list[inspect.Parameter]) -> Iterator[str]:
    """Yield each parameter of a signature, with the marks between them."""
    kinds = inspect.Parameter
    was_positional, star = False, False
    for one in parameters:
        if was_positional and one.kind is not kinds.POSITIONAL_ONLY:
            yield "/"
        was_positional = one.kind is kinds.POSITIONAL_ONLY
        if one.kind is kinds.KEYWORD_ONLY and not star:
            yield "*"
        star = star or one.kind in {kinds.KEYWORD_ONLY, kinds.VAR_POSITIONAL}
        yield str(one)


class _Bare:
    """Annotation whose `repr` is its source."""

    def __init__(self, annotation: Any) -> None:
        self._text = _plain(annotation)

    def __repr__(self) -> str:
        return self._text


class _Shown:
    """Default whose `repr` is valid code that is the same in each run."""

    def __init__(self, value: Any) -> None:
        self._text = _shown(value)

    def __repr__(self) -> str:
        return self._text


def _shown(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if attrs.has(type(value)) and all(one.default is not attrs.NOTHING for one in attrs.fields(type(value))):
        name = type(value).__name__
        return f"{name}()" if value == type(value)() else repr(value)
    text = repr(value)
    return "..." if text.startswith("<") or " at 0x" in text else text


def _without_args(text: str) -> str:
    """Return a docstring without its section of arguments."""
    kept, in_args = [], False
    for line in text.splitlines():
        in_args = line == "Args:" or (in_args and (not line or line.startswith(" ")))
        if not in_args:
            kept.append(line)
    return "\n".join(kept).rstrip()


def _text(value: Any, *, with_args: bool = True) -> str:
    """Return a docstring as Markdown: the sections of arguments and errors as lists.

    Args:
        value: the class or the function.
        with_args: False leaves out the arguments, which the table of fields has.
    """
    text = inspect.getdoc(value) or ""
    if not with_args:
        text = _without_args(text)
    text = re.sub(r"\s*\((?:[A-Z]\d+)(?:, [A-Z]\d+)*\)", "", text)
    lines: list[str] = []
    for line in text.splitlines():
        if line in {"Args:", "Raises:", "Attributes:", "Yields:"}:
            lines += ([""] if lines and lines[-1] else []) + [f"{line}", ""]
        elif found := re.match(r"    (\S[\w`*., ]*): (.*)", line):
            lines.append(f"* `{found[1].strip('`')}`: {found[2]}")
        elif line.startswith("        "):
            lines.append(f"  {line.strip()}")
        else:
            lines.append(line.strip() if line.startswith("    ") else line)
    return "\n".join(lines)


PAGES: Final = {PAGE: page, LOADS_PAGE: loads_page}

if __name__ == "__main__":
    for path, text in PAGES.items():
        path.write_text(text())
