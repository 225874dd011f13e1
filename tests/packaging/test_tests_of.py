"""The index of the tests: `./run tests-of` finds the tests of a requirement, of a source file and of a guard."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import tests_of
from broken import GUARDS
from tests_of import Index

ROOT = Path(__file__).parents[2]
FILES = {
    "actors/poller.py": "def poll(): ...",
    "jobs/__init__.py": "from dataloader.jobs.retry import Retry",
    "jobs/retry.py": "class Retry: ...",
    "jobs/keys.py": "def key(): ...",
    "actors/children/guard.py": "def guard(): ...",
    "actors/children/channel.py": "def channel(): ...",
    "src/dataloader/__init__.py": "from dataloader.jobs.retry import Retry",
    "store/migrations/functions/claim.sql": "FOR UPDATE SKIP LOCKED",
    "store/migrations/functions/after.sql": "FOR UPDATE",
    "tests/actors/test_poller.py": """
        from dataloader import (  # a comment
            Retry,
        )
        pytestmark = [pytest.mark.slow, pytest.mark.requirement("Q1")]
        def test_a(): ...
        @pytest.mark.requirement("Q2", "Q1")
        async def test_b():
            def test_nested(): ...
        """,
    "tests/actors/test_guard.py": "def test_c(): ...",
    "tests/jobs/test_other.py": """
        from dataloader.jobs import keys
        @pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.requirement("Q2"))])
        def test_d(monkeypatch, n):
            monkeypatch.setattr("dataloader.actors.poller.poll", None)
        @pytest.mark.requirement("Q3")
        class TestIt:
            def test_e(self): ...
        def helper(): ...
        """,
    "tests/shared/broken.py": """
        STORE, ACTORS = "tests/store", "tests/actors"
        LOCK = "SKIP LOCKED"
        GUARDS = {
            "lock in the claim": Guard("it locks", f"{STORE}/test_x.py::test_x", edit_schema(LOCK, "")),
            "poll": Guard("it polls", f"{ACTORS}/test_poller.py::" "test_a", put("actors.poller.Poller.poll", None)),
            "kill": Guard("it kills", "tests/actors/test_guard.py::test_c", edit_guard("a", "b")),
        }
        """,
}


@pytest.fixture
def index(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = text.split("\n")
        indent = len(lines[1]) - len(lines[1].lstrip()) if len(lines) > 1 else 0
        path.write_text("\n".join(line[indent:] for line in lines))
    return Index(tmp_path)


def test_a_requirement_has_the_tests_that_a_marker_of_any_place_names(index):
    assert index.requirement("Q1") == {"tests/actors/test_poller.py": ["test_a", "test_b"]}
    assert index.requirement("Q2") == {
        "tests/actors/test_poller.py": ["test_b"],
        "tests/jobs/test_other.py": ["test_d"],
    }
    assert index.requirement("Q3") == {"tests/jobs/test_other.py": ["test_e"]}
    assert index.requirements() == {"Q1": 2, "Q2": 2, "Q3": 1}


def test_a_source_file_has_the_tests_of_its_name_and_those_that_import_it(index):
    assert index.named("actors/poller.py") == ["tests/actors/test_poller.py"]
    assert index.named("actors/children/guard.py") == ["tests/actors/test_guard.py"]
    assert index.importing("actors/poller.py") == ["tests/jobs/test_other.py"]
    assert index.importing("jobs/keys.py") == ["tests/jobs/test_other.py"]
    assert index.importing("jobs/retry.py") == ["tests/actors/test_poller.py"]
    assert index.without_tests() == ["actors/children/channel.py"]


def test_a_source_file_without_a_test_file_has_the_nearest_folder_of_tests(index):
    assert tests_of.answer(index, "actors/children/channel.py")[-3] == (
        "Search for its routes, commands or names in: tests/actors"
    )
    assert [index.folder(path) for path in ("store/x/y.py", "jobs/keys.py")] == ["tests", "tests/jobs"]


def test_a_source_file_has_the_guards_that_edit_it(index):
    def edited(path):
        return [guard.name for guard in index.guards if path in guard.edits]

    assert edited("store/migrations/functions/claim.sql") == ["lock in the claim"]
    assert edited("store/migrations/functions/after.sql") == []
    assert edited("actors/poller.py") == ["poll"]
    assert edited("actors/children/guard.py") == ["kill"]


def test_the_answer_about_a_source_file_has_its_tests_and_guards(index):
    poll = ["poll:", "it polls", "tests/actors/test_poller.py", "test_a"]
    assert tests_of.answer(index, "./actors/poller.py") == [
        "actors/poller.py",
        "",
        "Test files of its name:",
        "tests/actors/test_poller.py (2 tests)",
        "",
        "Other test files that import it:",
        "tests/jobs/test_other.py (2 tests)",
        "",
        "Guards that edit it: 1",
        "",
        *poll,
    ]
    assert tests_of.answer(index, "src/dataloader/actors/poller.py") == tests_of.answer(index, "actors/poller.py")
    assert tests_of.answer(index, "poll") == tests_of.answer(index, "POL") == poll


def test_the_guards_are_read_as_they_are():
    guards = Index(ROOT).guards
    assert [(one.name, one.does, f"{one.path}::{one.test}") for one in guards] == [
        (name, guard.does, guard.test) for name, guard in GUARDS.items()
    ]
    assert [one.name for one in guards if not one.edits] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", ["", "Q7", "actors/claim_cursor.py", "store/queue/lock_session.py", "row lock in the beginning of a step"]
)
def test_an_answer_has_eighty_columns_and_names_tests_that_exist(what):
    lines = tests_of.answer(Index(ROOT), what)
    assert len(lines) >= 4
    assert [line for line in lines if len(line) > 80] == []
    path = None
    for line in lines:
        if line.startswith("tests/"):
            path = line.partition(" ")[0]
        elif line.startswith("test_"):
            assert f"def {line}(" in (ROOT / path).read_text()


def test_a_question_without_an_answer_ends_with_2():
    command = [sys.executable, ROOT / "tests" / "shared" / "tests_of.py", "Q99"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tests-of: 'Q99' is not a requirement with tests (Q7), a source file\n")


@pytest.mark.slow
def test_every_import_of_a_test_file_is_seen():
    index = Index(ROOT)
    for path, text in index.tests.items():
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
        imported = {file for node in nodes for name in tests_of._names(node) for file in index._files_of(name)}
        assert imported <= index._imports(path), path
