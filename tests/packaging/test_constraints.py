"""constraints.txt has one version for each package of an installation, so that two runs of the tests test the same."""

import tomllib
from importlib.metadata import requires
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def all_requirements(project: dict) -> set[Requirement]:
    """Return the requirements of the project with all its extras, their requirements on this Python, and so on."""
    found: set[Requirement] = set()
    own = list(chain(project["dependencies"], *project["optional-dependencies"].values()))
    waiting = [Requirement(line) for line in own if not line.startswith(project["name"])]
    while waiting:
        current = waiting.pop()
        found.add(current)
        for requirement in map(Requirement, requires(current.name) or ()):
            extras = current.extras or {""}
            wanted = not requirement.marker or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)
            if wanted and requirement not in found:
                waiting.append(requirement)
    return found


def test_every_requirement_is_pinned_to_a_version_that_it_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    for requirement in all_requirements(project):
        name = canonicalize_name(requirement.name)
        assert name in versions, f"{requirement} is not pinned"
        assert requirement.specifier.contains(versions[name], prereleases=True), requirement
