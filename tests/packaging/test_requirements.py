"""Every requirement of the queue service has a test that names it, by `@pytest.mark.requirement("Q7")`."""

import ast
import re
from pathlib import Path

import pytest
from tests_of import numbers_in

TESTS = Path(__file__).parents[1]
QUEUE_SERVICE = {f"Q{number}" for number in range(1, 19)}


def named_requirements(source: str) -> set[str]:
    """Return the numbers in the marks on the tests of a file."""
    return set(numbers_in([ast.parse(source)]))


@pytest.mark.slow
def test_every_requirement_has_a_test_that_names_it() -> None:
    named = set().union(*(named_requirements(path.read_text()) for path in TESTS.rglob("test_*.py")))
    missing = sorted(QUEUE_SERVICE - named, key=lambda number: int(number[1:]))
    assert not missing, f"no test names {', '.join(missing)}"
    unknown = {number for number in named if not re.fullmatch(r"[EPRS]\d+", number)} - QUEUE_SERVICE
    assert not unknown, f"no requirement has the number {', '.join(sorted(unknown))}"


def test_marks_are_found_in_every_position() -> None:
    source = (
        'pytestmark = pytest.mark.requirement("Q1")\n'
        '@pytest.mark.requirement("Q2", "Q3")\nasync def test_a(): ...\n'
        '@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.requirement("Q4"))])\ndef test_b(n): ...\n'
        '# pytest.mark.requirement("Q5")\n'
    )
    assert named_requirements(source) == {"Q1", "Q2", "Q3", "Q4"}
