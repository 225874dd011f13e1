"""Sources of a process's settings: defaults < `.env` < `.env.local` < environment < command line.

The command line calls `load_settings`, and `explain` for `dataloader config`. Never write to `os.environ`, and never
expand `$` in a file, since passwords contain it.
"""

import difflib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import attrs
from dotenv.parser import parse_stream

from dataloader.flows.etl.declare.pipeline_config import PREFIX
from dataloader.jobs.errors import ConfigError
from dataloader.jobs.former_names import renamed
from dataloader.jobs.secrets.masking import MASKED
from dataloader.supervisor.setting_kinds import quoted
from dataloader.supervisor.settings import CLIENT_DESCRIPTION, CLIENT_VARIABLE, Settings

FORMER: Final = MappingProxyType({"DL_LOCK_DSN": "DL_DIRECT_DSN"})
"""New name of each renamed variable."""
FILES: Final = (".env", ".env.local")
_NOTHING: Final[Mapping[str, object]] = MappingProxyType({})


@attrs.frozen
class SettingRow:
    """One line of `dataloader config`: the variable, its value without secrets, and the layer it came from."""

    name: str
    value: str
    source: Literal["default", ".env", ".env.local", "environment", "command line", "embedded"]
    description: str


def load_settings(
    env: Mapping[str, str] | None = None,
    *,
    directory: Path | None = None,
    overrides: Mapping[str, object] = _NOTHING,
    defaults: Mapping[str, Any] = _NOTHING,
) -> Settings:
    """Return the settings from all layers: defaults < `.env` < `.env.local` < environment < command line (Q13, E5).

    Args:
        env: the environment; by default that of the process.
        directory: the directory of `.env` and `.env.local`; by default the current one.
        overrides: values from the command line by field name (`port`); `None` means not given. `pipeline` is a mapping
            of `DL_PIPELINE__…` variables, each of which overrides the same one of the other layers.
        defaults: values by field name, which replace the settings' own defaults.

    Raises:
        ConfigError: one line for each bad value, or for a line in a file that cannot be read.
    """
    given = _given_values(env, directory, overrides)
    return Settings(**{**defaults, **{field: value for field, (value, _) in given.items()}})


def client_token(env: Mapping[str, str] | None = None, *, directory: Path | None = None) -> str | None:
    """Return `DL_TOKEN` from the environment, otherwise from `.env.local` or `.env`; None if none of them sets it."""
    return _client_token(_layers(env, directory))[0]


def _client_token(layers: list[tuple[str, Mapping[str, str]]]) -> tuple[str | None, str]:
    """Return the value of `DL_TOKEN`, and its layer."""
    for source, layer in reversed(layers):
        if value := layer.get(CLIENT_VARIABLE, "").strip():
            return value, source
    return None, "default"


def explain(
    env: Mapping[str, str] | None = None, *, directory: Path | None = None, overrides: Mapping[str, object] = _NOTHING
) -> list[SettingRow]:
    """Return every setting with its value, with secrets masked, and the layer that it came from.

    Takes the arguments and raises the errors of `load_settings`.
    """
    given = _given_values(env, directory, overrides)
    settings = Settings(**{field: value for field, (value, _) in given.items()})  # type: ignore[arg-type]
    rows = []
    for field in attrs.fields(Settings):
        value = getattr(settings, field.name)
        if field.name == "direct_dsn" and value is None:
            value = settings.db_dsn
        shown = "" if value is None else field.metadata["kind"].show(value)
        source: Any = given[field.name][1] if field.name in given else "default"
        rows.append(SettingRow(field.metadata["name"], shown, source, field.metadata["description"]))
    token, source = _client_token(_layers(env, directory))
    rows.append(SettingRow(CLIENT_VARIABLE, MASKED if token else "", source, CLIENT_DESCRIPTION))
    return rows


def unknown_variables(env: Mapping[str, str] | None = None, *, directory: Path | None = None) -> list[str]:
    """Return a sentence for each `DL_…` variable that is not a setting, with the nearest name.

    Names that begin with `DL_PIPELINE__` are checked when the settings are read. Takes the arguments of
    `load_settings`.
    """
    known = [*(field.metadata["name"] for field in attrs.fields(Settings)), CLIENT_VARIABLE]
    warnings = []
    for source, layer in _layers(env, directory):
        for name, value in layer.items():
            if name in FORMER and value.strip():
                continue  # `load_settings` raises an error for it
            if name.startswith("DL_") and not name.startswith(PREFIX) and name not in known:
                near = [FORMER[name]] if name in FORMER else difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                warnings.append(f"{quoted(name)[1:-1]} ({source}) is not a setting and has no effect{hint}")
    return warnings


def _given_values(
    env: Mapping[str, str] | None, directory: Path | None, overrides: Mapping[str, object]
) -> dict[str, tuple[object, str]]:
    """Return the given values by field, each from the highest layer that has one, with that layer's name."""
    given: dict[str, tuple[object, str]] = {}
    fields = {field.metadata["name"]: field.name for field in attrs.fields(Settings)}
    pipeline: dict[str, str] = {}
    layers = _layers(env, directory)
    _refuse_former_names(layers)
    if isinstance(variables := overrides.get("pipeline"), Mapping):
        layers.append(("command line", variables))
    for source, layer in layers:
        for name, field in fields.items():
            # `DL_DB_DSN=` and compose's `${DL_DB_DSN:-}` mean "not set", not a wrong value.
            if value := layer.get(name, "").strip():
                given[field] = (value, source)
        if variables := {name: text for name, text in layer.items() if name.startswith(PREFIX)}:
            pipeline |= variables
            given["pipeline"] = (pipeline, source)
    given |= {
        field: (value, "command line")
        for field, value in overrides.items()
        if value is not None and field != "pipeline"
    }
    if {"db_dsn", "direct_dsn"} <= given.keys():
        (_, direct_source), (_, source) = given["direct_dsn"], given["db_dsn"]
        order = [*(name for name, _ in layers), "command line"]
        if order.index(direct_source) < order.index(source):
            raise ConfigError(
                f"DL_DIRECT_DSN: is set in {direct_source}, but DL_DB_DSN in {source}, which has precedence: they "
                "might refer to different databases; set both in the same place"
            )
    return given


def _refuse_former_names(layers: list[tuple[str, Mapping[str, str]]]) -> None:
    """Raise `ConfigError` with a line for each variable that has its former name."""
    problems = [
        f"{name}: {renamed(FORMER[name])}; rename it in {'the environment' if source == 'environment' else source}"
        for source, layer in layers
        for name in FORMER
        if layer.get(name, "").strip()
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _layers(env: Mapping[str, str] | None, directory: Path | None) -> list[tuple[str, Mapping[str, str]]]:
    directory = Path.cwd() if directory is None else directory
    return [
        *((name, _read_file(directory / name)) for name in FILES),
        ("environment", os.environ if env is None else env),
    ]


def _read_file(path: Path) -> dict[str, str]:
    """Return the variables of one file. A line that sets none is an error; dotenv itself would skip it."""
    try:
        text = path.read_text("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path.name}: cannot be read: {reason}") from None
    found: dict[str, str] = {}
    for binding in parse_stream(io.StringIO(text)):
        if binding.error:
            line = binding.original.line + len(binding.original.string) - len(binding.original.string.lstrip("\n"))
            raise ConfigError(f"{path.name}: line {line} must have the form NAME=value, with closed quotes")
        if binding.key is not None and binding.value is not None:
            found[binding.key] = binding.value
    return found
