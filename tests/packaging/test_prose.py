"""The check of the product's language refuses headless docstrings, double meanings and long lines of prose."""

from __future__ import annotations

import pytest
from prose import ROOT, UNREVISED, faults_in, faults_of_code, faults_of_lines, faults_of_phrases, is_command


@pytest.mark.parametrize(
    ("docstring", "is_fine"),
    [
        ("Return the job.", True),
        ("Pass it on.", True),
        ("Need a lock.", True),
        ("What the job has returned.", False),
        ("Whether it runs.", False),
        ("Those that wait.", False),
        ("The next job.", False),
        ("Returns the job.", False),
        ("Called for each job.", False),
        ("Waiting for jobs.", False),
        ("`get_job` in a transaction.", False),
    ],
)
def test_a_docstring_begins_with_a_verb(docstring, is_fine):
    assert is_command(docstring) is is_fine


def test_a_property_may_have_a_noun_phrase():
    code = '''
class A:
    @property
    def a(self):
        """Number of jobs."""

    def b(self):
        """Number of jobs."""
'''
    [(line, fault)] = faults_of_code(code)
    assert (line, "docstring `Number of jobs." in fault) == (7, True)


@pytest.mark.parametrize(
    ("text", "phrases"),
    [
        ("They end at once.", ["at once"]),
        ("They end at\nonce.", ["at once"]),
        ("A limit of so many seconds.", ["so many"]),
        ("It is told of jobs.", ["is told"]),
        ("A transaction of its own.", ["of its own"]),
        ("A transaction of its own for each.", ["of its own for"]),
        ("It waits for the end of its own request.", []),
    ],
)
def test_phrases_with_two_meanings_are_refused(text, phrases):
    assert [fault.split("`")[1] for _, fault in faults_of_phrases(text)] == phrases


LONG = "word " * 30


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (f"short\n{LONG}", [2]),
        (f"| {LONG} |", []),
        (f"```\n{LONG}\n```\n{LONG}", [4]),
        (f"  `{LONG}`.", []),
        (f"[short](https://example.org/{'x' * 120})", []),
        (f"<!-- Generated from the code. -->\n{LONG}", []),
    ],
)
def test_long_lines_are_found_in_prose_alone(text, lines):
    assert [line for line, _ in faults_of_lines(text)] == lines


def test_files_are_named_with_their_lines(tmp_path):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "a.py").write_text('def a():\n    """What it does."""\n')
    (tmp_path / "store" / "migrations").mkdir(parents=True)
    (tmp_path / "store" / "migrations" / "0001_first.sql").write_text("-- at once")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "b.md").write_text("All at once.\n")
    (tmp_path / "docs" / "linked.md").symlink_to(tmp_path / "docs" / "b.md")
    assert [fault.rpartition(": ")[0].partition("`")[0] for fault in faults_in(tmp_path)] == [
        "jobs/a.py:1: docstring ",
        "docs/b.md:1: ",
    ]


def test_unrevised_pages_exist():
    assert [name for name in UNREVISED if not (ROOT / name).is_file()] == []
