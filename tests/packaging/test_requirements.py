"""Every requirement of the queue service has a test that names it, by `@pytest.mark.requirement("Q7")`."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
QUEUE_SERVICE = {f"Q{number}" for number in range(1, 19)}


def named_requirements(source: str) -> set[str]:
    """The numbers in the marks on the tests of a file: on a function, a class, a case, or by `pytestmark` on all."""
    return {
        argument.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", None) == "requirement"
        and ast.unparse(node.func) == "pytest.mark.requirement"
        for argument in node.args
        if isinstance(argument, ast.Constant)
    }


def test_every_requirement_has_a_test_that_names_it() -> None:
    named = set().union(*(named_requirements(path.read_text()) for path in TESTS.rglob("test_*.py")))
    missing = sorted(QUEUE_SERVICE - named, key=lambda number: int(number[1:]))
    assert not missing, f"no test names {', '.join(missing)}"
    unknown = {number for number in named if not re.fullmatch(r"[EPRS]\d+", number)} - QUEUE_SERVICE
    assert not unknown, f"no requirement has the number {', '.join(sorted(unknown))}"


def test_marks_are_found_wherever_they_may_stand() -> None:
    source = (
        'pytestmark = pytest.mark.requirement("Q1")\n'
        '@pytest.mark.requirement("Q2", "Q3")\nasync def test_a(): ...\n'
        '@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.requirement("Q4"))])\ndef test_b(n): ...\n'
        '# pytest.mark.requirement("Q5")\n'
    )
    assert named_requirements(source) == {"Q1", "Q2", "Q3", "Q4"}
