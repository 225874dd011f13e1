"""Common behavior of all commands: help, exit codes, one line for an error, a quick start."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from dataloader.cli.entry import cli, report
from dataloader.jobs.errors import StoreError


@pytest.mark.slow
def test_the_version_needs_neither_a_web_framework_nor_a_database_driver(tmp_path):
    code = (
        "import sys; from dataloader.cli.entry import run_command_line; code = run_command_line(['--version']);"
        "print(code, {'asyncpg', 'quart', 'hypercorn', 'rich'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    version, rest = result.stdout.splitlines()
    assert version.startswith("dataloader ")
    assert rest == "0 set()"


@pytest.mark.parametrize("name", cli.list_commands(None))
def test_each_command_has_help_that_begins_with_a_sentence(name, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([name, "--help"], prog_name="dataloader")
    assert end.value.code == 0
    usage, _, sentence = capsys.readouterr().out.splitlines()[:3]
    assert usage.startswith(f"Usage: dataloader {name}")
    assert sentence.strip()


def test_the_list_of_commands_has_a_whole_sentence_for_each_at_80_columns(dataloader, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    listed = dataloader("--help").stdout.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == cli.list_commands(None)
    assert [line for line in listed if not line.endswith(".") or line.endswith("...")] == []


def test_a_mistyped_command_gets_a_suggestion(dataloader):
    for words, meant in (
        (("stauts",), "stats or status"),
        (("trigegr",), "trigger"),
        (("etl", "rnu"), "run"),
        (("job",), "jobs, or status for a single job"),
    ):
        result = dataloader(*words)
        assert (result.returncode, f"did you mean {meant}?" in result.stderr) == (2, True)
    assert "No such command 'xyzzy'" in dataloader("xyzzy").stderr


@pytest.mark.requirement("Q16")
def test_control_characters_in_an_error_are_escaped_on_the_terminal(capsys):
    assert report(StoreError("of a server:\x1b[2J\u202e\nand more")) == 1
    assert capsys.readouterr().err == "of a server:\\x1b[2J\\u202e\nand more\n"


def test_a_wrong_argument_ends_with_2(dataloader):
    result = dataloader("jobs", "--no-such-option")
    assert result.returncode == 2
    assert "--no-such-option" in result.stderr


@pytest.mark.requirement("Q13")
def test_a_mistyped_variable_is_pointed_out_where_a_setting_is_wrong_or_missing(dataloader):
    for settings, first in (
        ({"DL_PORT": "x"}, "DL_PORT: must be an integer from 0 to 65535, not 'x'"),
        ({}, "DL_DB_DSN: is not set"),
    ):
        result = dataloader("jobs", DL_DB_DNS="postgresql://u:sesame@h/d", DL_TOKEN="x", **settings)
        wrong, mistyped = result.stderr.splitlines()
        assert (result.returncode, wrong.startswith(first)) == (2, True)
        assert mistyped == "DL_DB_DNS (environment) is not a setting and has no effect; did you mean DL_DB_DSN?"


@pytest.mark.requirement("Q13")
def test_each_bad_setting_is_one_line_and_ends_with_2(dataloader):
    result = dataloader("jobs", DL_PORT="many", DL_POOL_SIZE="0")
    assert result.returncode == 2
    assert [line.split(":")[0] for line in result.stderr.splitlines()] == ["DL_PORT", "DL_POOL_SIZE"]
    assert not result.stdout


def test_a_question_without_a_database_says_so_and_makes_none(dataloader, tmp_path):
    result = dataloader("jobs")
    assert result.returncode == 2
    assert result.stderr.startswith("DL_DB_DSN: is not set")
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_data_directory_that_can_not_be_one_is_one_line(dataloader, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for name, reason in (
        ("file", "it is a file"),
        ("file/below", "Not a directory"),
        ("loop", "Symlink loop" if sys.version_info < (3, 13) else "Too many"),
    ):
        path = tmp_path / name
        result = dataloader("migrate", DL_DATA_DIR=str(path))
        assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
        assert result.stderr.startswith(
            f"DL_DATA_DIR: must be a directory that this user can write to, not '{path}' ({reason}"
        )
    assert dataloader("config", DL_DATA_DIR=str(tmp_path / "file")).returncode == 0


@pytest.mark.requirement("Q16")
@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("me:sesame@127.0.0.1:1/none", "127.0.0.1:1"),
        ("me:sesame@no-such-host.invalid/none", "no-such-host.invalid"),
        ("/none?user=me&password=sesame&host=/no/socket", "/no/socket"),
    ],
)
def test_an_unreachable_database_is_one_line_with_host_and_setting_and_no_password(dataloader, address, host):
    result = dataloader("queues", DL_DB_DSN=f"postgresql://{address}")
    assert result.returncode == 1
    assert result.stderr.startswith(f"DL_DB_DSN: the database at {host} cannot be reached (")
    assert len(result.stderr.splitlines()) == 1
    assert "sesame" not in result.stderr


def test_a_service_that_does_not_answer_is_one_line(dataloader):
    result = dataloader("queues", "--url", "http://127.0.0.1:1")
    assert result.returncode == 1
    assert result.stderr.startswith("no answer from http://127.0.0.1:1")
    assert len(result.stderr.splitlines()) == 1


def test_an_address_that_is_none_is_one_line(dataloader):
    result = dataloader("queues", "--url", "localhost:8080")
    assert result.returncode == 2
    assert result.stderr.startswith("--url: must be an address such as http://127.0.0.1:8080, not 'localhost:8080'")


def test_a_database_without_our_tables_is_one_line_with_the_command_to_run(dataloader, empty_database):
    result = dataloader("queues", DL_DB_DSN=empty_database.dsn)
    assert result.returncode == 1
    assert "; run `dataloader migrate`" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.slow
def test_an_interrupted_command_ends_with_130_and_says_nothing(start, add, database):
    job_id = add("q", "t")
    database.psql(f"UPDATE dl_jobs SET status = 'running' WHERE job_id = '{job_id}'")  # a queued one has a reason
    waiting = start("status", job_id, "--wait", DL_DB_DSN=database.dsn)
    deadline = time.monotonic() + 20
    asked = "select count(*) from pg_stat_activity where application_name like 'dataloader command%' and query <> ''"
    while database.psql(asked) == "0":
        assert time.monotonic() < deadline
        assert waiting.poll() is None
    waiting.send_signal(signal.SIGINT)
    stdout, stderr = waiting.communicate(timeout=60)
    assert (waiting.returncode, stdout, stderr) == (130, "", "")


@pytest.mark.slow
def test_a_closed_pipe_prints_no_error(start):
    listing = start("config")
    listing.stdout.close()
    assert listing.stderr.read() == ""
    listing.wait(timeout=60)
