"""Files that no test can run for real (image, manifest) agree with the program, and the README's lines with the CI."""

import configparser
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml
from packaging.specifiers import SpecifierSet

from dataloader.cli.entry import WRONG_USE
from dataloader.store.embedded.cluster import STOP_TIMEOUT_S
from dataloader.supervisor.settings import Settings
from dataloader.supervisor.settings_layers import load_settings
from dataloader.web.app import ROUTES

ROOT = Path(__file__).parents[2]


@pytest.fixture
def manifest() -> dict[str, Any]:
    documents = yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text())
    return {document["kind"]: document for document in documents}


@pytest.fixture
def container(manifest: dict[str, Any]) -> dict[str, Any]:
    (only,) = manifest["Deployment"]["spec"]["template"]["spec"]["containers"]
    return only


@pytest.mark.requirement("Q15")
def test_the_termination_grace_is_longer_than_the_drain(manifest: dict[str, Any], container: dict[str, Any]) -> None:
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    grace_s = manifest["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > float(variables["DL_DRAIN_TIMEOUT_SEC"]) + 10


@pytest.mark.requirement("Q18")
def test_the_probes_ask_health_and_ready(manifest: dict[str, Any], container: dict[str, Any]) -> None:
    paths = {name: probe["httpGet"]["path"] for name, probe in container.items() if name.endswith("Probe")}
    assert paths == {"livenessProbe": "/health", "readinessProbe": "/ready", "startupProbe": "/health"}
    (port,) = container["ports"]
    assert {probe["httpGet"]["port"] for name, probe in container.items() if name.endswith("Probe")} == {port["name"]}
    assert manifest["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    labels = manifest["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert manifest["Service"]["spec"]["selector"].items() <= labels.items()


@pytest.mark.requirement("Q14")
def test_replicas_are_spread_and_not_all_evicted_together(manifest: dict[str, Any]) -> None:
    pods = manifest["Deployment"]["spec"]["template"]
    labels = pods["metadata"]["labels"]
    spread = pods["spec"]["topologySpreadConstraints"]
    assert {one["topologyKey"] for one in spread} == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
    budget = manifest["PodDisruptionBudget"]["spec"]
    assert budget["maxUnavailable"] < manifest["Deployment"]["spec"]["replicas"]
    for selector in (budget["selector"], *(one["labelSelector"] for one in spread)):
        assert selector["matchLabels"].items() <= labels.items()


@pytest.mark.requirement("Q5")
def test_the_manifest_names_the_metrics_endpoint_for_prometheus(
    manifest: dict[str, Any], container: dict[str, Any]
) -> None:
    told = manifest["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert told["prometheus.io/scrape"] == "true"
    assert told["prometheus.io/port"] == str(container["ports"][0]["containerPort"])
    assert told["prometheus.io/path"] in {route.path for route in ROUTES}


def test_a_job_migrates_as_the_owner_and_the_replicas_do_not(
    manifest: dict[str, Any], container: dict[str, Any], tmp_path: Path
) -> None:
    job = manifest["Job"]
    (migrating,) = job["spec"]["template"]["spec"]["containers"]
    assert migrating["args"] == ["migrate"]
    assert migrating["image"] == container["image"]
    assert job["metadata"]["name"].endswith("-" + container["image"].rpartition(":")[2])
    key_of = {one["env"][0]["valueFrom"]["secretKeyRef"]["key"] for one in (migrating, container)}
    assert key_of == {"owner_dsn", "dsn"}
    migrate = {variable["name"]: variable.get("value") for variable in container["env"]}["DL_MIGRATE"]
    assert load_settings({"DL_MIGRATE": migrate}, directory=tmp_path).migrate is False


@pytest.fixture
def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string((ROOT / "deploy" / "dataloader.service").read_text())
    return parser


@pytest.mark.requirement("Q15")
def test_systemd_gives_a_drain_its_time_and_ends_the_embedded_database_last(unit: configparser.ConfigParser) -> None:
    service = unit["Service"]
    assert float(service["TimeoutStopSec"]) > Settings().drain_timeout_s + 10 + STOP_TIMEOUT_S
    assert (service["KillMode"], service["KillSignal"]) == ("mixed", "SIGTERM")
    assert service["RestartPreventExitStatus"] == str(WRONG_USE)


@pytest.mark.slow
@pytest.mark.requirement("Q18")
def test_systemd_starts_a_command_that_there_is(unit: configparser.ConfigParser, tmp_path: Path) -> None:
    service = unit["Service"]
    program, *arguments = shlex.split(service["ExecStart"])
    assert program.endswith("/bin/dataloader")
    (tmp_path / "my_module.py").write_text("from dataloader import Tasks\ntasks = Tasks()\n")
    done = subprocess.run(
        [sys.executable, "-m", "dataloader", *arguments, "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    variables = dict(pair.split("=", 1) for pair in service["Environment"].split())
    assert variables["DL_DATA_DIR"] == service["WorkingDirectory"] == f"/var/lib/{service['StateDirectory']}"
    assert int(service["StateDirectoryMode"], 8) & 0o077 == 0, (
        "the embedded database refuses what others can write into"
    )


@pytest.mark.requirement("Q18")
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_the_unit(unit: configparser.ConfigParser, tmp_path: Path) -> None:
    program = tmp_path / "dataloader"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    text = (ROOT / "deploy" / "dataloader.service").read_text().replace("/opt/dataloader/bin/dataloader", str(program))
    file = tmp_path / "dataloader.service"
    file.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.requirement("Q18")
def test_the_image_runs_without_root_and_probes_health() -> None:
    *_, final_stage = (ROOT / "Dockerfile").read_text().split("\nFROM ")
    assert re.search(r"^USER (?!0\b|root\b)", final_stage, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK .*\n.*/health\b", final_stage, re.MULTILINE)
    assert '\nENTRYPOINT ["dataloader"]\n' in final_stage, "in exec form, or SIGTERM goes to a shell"


@pytest.mark.requirement("Q18")
@pytest.mark.parametrize("file", ["Dockerfile", "deploy/kubernetes.yaml", "deploy/dataloader.service"])
def test_deployment_files_name_only_settings_that_exist(file: str) -> None:
    named = set(re.findall(r"\b(?:DL_[A-Z_]+|WORKERS_JSON)\b", (ROOT / file).read_text()))
    assert named
    assert named <= {field.metadata["name"] for field in attrs.fields(Settings)}


@pytest.mark.requirement("Q18")
def test_the_manifest_sets_what_the_program_takes(container: dict[str, Any], tmp_path: Path) -> None:
    secrets = {
        "DL_DB_DSN": "postgresql://user@database/jobs",
        "DL_TOKENS": '[{"name": "a", "role": "admin", "token": "0123456789abcdef"}]',
    }
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert {name for name, value in variables.items() if value is None} == set(secrets)
    settings = load_settings(variables | secrets, directory=tmp_path)
    assert settings.port == container["ports"][0]["containerPort"]
    assert len(settings.workers) > 1


@pytest.mark.parametrize("line", ["./run demo", "./run test"])
def test_the_readme_has_one_line_for_the_demo_and_one_for_the_tests(line: str) -> None:
    assert (ROOT / "README.md").read_text().splitlines().count(line) == 1


def test_continuous_integration_runs_the_readme_line() -> None:
    parts = re.findall(r"^part \./run (test.*)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert parts == ["test", "test-rest"]


def test_run_accepts_the_python_versions_that_the_project_declares() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = SpecifierSet(project["requires-python"])
    (condition,) = re.findall(r"not (\(.*) else|not (\(\d.*\))\)'", (ROOT / "run").read_text())
    first, last = ((int(major), int(minor)) for major, minor in re.findall(r"\((\d+), (\d+)\)", "".join(condition)))
    for minor in range(30):
        assert declared.contains(f"3.{minor}") == (first <= (3, minor) <= last)


def test_another_python_is_refused_in_one_line(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1 && exit\nexit 1\n')
    old.chmod(0o755)
    done = subprocess.run(
        [ROOT / "run", "demo"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "VENV": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "3.11, 3.12 or 3.13" in line
    assert "3.9.1" in line
    assert not (tmp_path / "venv").exists()
