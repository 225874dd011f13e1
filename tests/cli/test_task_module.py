"""`--tasks module:attribute`: the found registry, and one clear line for each kind of failure."""

from __future__ import annotations

import itertools
import json
import signal
import sys

import pytest

numbers = itertools.count()


@pytest.fixture
def module(tmp_path):
    """Return a function that writes a module and returns its name, which is unique: Python keeps imported modules."""

    def write(text: str) -> str:
        name = f"module_of_a_test_{next(numbers)}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


@pytest.mark.slow
@pytest.mark.requirement("Q15")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("command", ["tasks", "serve"])
def test_a_signal_while_the_tasks_are_imported_ends_the_command_without_a_word(start, module, command, number):
    name = module("import sys, time\nsys.stderr.write('imported\\n')\nsys.stderr.flush()\ntime.sleep(60)\n")
    process = start(command, "--tasks", f"{name}:tasks")
    assert process.stderr.readline() == "imported\n"
    process.send_signal(number)
    # Not by the signal itself, which the kernel withholds from the first process of a container.
    assert process.wait(timeout=20) == 128 + number
    assert process.stderr.read() == ""


@pytest.mark.slow
@pytest.mark.requirement("Q15")
def test_a_sigterm_ends_an_import_with_its_own_code_where_sigint_is_ignored(start, module):
    """Like a background job of a shell."""
    ignore = "import signal, sys, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    name = module(f"{ignore}sys.stderr.write('imported\\n')\nsys.stderr.flush()\ntime.sleep(60)\n")
    process = start("serve", "--tasks", f"{name}:tasks")
    assert process.stderr.readline() == "imported\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 128 + signal.SIGTERM
    assert process.stderr.read() == ""


TASKS = "from dataloader.jobs.tasks import Tasks\ntasks = Tasks()\n"


def test_tasks_of_a_module_in_the_current_directory_are_listed(dataloader, module):
    name = module(
        f"{TASKS}@tasks.task('load.ecb', timeout_s=60, max_attempts=3)\n"
        "async def load(job):\n    'Load rates.\\n\\nMore.'\n"
        "from dataloader import RetryPolicy\n"
        "import dataclasses\n@dataclasses.dataclass\nclass Year:\n    year: int\n"
        "@tasks.task('report', retry=RetryPolicy(base_s=10, factor=2), args=Year, queue='own', lock_key=('year',))\n"
        "def report(job): ...\n"
    )
    result = dataloader("tasks", "--tasks", f"{name}:tasks")
    assert result.returncode == 0, result.stderr
    assert "30 s × attempt, at most" in result.stdout
    assert "10 s × 2 ^ (attempt - 1), at most" in result.stdout
    assert [line.split()[:2] for line in result.stdout.splitlines()[1:]] == [
        ["load.ecb", "async"],
        ["report", "thread"],
    ]
    load, report = json.loads(dataloader("tasks", "--tasks", f"{name}:tasks", "--json").stdout)
    assert (load["description"], load["timeout_s"], load["max_attempts"]) == ("Load rates.", 60, 3)
    assert report["timeout_s"] is None
    assert (report["args"], report["queue"], report["lock_key"]) == ("Year", "own", ["year"])
    assert (load["args"], load["queue"], load["lock_key"]) == (None, None, None)


@pytest.mark.parametrize(
    ("text", "attribute", "said"),
    [
        (TASKS, "task", "has no attribute 'task'; its tasks: {name}:tasks"),
        ("", "tasks", "has no attribute 'tasks'"),
        ("tasks = {{}}", "tasks", "{name}:tasks is a dict; it must be a dataloader.Tasks"),
        ("import no_such_library", "tasks", "failed: ModuleNotFoundError: No module named 'no_such"),
        ("x = 1\ny = x / 0", "tasks", "ZeroDivisionError: division by zero ("),
        ("x = 1\ny = x / 0", "tasks", "{name}.py, line 2)"),
        ("x = 1\nx = = 1", "tasks", "SyntaxError: invalid syntax ("),
        ("x = 1\nx = = 1", "tasks", "{name}.py, line 2)"),
        ("raise SystemExit(7)", "tasks", "SystemExit: 7 ("),
    ],
)
def test_a_module_that_does_not_serve_is_one_line(dataloader, module, text, attribute, said):
    name = module(text.format())
    result = dataloader("tasks", "--tasks", f"{name}:{attribute}")
    assert result.returncode == 2
    assert said.format(name=name) in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("no_such_module:tasks", "module 'no_such_module' not found in "),
        ("json.no_such_part:tasks", "module 'json.no_such_part' not found in "),
        ("no_such_module", "must have the form module:attribute, such as my_module:tasks, not 'no_such_module'"),
        ("a/b.py:tasks", "not 'a/b.py:tasks'"),
        (":", "not ':'"),
    ],
)
def test_a_module_that_is_not_there_is_one_line(dataloader, where, said):
    result = dataloader("tasks", "--tasks", where)
    assert result.returncode == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.fixture
def folder(tmp_path_factory, monkeypatch):
    """Return another folder with a module, as text, whose name no other test uses."""

    monkeypatch.setattr(sys, "path", [*sys.path])

    def make(text: str, *parts: str) -> tuple:
        folder = tmp_path_factory.mktemp("elsewhere").joinpath(*parts)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"module_of_a_test_{next(numbers)}"
        (folder / f"{name}.py").write_text(text)
        return folder, name

    return make


def test_modules_are_found_in_each_folder_of_path_and_where_its_pth_files_lead(dataloader, folder):
    first, library = folder("")
    behind, far = folder("")
    (first / "more.pth").write_text(f"{behind}\n")
    second, name = folder(f"import {library}, {far}\n{TASKS}@tasks.task('found')\ndef found(job): ...\n")
    result = dataloader("tasks", "--path", second, "--tasks", f"{name}:tasks")
    assert f"No module named '{library}'" in result.stderr
    result = dataloader("tasks", "--path", first, "--path", second, "--tasks", f"{name}:tasks")
    assert result.returncode == 0, result.stderr
    assert "found" in result.stdout


@pytest.mark.slow
def test_what_the_program_brings_comes_before_what_a_folder_has(start, folder, module):
    library, _ = folder("")
    (library / "msgspec.py").write_text("raise RuntimeError('not the one that the program was built with')")
    (library / "pika.py").write_text("raise RuntimeError('not the one that the program was built with')")
    process = start("tasks", "--path", library, "--tasks", f"{module(f'import msgspec, pika{chr(10)}{TASKS}')}:tasks")
    assert (process.wait(timeout=60), process.stderr.read()) == (0, "no tasks\n")


def test_a_folder_of_another_python_is_one_line(dataloader, folder):
    library, name = folder(TASKS, "lib", "python3.7", "site-packages")
    result = dataloader("tasks", "--path", library, "--tasks", f"{name}:tasks")
    assert result.returncode == 2
    said = (
        f"--path: {library} is for Python 3.7; this program uses Python {sys.version_info[0]}.{sys.version_info[1]}\n"
    )
    assert result.stderr == said


def test_a_missing_folder_is_reported(dataloader):
    result = dataloader("tasks", "--path", "/no/such", "--tasks", "json:tasks")
    assert result.returncode == 2
    assert "'--path': Directory '/no/such' does not exist" in result.stderr
