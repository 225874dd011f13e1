"""The layers: one link each in the package, imports in one direction, no import by a bare name, each name once."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FACE = ROOT / "src" / "dataloader"
ROOMS = {"supervisor", "cli", "actors", "web", "flows", "store", "jobs"}


def test_each_room_has_a_relative_link_in_the_package_and_nothing_else_has() -> None:
    links = {path.name: str(path.readlink()) for path in FACE.iterdir() if path.is_symlink()}
    assert links == {room: f"../../{room}" for room in ROOMS}
    for room in ROOMS:
        assert (FACE / room / "__init__.py").samefile(ROOT / room / "__init__.py")


def test_each_package_at_the_top_of_the_repository_is_a_room() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == ROOMS


def test_bare_imports_of_rooms_are_banned() -> None:
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    assert set(ruff["lint"]["flake8-tidy-imports"]["banned-api"]) == ROOMS


@pytest.mark.slow
def test_imports_run_one_way() -> None:
    done = _lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


WRONG_IMPORTS = [
    ("dataloader.jobs", "dataloader.store"),
    ("dataloader.store", "dataloader.actors"),
    ("dataloader.actors", "dataloader.web"),
    ("dataloader.web", "dataloader.flows"),
    ("dataloader.flows", "dataloader.supervisor"),
    ("dataloader.supervisor", "asyncpg"),
    ("dataloader.actors", "asyncpg"),
    ("dataloader.actors", "quart"),
    ("dataloader", "hypercorn"),
    ("dataloader.jobs", "prometheus_client"),
]


@pytest.mark.slow
def test_each_wrong_import_is_found(tmp_path: Path) -> None:
    for name in (*ROOMS, "src"):
        _copy_python(ROOT / name, tmp_path / name)
    wrong = {f"{package}.wrong_{number}": wrong_import for number, (package, wrong_import) in enumerate(WRONG_IMPORTS)}
    for module, wrong_import in wrong.items():
        (tmp_path / "src" / f"{module.replace('.', '/')}.py").write_text(f"import {wrong_import}\n")
    done = _lint_imports(tmp_path)
    assert done.returncode == 1
    for module, wrong_import in wrong.items():
        assert f"{module} -> {wrong_import}" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_no_modules_import_each_other_in_a_circle(tmp_path: Path) -> None:
    assert _circle(ROOT) == []
    for name in (*ROOMS, "src"):
        _copy_python(ROOT / name, tmp_path / name)
    with (tmp_path / "jobs" / "ids.py").open("a") as module:
        # Imports for annotations and imports in functions are no exceptions.
        module.write("if TYPE_CHECKING:\n    import dataloader.jobs.model\n")
    assert {"dataloader.jobs.ids", "dataloader.jobs.model"} <= set(_circle(tmp_path))


# A name that is defined once can be found by a search. These need their names where they are:
NAMES_DEFINED_TWICE = {
    "LogLine",  # a public name of dataloader.testing, and a schema of the HTTP API
    "__getattr__",  # Python calls it when a module lacks a name
}


def test_the_name_of_a_function_or_a_class_is_defined_in_one_module() -> None:
    assert _names_defined_twice(_modules()).keys() == NAMES_DEFINED_TWICE
    wrong = {
        "jobs/one.py": "async def run(): ...\nclass _Row: ...",
        "store/two.py": "if True:\n    def run(): ...\nelse:\n    class _Row: ...",
        "store/three.py": "class Other:\n    def run(self): ...",
    }
    places = ["jobs/one.py", "store/two.py"]
    assert _names_defined_twice({name: ast.parse(text) for name, text in wrong.items()}) == {
        "run": places,
        "_Row": places,
    }


PRIVATE_NAMES_OF_OTHERS = {
    "os._exit",  # the documented end of a process that must not clean up
    "sys._current_frames",  # the documented way to see another thread's stack
    "asyncio._get_running_loop",  # for authors of event loops
    "asyncio._set_running_loop",
    "urlsplit(dsn)._replace",  # a method of named tuples, which cannot have public ones
}


def test_a_private_name_is_used_only_in_its_module() -> None:
    used = {text for module in _modules().values() for text in _private_names_of_others(module)}
    assert used == PRIVATE_NAMES_OF_OTHERS
    wrong = "from a import _b\nself._own = run._port; run._new = 1; run.parts[0]._own = super()._c + cls._d"
    assert list(_private_names_of_others(ast.parse(wrong))) == ["from a import _b", "run._port", "run._new"]


def test_the_domain_is_pure() -> None:
    """It neither waits nor runs nor prints anything: values, rules, texts, and the logger's name."""
    # typing_extensions is for type checkers, which contain it: no program imports it when it runs.
    # cronsim only computes: it reads an expression and matches days.
    allowed = {"attrs", "cronsim", "msgspec", "structlog", "typing_extensions"}
    impure = {"asyncio", "signal", "socket", "subprocess", "threading"}
    # Several threads mask, and share the memory of long texts, so it has a lock.
    locked = ROOT / "jobs" / "secrets" / "long_texts.py"
    for path in (ROOT / "jobs").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import():
                    named = {alias.name for alias in node.names}
                case ast.ImportFrom():
                    named = {str(node.module)}
                case _:
                    continue
            tops = {name.partition(".")[0] for name in named} - {"dataloader"}
            if path == locked:
                tops -= {"threading"}
            assert not tops & impure, (path, tops)
            assert tops - sys.stdlib_module_names <= allowed, (path, tops)


def _modules() -> dict[str, ast.Module]:
    paths = [path for name in (*ROOMS, "src") for path in (ROOT / name).rglob("*.py")]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}


def _names_defined_twice(modules: dict[str, ast.Module]) -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    for place, module in modules.items():
        for name in set(_defined_in(module.body)):
            places.setdefault(name, []).append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def _defined_in(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.If() | ast.Try():
                yield from _defined_in([*node.body, *node.orelse])


def _private_names_of_others(module: ast.Module) -> Iterator[str]:
    """Yield the uses of private names that the module does not define, except those of its objects' own classes."""
    nodes = list(ast.walk(module))
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls"), ctx=ast.Store()):
                own.add(node.attr)
    for node in nodes:
        match node:
            case ast.ImportFrom():
                yield from (f"from {node.module} import {one.name}" for one in node.names if _is_private(one.name))
            case ast.Attribute(value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super"))):
                pass
            case ast.Attribute() if _is_private(node.attr) and node.attr not in own:
                yield ast.unparse(node)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _circle(root: Path) -> list[str]:
    """Return the modules of one circle of imports, in a separate process: the graph is that of `root`."""
    program = """
import grimp, graphlib
graph = grimp.build_graph("dataloader", cache_dir=None)
imported = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
try:
    graphlib.TopologicalSorter(imported).prepare()
except graphlib.CycleError as error:
    print("\\n".join(error.args[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.split()


def _lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            Path(sys.executable).with_name("lint-imports"),
            "--no-logo",
            "--no-cache",
            "--config",
            ROOT / "pyproject.toml",
        ],
        cwd=root,
        env={"PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _copy_python(source: Path, target: Path) -> None:
    for path in source.iterdir():
        copy = target / path.name
        if path.is_symlink():
            target.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(path.readlink())
        elif path.is_dir():
            _copy_python(path, copy)
        elif path.suffix == ".py":
            target.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
