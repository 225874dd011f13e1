"""The documentation agrees with the program."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path

import attrs
import pytest
import yaml
from attempts import USES_ATTEMPT
from tests_of import functions_of

from dataloader.flows.etl.declare.pipeline_config import PREFIX, PipelineConfig
from dataloader.jobs.states import TRANSITIONS, Status, Step
from dataloader.store.connection import connect
from dataloader.supervisor import tree
from dataloader.supervisor.settings import Settings

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted((ROOT / "docs").rglob("*.md"))


def read(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def test_the_table_of_transitions_is_that_of_the_code():
    [table] = re.findall(r"<!-- transitions -->\n(.*?)<!-- /transitions -->", read("architecture.md"), re.DOTALL)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert {(Status(row[0]), Step(row[1])): Status(row[2]) for row in rows} == TRANSITIONS
    assert len(rows) == len(TRANSITIONS)
    burns = {True: "yes", False: "no", None: ""}
    assert [(row[1], row[3]) for row in rows] == [(row[1], burns[USES_ATTEMPT.get(Step(row[1]))]) for row in rows]


def test_the_tree_is_drawn_as_in_the_code():
    drawn = read("architecture.md").split("## The tree")[1].split("```")[1].strip("\n").splitlines()
    assert tree.__doc__ is not None
    in_code = [line.removeprefix("    ") for line in tree.__doc__.splitlines()]
    assert "\n".join(drawn) in "\n".join(in_code)


@pytest.mark.parametrize("name", ["architecture.md", "deep-dives/actors.md", "deep-dives/schema.md"])
def test_files_and_folders_named_for_readers_of_the_code_exist(name):
    text = read(name)
    named = {place: line for line in text.splitlines() for place in re.findall(r"`([\w.]+/[\w./-]*)`", line)}
    assert named
    # In the table of layers, folders are those of the row's layer.
    layers = {place: re.findall(r"^\| `([\w/]+/)` \|", line) for place, line in named.items()}
    missing = {place for place in named if not any((ROOT / layer / place).exists() for layer in ("", *layers[place]))}
    assert missing == set()
    assert len(text.split()) <= 2_500


@pytest.mark.parametrize("room", ["flows", "store"])
def test_every_folder_of_a_layer_is_in_the_table_of_layers(room):
    [row] = re.findall(rf"^\| `{room}/` \|.*", read("architecture.md"), re.MULTILINE)
    folders = {path.parent.name for path in (ROOT / room).glob("*/*.py")}
    assert folders
    assert {folder for folder in folders if f"`{folder}/`" not in row} == set()


def test_the_startup_parameters_of_a_connection_are_documented_for_poolers():
    [told] = re.findall(r"ignore_startup_parameters = ([^`]*)`", read("postgresql.md"))
    source = inspect.getsource(connect.connect)
    sent = set(re.findall(r'^ +"(\w+)": ', source, re.MULTILINE)) | set(connect.PLANNER)
    known_to_pgbouncer = {"application_name", "timezone", "standard_conforming_strings"}
    assert set(told.replace("\n", " ").replace(" ", "").split(",")) == sent - known_to_pgbouncer


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_settings_that_a_document_names_exist(path):
    named = set(re.findall(r"\b(?:DL_[A-Z_]*[A-Z]|WORKERS_JSON)\b(?!__|…)", path.read_text()))
    known = {field.metadata["name"] for field in attrs.fields(Settings)} | {"DL_TOKEN", "DL_PIPELINE"}
    known |= {PREFIX + field.name.upper() for field in attrs.fields(PipelineConfig)}
    # Names for a single load contain the load's name.
    assert {re.sub(rf"^{PREFIX}\w+__", PREFIX, name) for name in named} <= known


@pytest.mark.parametrize(
    "path",
    [
        *DOCUMENTS,
        *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
        *sorted((ROOT / "benchmarks").glob("*.md")),
    ],
    ids=lambda path: path.name,
)
def test_links_within_the_project_lead_somewhere(path):
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_files_and_recipes_named_for_contributors_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    files = set(re.findall(r"`([\w.]+/[\w./]*|[\w/]*\.env\.example)`", text)) | set(
        re.findall(r" (tests/[\w/]+\.py)", text)
    )
    assert len(files) > 30
    assert [file for file in sorted(files) if not (ROOT / file).exists()] == []
    recipes = set(re.findall(r"`\./run (\w[\w-]*)", text))
    justfile = (ROOT / "justfile").read_text()
    assert [name for name in sorted(recipes) if not re.search(rf"^{name}\b.*:", justfile, re.MULTILINE)] == []
    [file, part] = re.findall(r"pytest (tests/actors/\S+) -k (\w+)", text)[0]
    assert re.search(rf"def test_\w*{part}", (ROOT / file).read_text())


@pytest.mark.parametrize("path", [ROOT / "README.md", *DOCUMENTS], ids=lambda path: path.name)
def test_python_in_documents_compiles(path):
    for code in re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL):
        compile(code, path.name, "exec", flags=0x2000)  # PyCF_ALLOW_TOP_LEVEL_AWAIT


def test_the_board_and_the_alerts_ask_for_metrics_that_there_are():
    known = {
        name
        for row in re.findall(r"^\| (`[^|]*) \|", read("metrics.md"), re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    histograms = {
        f"{name}_{part}" for name in known if name.endswith("_seconds") for part in ("bucket", "count", "sum")
    }
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus-rules.yaml").read_text())
    board = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    alerts = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    panels = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    alerted = set(re.findall(r"dataloader_\w+", " ".join(alerts)))
    assert alerted | set(re.findall(r"dataloader_\w+", " ".join(panels))) <= known | histograms
    in_table = re.findall(r"^\| `(dataloader_\w+)", read("monitoring.md"), re.MULTILINE)
    assert set(in_table) == alerted


def test_every_figure_of_the_performance_summary_is_in_the_results():
    summary = read("performance.md").split("## Summary")[1].split("\n## ")[0]
    results = (ROOT / "benchmarks" / "results.md").read_text()
    rows = [line.strip("|").split("|")[1:] for line in summary.splitlines() if line.startswith("| ")][2:]
    figures = {figure for row in rows for cell in row for figure in re.findall(r"\d[\d,]*\.\d+|\d+,\d{3}|\d{3,}", cell)}
    assert len(figures) > 50
    assert {figure for figure in figures if figure not in results} == set()


def test_the_tests_on_the_page_on_verification_exist():
    named = set(re.findall(r"`(test_\w+)`", read("verified.md")))
    modules = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    assert named <= {name for text in modules for name in re.findall(r"^(?:async )?def (test_\w+)", text, re.MULTILINE)}


def quick_tests_in(module: ast.Module) -> set[str]:
    """Return the names of a module's tests that `./run test` runs: those without the mark `full`."""
    marks = [ast.unparse(node) for node in module.body if isinstance(node, ast.Assign) and "mark" in ast.unparse(node)]
    if "pytest.mark.full" in " ".join(marks):
        return set()
    tests = {test.name: " ".join(map(ast.unparse, test.decorator_list)) for test in functions_of(module)}
    return {name for name, decorators in tests.items() if "pytest.mark.full" not in decorators}


