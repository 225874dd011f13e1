"""Index of the tests, for `./run tests-of`: the tests of a requirement, of a source file or of a guard.

    ./run tests-of Q7                        tests with the requirement as marker
    ./run tests-of actors/claim_cursor.py    test files of a source file, and guards that edit it
    ./run tests-of "holder of a load"        the test of a guard; a part of its name is enough
    ./run tests-of                           table of requirements, and source files without a test file

It reads syntax trees only, and imports neither the product nor pytest: a question takes about a second.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import attrs

LAYERS = ("actors", "cli", "flows", "jobs", "store", "supervisor", "web")
FACE = "src/dataloader"
PACKAGE = "dataloader."
FUNCTIONS = "store/migrations/functions"
CHILD_GUARD = "actors/children/guard.py"
IMPORTS_AND_TEXTS = re.compile(
    r"^[ \t]*from dataloader[\w.]* import (?:\([^)]*\)|[^\n(]+)|^[ \t]*import dataloader[^\n]*"
    r'|"dataloader(?:\.\w+)+"',
    re.MULTILINE,
)
WIDTH = 80

Function = ast.FunctionDef | ast.AsyncFunctionDef


@attrs.frozen
class Guard:
    """Entry of broken.py: name, purpose, file and name of its test, and source files that it edits."""

    name: str
    does: str
    path: str
    test: str
    edits: list[str]


def functions_of(module: ast.Module) -> list[Function]:
    """Return the test functions of a module and of its classes."""
    bodies = [module.body, *(node.body for node in module.body if isinstance(node, ast.ClassDef))]
    return [node for body in bodies for node in body if isinstance(node, Function) and node.name.startswith("test_")]


def marked_in(module: ast.Module) -> dict[str, list[str]]:
    """Return the names of the tests for each requirement that marks them, their class, one of their cases or all."""
    marks = {test.name: numbers_in(test.decorator_list) for test in functions_of(module)}
    for node in module.body:
        if isinstance(node, ast.Assign) and "pytestmark" in map(ast.unparse, node.targets):
            for test in functions_of(module):
                marks[test.name] += numbers_in([node.value])
        elif isinstance(node, ast.ClassDef):
            for test in functions_of(ast.Module(node.body, [])):
                marks[test.name] += numbers_in(node.decorator_list)
    found: dict[str, list[str]] = {}
    for name, numbers in marks.items():
        for number in dict.fromkeys(numbers):
            found.setdefault(number, []).append(name)
    return found


def numbers_in(nodes: Iterable[ast.AST]) -> list[str]:
    """Return the requirements that marks in these parts of a syntax tree name."""
    return [
        argument.value
        for node in nodes
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.requirement"
        for argument in call.args
        if isinstance(argument, ast.Constant)
    ]


class Index:
    """Index of the tests of a repository."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cached_property
    def tests(self) -> dict[str, str]:
        """Return the text of each test file by its path."""
        return {self._path(path): path.read_text() for path in sorted(self.root.glob("tests/**/test_*.py"))}

    @cached_property
    def sources(self) -> list[str]:
        """Return the paths of the product's modules and of the files of its functions in SQL."""
        modules = [path for layer in LAYERS for path in (self.root / layer).rglob("*.py")]
        modules += (self.root / FACE).glob("*.py")
        return sorted(map(self._path, [*modules, *(self.root / FUNCTIONS).glob("*.sql")]))

    def requirement(self, number: str) -> dict[str, list[str]]:
        """Return the names of a requirement's tests for each of their files."""
        marked = {path: marked_in(self._tree(path)) for path, text in self.tests.items() if f'"{number}"' in text}
        return {path: found[number] for path, found in marked.items() if number in found}

    def requirements(self) -> dict[str, int]:
        """Return the number of tests for each requirement, ordered by letter and number."""
        counts: dict[str, int] = {}
        for path, text in self.tests.items():
            for number, tests in marked_in(self._tree(path)).items() if "mark.requirement" in text else ():
                counts[number] = counts.get(number, 0) + len(tests)
        return dict(sorted(counts.items(), key=lambda item: (item[0][0], int(item[0][1:]))))

    def named(self, source: str) -> list[str]:
        """Return the test files with a source file's name, in the folder of its tests or above it in the layer's."""
        *folders, file = source.removeprefix(f"{FACE}/").split("/")
        name = f"test_{file.rpartition('.')[0]}.py"
        places = ["/".join(["tests", *folders[:depth], name]) for depth in range(len(folders), 0, -1)]
        return [place for place in places if place in self.tests]

    def importing(self, source: str) -> list[str]:
        """Return the test files that import a source file, directly or by a public name of it."""
        return [path for path in self.tests if source in self._imports(path)]

    def folder(self, source: str) -> str:
        """Return the folder of a source file's tests: the one with its folder's path, or the nearest one above."""
        folders = source.removeprefix(f"{FACE}/").split("/")[:-1]
        places = ["/".join(["tests", *folders[:depth]]) for depth in range(len(folders), -1, -1)]
        return next(place for place in places if any(path.startswith(f"{place}/") for path in self.tests))

    def number_of_tests(self, path: str) -> int:
        """Return the number of test functions in a test file."""
        return len(functions_of(self._tree(path)))

    def without_tests(self) -> list[str]:
        """Return the modules that no test file has the name of or imports, apart from those that only import."""
        used = set[str]().union(*map(self._imports, self.tests))
        return [
            path for path in self._modules.values() if path not in used and not self.named(path) and self._acts(path)
        ]

    @cached_property
    def guards(self) -> list[Guard]:
        """Return the guards of tests/shared/broken.py."""
        values: dict[str, ast.expr] = {}
        for node in ast.parse((self.root / "tests/shared/broken.py").read_text()).body:
            if isinstance(node, ast.Assign):
                [target] = node.targets
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    values |= zip(map(ast.unparse, target.elts), node.value.elts, strict=True)
                else:
                    values[ast.unparse(target)] = node.value
        entries = values["GUARDS"]
        assert isinstance(entries, ast.Dict)
        return [self._guard(name, call, values) for name, call in zip(entries.keys, entries.values, strict=True)]

    def _guard(self, name: ast.expr | None, call: ast.expr, values: dict[str, ast.expr]) -> Guard:
        assert isinstance(call, ast.Call)
        does, test, take_out = call.args
        assert isinstance(take_out, ast.Call)
        how, what = ast.unparse(take_out.func), _text(take_out.args[0], values)
        if how == "edit_guard":
            edits = [CHILD_GUARD]
        elif how == "edit_schema":
            edits = [path for path, text in self._functions.items() if what in text]
        else:
            edits = self._files_of(what)
        path, _, function = _text(test, values).rpartition("::")
        return Guard(_text(name, values), _text(does, values), path, function, edits)

    @cached_property
    def _functions(self) -> dict[str, str]:
        return {path: (self.root / path).read_text() for path in self.sources if path.endswith(".sql")}

    @cached_property
    def _modules(self) -> dict[str, str]:
        """Return the path of each module by its name without the package's, such as `actors.claim_cursor`."""
        modules = {}
        for path in self.sources:
            if path.endswith(".py"):
                name = path.removeprefix(f"{FACE}/").removesuffix(".py").replace("/", ".")
                modules[re.sub(r"(^|\.)__init__$", "", name)] = path
        return modules

    @cached_property
    def _public(self) -> dict[str, str]:
        """Return the full name of each name that a package imports for others, such as `jobs.retry.RetryPolicy`."""
        names = {}
        for package, path in self._modules.items():
            if path.endswith("/__init__.py"):
                for node in ast.walk(ast.parse((self.root / path).read_text())):
                    for full in _names(node):
                        names[f"{package}.{full.rpartition('.')[2]}".removeprefix(".")] = full
        return names

    def _files_of(self, name: str) -> list[str]:
        """Return the files of the modules that a dotted name such as `actors.recorder.Recorder.run` leads to."""
        full = self._public.get(name, name)
        found = []
        for one in dict.fromkeys((name, full)):
            module = one
            while module and module not in self._modules:
                module = module.rpartition(".")[0]
            found += [self._modules[module]] if module in self._modules else []
        return found

    def _imports(self, path: str) -> set[str]:
        """Return the source files that a test file imports, or names in a text such as "dataloader.web.app.App"."""
        # Parsing only these statements takes a tenth of the time of parsing the whole files.
        found = [match[0].strip() for match in IMPORTS_AND_TEXTS.finditer(self.tests[path])]
        nodes = ast.walk(ast.parse("\n".join(found)))
        return {file for node in nodes for name in _names(node) for file in self._files_of(name)}

    def _acts(self, path: str) -> bool:
        """Return whether a file does more than import names for others."""
        statements = ast.parse((self.root / path).read_text()).body
        return any(not isinstance(one, ast.Import | ast.ImportFrom | ast.Expr) for one in statements)

    def _tree(self, path: str) -> ast.Module:
        return ast.parse(self.tests[path])

    def _path(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the dotted names in the package that a node imports or has as a text, without the package's name."""
    match node:
        case ast.Import(names=names):
            found = [alias.name for alias in names]
        case ast.ImportFrom(module=str(module), names=names, level=0):
            found = [f"{module}.{alias.name}" for alias in names]
        case ast.Constant(value=str(value)) if re.fullmatch(r"dataloader(\.\w+)+", value):
            found = [value]
        case _:
            return
    yield from (name.removeprefix(PACKAGE) for name in found if name.startswith(PACKAGE))


def _text(node: ast.expr | None, values: dict[str, ast.expr]) -> str:
    """Return the text of a constant, of a name in `values` or of an f-string of both."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.Name(id=name):
            return _text(values[name], values)
        case ast.FormattedValue(value=inner):
            return _text(inner, values)
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, values) for part in parts)
    raise ValueError(f"broken.py, line {getattr(node, 'lineno', 0)}: not a text that can be read without running it")


def about_requirement(index: Index, number: str) -> list[str]:
    """Return the lines about a requirement; none if no test has it as marker."""
    found = index.requirement(number)
    lines = [f"{number}: {_count(sum(map(len, found.values())), 'test')} in {_count(len(found), 'file')}"]
    for path, names in found.items():
        lines += ["", path, *names]
    return lines if found else []


def about_source(index: Index, source: str) -> list[str]:
    """Return the lines about a source file."""
    lines = [source]
    if source.endswith(".py"):
        named = index.named(source)
        others = [path for path in index.importing(source) if path not in named]
        for title, paths in (("Test files of its name", named), ("Other test files that import it", others)):
            lines += ["", f"{title}:" if paths else f"{title}: none"]
            lines += [f"{path} ({_count(index.number_of_tests(path), 'test')})" for path in paths]
        if not named and not others:
            lines += ["", f"Search for its routes, commands or names in: {index.folder(source)}"]
    guards = [guard for guard in index.guards if source in guard.edits]
    lines += ["", f"Guards that edit it: {len(guards)}"]
    for guard in guards:
        lines += ["", *about_guard(guard)]
    return lines


def about_guard(guard: Guard) -> list[str]:
    """Return the lines about a guard."""
    return [f"{guard.name}:", *textwrap.wrap(guard.does, WIDTH), guard.path, guard.test]


def about_all(index: Index) -> list[str]:
    """Return the table of requirements and the list of source files without a test file."""
    without = index.without_tests()
    return [
        "Tests of each requirement:",
        *(f"{number:<4}{tests:>5}" for number, tests in index.requirements().items()),
        "",
        f"Source files that no test file imports or has the name of: {len(without)}",
        *without,
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def answer(index: Index, what: str) -> list[str]:
    """Return the lines about a requirement, a source file or guards; none if `what` is none of them."""
    if not what:
        return about_all(index)
    if re.fullmatch(r"[A-Z]\d+", what):
        return about_requirement(index, what)
    source = re.sub(rf"^{FACE}/(?=({'|'.join(LAYERS)})/)", "", what.removeprefix("./"))
    if source in index.sources:
        return about_source(index, source)
    guards = [guard for guard in index.guards if what.lower() in guard.name.lower()]
    guards = [guard for guard in guards if guard.name == what] or guards
    return [line for guard in guards for line in ("", *about_guard(guard))][1:]


def main(arguments: list[str], root: Path) -> int:
    """Print the answer; return 2 if there is none."""
    what = " ".join(arguments)
    if lines := answer(Index(root), what):
        print("\n".join(lines))  # noqa: T201 - a command of the justfile
        return 0
    print(  # noqa: T201
        f"tests-of: {what!r} is not a requirement with tests (Q7), a source file\n"
        "(actors/claim_cursor.py) or a part of a guard's name.",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(__file__).parents[2]))
