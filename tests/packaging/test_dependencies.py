"""The program imports exactly the packages that it declares."""

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ROOMS = ("supervisor", "cli", "actors", "web", "flows", "store", "jobs", "src")


def imported_modules(source: str) -> set[str]:
    """Return the first names of all modules that a file imports, anywhere, or reads with `files(…)`."""
    names: set[str] = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []  # for type checkers, which contain typing_extensions
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "files":
            names |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return {name.partition(".")[0] for name in names}


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for extra in extras.keys() - {"dev", "site"} for line in extras[extra])]
    declared = {canonicalize_name(Requirement(line).name) for line in lines} - {"dataloader-supervisor"}

    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    modules = set().union(*(imported_modules(path.read_text()) for path in files)) - {"dataloader"}
    owners = packages_distributions()
    imported = {
        canonicalize_name(owner) for name in modules - sys.stdlib_module_names for owner in owners.get(name, [name])
    } - {"botocore"}  # a part of boto3
    # zoneinfo reads tzdata by itself if the machine has no time zones.
    assert imported == declared - {"tzdata"}
