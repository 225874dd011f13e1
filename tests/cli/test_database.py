"""`migrate` and `psql`, on an empty database and on an embedded one."""

from __future__ import annotations

import json
import re

import pytest

from dataloader.cli.database import without_password
from dataloader.store.embedded.postgres import running_server


@pytest.mark.slow
@pytest.mark.requirement("Q1")
def test_migrate_brings_an_empty_database_up_to_date_and_says_so_the_next_time(dataloader, empty_database):
    first = json.loads(dataloader("migrate", "--json", DL_DB_DSN=empty_database.dsn).stdout)["applied"]
    assert first[0] == "0001 document"
    empty_database.psql("DELETE FROM dl_migrations WHERE number = 10")
    again = dataloader("migrate", DL_DB_DSN=empty_database.dsn).stdout
    assert re.fullmatch(r"0010 .+\nthe schema is at 0010 with functions \d+\n", again)
    assert dataloader("migrate", DL_DB_DSN=empty_database.dsn).stdout == "the schema is up to date\n"
    assert dataloader("jobs", DL_DB_DSN=empty_database.dsn).stderr == "no jobs\n"


@pytest.mark.slow
def test_migrate_warns_on_stderr_of_a_schema_that_is_open_to_all(dataloader, empty_database):
    empty_database.psql("GRANT CREATE ON SCHEMA public TO PUBLIC")
    result = dataloader("migrate", "--json", DL_DB_DSN=empty_database.dsn)
    assert json.loads(result.stdout)["applied"]
    assert "REVOKE CREATE ON SCHEMA public FROM PUBLIC" in result.stderr


@pytest.mark.slow
def test_the_printed_sql_makes_the_same_schema_and_needs_no_database(dataloader, empty_database):
    empty_database.psql(dataloader("migrate", "--sql").stdout)
    assert dataloader("migrate", DL_DB_DSN=empty_database.dsn).stdout == "the schema is up to date\n"


@pytest.mark.parametrize(
    ("dsn", "address", "password"),
    [
        ("postgresql://u:p%40ss@h:1/d?sslmode=require", "postgresql://u@h:1/d?sslmode=require", "p@ss"),
        ("postgresql://u@h/d", "postgresql://u@h/d", None),
        ("postgresql://h/d", "postgresql://h/d", None),
        ("postgresql:///d?host=/run/pg&user=u&password=s%26s", "postgresql:///d?host=%2Frun%2Fpg&user=u", "s&s"),
        ("postgresql://u:p@h1:1,h2:2/d", "postgresql://u@h1:1,h2:2/d", "p"),
        ("postgresql://u:a:b@[::1]:1/d", "postgresql://u@[::1]:1/d", "a:b"),
    ],
)
@pytest.mark.requirement("Q16")
def test_the_password_is_taken_out_of_an_address(dsn, address, password):
    assert without_password(dsn) == (address, password)


def test_psql_asks_the_database_of_the_settings_and_gives_its_exit_code(on_database, database):
    result = on_database("psql", "-XAtc", "select current_database()")
    assert (result.returncode, result.stdout) == (0, f"{database.name}\n")
    assert on_database("psql", "-Xc", "select nothing").returncode == 1


@pytest.mark.requirement("Q16")
def test_no_list_of_processes_shows_the_password(on_database, database):
    # The shell's parent is psql.
    result = on_database("psql", "-XAt", "-c", r"\! tr '\0' ' ' < /proc/$PPID/cmdline")
    assert result.returncode == 0
    assert database.name in result.stdout
    assert database.server.password not in result.stdout


@pytest.mark.slow
def test_commands_bring_up_the_embedded_database_and_leave_it_stopped(dataloader, tmp_path):
    assert dataloader("psql", "-c", "select 1").returncode == 2
    assert dataloader("migrate").returncode == 0
    made = dataloader("trigger", "q", "t")
    assert made.returncode == 0
    count = dataloader("psql", "-XAtc", "select job_id from dl_jobs")
    assert (count.returncode, count.stdout) == (0, made.stdout.split()[0] + "\n")
    moved = tmp_path.with_name(f"{tmp_path.name}-moved")
    (tmp_path / ".dataloader").rename(moved)
    listed = dataloader("jobs", "--data-dir", moved)
    assert listed.stdout.splitlines()[1].split()[0] == made.stdout.split()[0]
    assert running_server(moved) is None
    assert not (tmp_path / ".dataloader").exists()
