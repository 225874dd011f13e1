"""Finds the user's `Tasks` by the text `module:attribute`, and says in one line why it can't.

`serve` and `tasks` use it. The module is imported with the current directory on the path, as `python -m` would.
"""

from __future__ import annotations

import importlib
import operator
import sys
import traceback
from pathlib import Path
from types import ModuleType

from dataloader.jobs.errors import ConfigError
from dataloader.jobs.tasks import Tasks


def load_tasks(where: str) -> Tasks:
    """Import the module and return its attribute. `where` is such as `my_module:tasks` or `package.module:tasks`.

    Raises `ConfigError`, in one line: the text is no such pair, there is no such module, it fails, or has no `Tasks`.
    """
    module_name, colon, attribute = where.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        raise ConfigError(f"--tasks: must be module:attribute, for example my_module:tasks, not {where!r}")
    module = _import(module_name)
    try:
        found = operator.attrgetter(attribute)(module)
    except AttributeError:
        others = sorted(name for name, value in vars(module).items() if isinstance(value, Tasks))
        hint = f"; it has {', '.join(f'{module_name}:{name}' for name in others)}" if others else ""
        raise ConfigError(f"--tasks: module {module_name!r} has no attribute {attribute!r}{hint}") from None
    if not isinstance(found, Tasks):
        raise ConfigError(f"--tasks: {where} is a {type(found).__name__}; a dataloader.Tasks is needed")
    return found


def _import(name: str) -> ModuleType:
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(f"--tasks: there is no module {error.name!r} in {directory} or on the path") from None
        raise ConfigError(_failure(name, error)) from error
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise ConfigError(_failure(name, error)) from error


def _failure(name: str, error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        path, line = error.filename, error.lineno
    else:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        path, line = frame.filename, frame.lineno
    what = traceback.format_exception_only(error)[-1].strip()
    return f"--tasks: module {name!r} fails when it is imported: {what} ({path}, line {line})"
