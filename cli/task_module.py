"""Finds the user's `Tasks` by the text `module:attribute`; reports errors in one line.

Used by `serve`, `tasks` and `etl`. The module is imported with the current directory on the path, as by `python -m`,
and with the folders of `--path`. These are last, so that the program's own packages stay those that it was built with.
"""

from __future__ import annotations

import importlib
import operator
import re
import site
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Final

import click

from dataloader.cli.imports import few_collections
from dataloader.jobs.errors import ConfigError
from dataloader.jobs.tasks import Tasks

PYTHON: Final = f"{sys.version_info[0]}.{sys.version_info[1]}"


def _add_folders(_context: click.Context, _parameter: click.Parameter, folders: tuple[Path, ...]) -> None:
    for folder in folders:
        for part in folder.resolve().parts:
            of = re.fullmatch(r"python(\d+\.\d+)", part)
            if of is not None and of[1] != PYTHON:
                raise ConfigError(f"--path: {folder} is for Python {of[1]}; this program uses Python {PYTHON}")
        site.addsitedir(str(folder.resolve()))  # reads the .pth files of a site-packages folder


path_option = click.option(
    "--path",
    metavar="FOLDER",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    multiple=True,
    expose_value=False,
    callback=_add_folders,
    help="Additional folder of modules, such as a site-packages folder; may be repeated.",
)
"""Option for each command that takes `--tasks`."""


def load_tasks(where: str) -> Tasks:
    """Import the module and return its attribute. `where` is such as `my_module:tasks` or `package.module:tasks`.

    Raises `ConfigError`, with one line, if the text has another form, the module is missing or fails, or has no
    `Tasks`.
    """
    module_name, colon, attribute = where.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        raise ConfigError(f"--tasks: must have the form module:attribute, such as my_module:tasks, not {where!r}")
    module = _import(module_name)
    try:
        found = operator.attrgetter(attribute)(module)
    except AttributeError:
        others = sorted(name for name, value in vars(module).items() if isinstance(value, Tasks))
        hint = f"; its tasks: {', '.join(f'{module_name}:{name}' for name in others)}" if others else ""
        raise ConfigError(f"--tasks: module {module_name!r} has no attribute {attribute!r}{hint}") from None
    if not isinstance(found, Tasks):
        raise ConfigError(f"--tasks: {where} is a {type(found).__name__}; it must be a dataloader.Tasks")
    return found


def _import(name: str) -> ModuleType:
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        with few_collections():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"--tasks: module {error.name!r} not found in {directory}, in a folder of --path or in the program"
            ) from None
        raise ConfigError(f"{_import_failure(name, error)}{_hint()}") from error
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise ConfigError(_import_failure(name, error)) from error


def _hint() -> str:
    if not getattr(sys, "frozen", False):
        return ""
    return f"; the standalone binary has no other packages: pass a site-packages folder of Python {PYTHON} as --path"


def _import_failure(name: str, error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        path, line = error.filename, error.lineno
    else:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        path, line = frame.filename, frame.lineno
    what = traceback.format_exception_only(error)[-1].strip()
    return f"--tasks: importing the module {name!r} failed: {what} ({path}, line {line})"