@pytest.mark.slow
def test_each_promise_has_a_test_without_the_mark_full():
    promises = re.findall(r"^(\d+\. .+?) \| (.+) \|$", read("verified.md").replace("\n| ", "\n"), re.MULTILINE)
    declared = re.findall(r"^(\d+\. )\*\*(.+?)\.?\*\*", read("guarantees.md"), re.MULTILINE)
    assert [name for name, _ in promises] == [number + title for number, title in declared]
    named = [set(re.findall(r"`(test_\w+)`", tests)) for _, tests in promises]
    modules = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    modules = [text for text in modules if not set().union(*named).isdisjoint(re.findall(r"def (test_\w+)", text))]
    quick = set().union(*(quick_tests_in(ast.parse(text)) for text in modules))
    assert len(promises) > 10
    assert [name for (name, _), tests in zip(promises, named, strict=True) if quick.isdisjoint(tests)] == []


def test_every_page_has_a_place_in_the_menu_of_the_site():
    named = set()
    for menu in ("index.md", "recipes/index.md"):
        for names in re.findall(r"```{toctree}\n(?::[^\n]*\n)*\n(.*?)```", read(menu), re.DOTALL):
            named |= {Path(menu).parent / f"{name}.md" for name in names.split()}
    assert {path.relative_to(ROOT / "docs") for path in DOCUMENTS} == named | {Path("index.md")}
