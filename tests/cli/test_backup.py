"""`backup` and `restore` of the embedded database: complete or not at all, and nothing is replaced by mistake."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import subprocess
import tempfile
import time
from pathlib import Path
from urllib.parse import unquote

import pytest

from dataloader.cli.entry import FAILED, WRONG_USE
from dataloader.jobs.errors import ConfigError, EmbeddedDatabaseError
from dataloader.jobs.secrets.masking import mask_address
from dataloader.store.embedded.dump import back_up, check_backup, restore
from dataloader.store.embedded.postgres import embedded_postgres

LEASE_S = 5
TASKS = """
import trio
from dataloader.jobs.tasks import Tasks
tasks = Tasks()

@tasks.task("quick")
async def quick(job):
    await trio.sleep(0.01)
    return job.args

@tasks.task("long")
async def long(job):
    await trio.sleep(job.args["s"])
    return {"attempt": job.attempt}
"""
SERVE = ("serve", "--tasks", "my_tasks:tasks", "--port", 0, "--workers", '[{"queue": "q", "concurrency": 8}]')
QUICK = {"DL_DEFAULT_LEASE_TTL_SEC": str(LEASE_S), "DL_HEARTBEAT_SEC": "1", "DL_REAPER_PERIOD_SEC": "1"}


@pytest.fixture
def data_dirs():
    """Return two directories that root's server can reach."""
    with tempfile.TemporaryDirectory(prefix="backup-") as directory:
        yield Path(directory, "first"), Path(directory, "second")


@pytest.fixture
def serving(start, tmp_path):
    """Return a function that starts a service on a data directory, waits until it answers, and returns its address."""
    (tmp_path / "my_tasks.py").write_text(TASKS)

    def serving(data_dir):
        process = start(*SERVE, "--data-dir", data_dir, DL_LOG_FORMAT="json", **QUICK)
        for line in process.stderr:
            told = json.loads(line)
            if told["event"] == "serving":
                return process, told["url"]
        raise AssertionError("it ended before it served")

    return serving


def sql(data_dir, statement, version=18):
    with embedded_postgres(data_dir, version=version) as server:
        command, environment = server.psql("-XqAt", "-v", "ON_ERROR_STOP=1", "-c", statement)
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def wait_until(condition, timeout_s=90):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.mark.full
@pytest.mark.requirement("Q7")
def test_a_backup_under_load_is_consistent_and_its_jobs_run_where_it_is_restored(
    dataloader, serving, data_dirs, tmp_path
):
    first, second = data_dirs
    service, url = serving(first)
    running = json.loads(dataloader("trigger", "q", "long", "--args", '{"s": 4}', "--json", "--url", url).stdout)
    sql(first, "CREATE TABLE pairs (a int PRIMARY KEY, b int)")
    # Each transaction leaves the same number of rows and jobs; a backup of two different moments would lack one of
    # them.
    add = f"""
      DO $$ BEGIN FOR n IN 1..400 LOOP
        INSERT INTO pairs VALUES (n, n);
        INSERT INTO dl_jobs (job_id, queue, task, args, lock_key, lease_ttl_sec)
        VALUES (gen_random_uuid(), 'q', 'quick', json_build_object('n', n), 'k' || n, {LEASE_S});
        COMMIT; PERFORM pg_sleep(0.01);
      END LOOP; END $$"""
    with embedded_postgres(first) as server:
        command, environment = server.psql("-Xqc", add)
        with subprocess.Popen(command, env=environment) as adding:
            wait_until(lambda: int(sql(first, "SELECT count(*) FROM pairs")) > 50)
            file = tmp_path / "one.backup"
            made = dataloader("backup", file, "--data-dir", first, "--json")
            assert made.returncode == 0, made.stderr
            adding.wait(timeout=60)
    told = json.loads(made.stdout)
    assert (told["file"], told["bytes"]) == (str(file), file.stat().st_size)
    assert (told["tables"] > 2, made.stderr) == (True, "")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir() if "backup" in path.name] == ["one.backup"]

    restored = dataloader("restore", file, "--data-dir", second)
    assert restored.returncode == 0, restored.stderr
    assert restored.stdout.startswith(f"{second}: {told['tables']} tables restored in ")
    jobs = "SELECT count(*) FROM dl_jobs WHERE task = 'quick'"
    number = int(sql(second, "SELECT count(*) FROM pairs"))
    assert 50 < number < 400
    assert int(sql(second, jobs)) == number
    status = f"SELECT status FROM dl_jobs WHERE job_id = '{running['job_id']}'"
    assert sql(second, status) == "running"
    another, _ = serving(second)
    wait_until(lambda: sql(second, f"{jobs} AND status = 'succeeded'") == str(number))
    # Jobs that ran at that moment run again when their leases have ended.
    wait_until(lambda: sql(second, status) == "succeeded")
    assert json.loads(sql(second, status.replace("status", "result"))) == {"attempt": 2}
    # The original service has continued meanwhile.
    wait_until(lambda: sql(first, f"{jobs} AND status = 'succeeded'") == "400")
    for process in (service, another):
        process.terminate()
        assert process.wait(timeout=60) == 0


@pytest.mark.full
def test_a_database_with_content_is_replaced_only_on_request(dataloader, data_dirs, tmp_path):
    first, second = data_dirs
    file = tmp_path / "b"
    assert dataloader("migrate", "--data-dir", first).returncode == 0
    assert dataloader("trigger", "q", "t", "--data-dir", first).returncode == 0
    assert dataloader("backup", file, "--data-dir", first).returncode == 0
    # A migrated database without rows counts as empty.
    assert dataloader("migrate", "--data-dir", second).returncode == 0
    assert dataloader("restore", file, "--data-dir", second).returncode == 0
    assert sql(second, "SELECT count(*) FROM dl_jobs") == "1"
    assert dataloader("migrate", "--data-dir", second).stdout == "the schema is up to date\n"
    sql(second, "DELETE FROM dl_jobs; CREATE TABLE mine AS SELECT 1 AS x")
    refused = dataloader("restore", file, "--data-dir", second)
    assert (refused.returncode, refused.stdout) == (WRONG_USE, "")
    assert refused.stderr.startswith(f"--replace: is required, because the database in {second} is not empty")
    assert sql(second, "SELECT count(*) FROM mine") == "1"
    assert dataloader("restore", file, "--replace", "--data-dir", second).returncode == 0
    assert sql(second, "SELECT count(*) FROM dl_jobs") == "1"
    assert sql(second, "SELECT to_regclass('mine') IS NULL") == "t"
    assert sql(second, "SELECT string_agg(datname, ' ' ORDER BY datname) FROM pg_database WHERE NOT datistemplate") == (
        "dataloader postgres"
    )


@pytest.mark.full
def test_a_database_in_use_is_not_replaced(dataloader, serving, data_dirs, tmp_path):
    first, _ = data_dirs
    service, _ = serving(first)
    assert dataloader("backup", tmp_path / "b", "--data-dir", first).returncode == 0
    refused = dataloader("restore", tmp_path / "b", "--replace", "--data-dir", first)
    assert refused.returncode == FAILED
    assert "connections: stop the processes that use it, then restore again" in refused.stderr
    service.terminate()
    assert service.wait(timeout=60) == 0


@pytest.mark.full
def test_restore_works_during_autovacuum_and_from_a_file_named_like_an_option(data_dirs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = Path("-x.dump")
    slow = "autovacuum_vacuum_insert_threshold=0, autovacuum_vacuum_cost_delay=100, autovacuum_vacuum_cost_limit=1"
    busy = "SELECT 1 FROM pg_stat_activity WHERE datname = 'dataloader' AND backend_type = 'autovacuum worker'"
    with embedded_postgres(data_dirs[0], extra_settings={"autovacuum_naptime": "1s", "fsync": "off"}) as server:

        def psql(statement):
            command, environment = server.psql("-XqAtc", statement)
            return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()

        psql(f"CREATE TABLE dl_jobs WITH ({slow}) AS SELECT repeat('x', 1000) FROM generate_series(1, 9999)")
        back_up(server, file, str)
        wait_until(lambda: psql(busy))
        check_backup(file)
        command, environment = server.psql("-Xqc", "SELECT pg_sleep(30)")
        with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL):
            wait_until(lambda: psql("SELECT 1 FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(30)'"))
            with pytest.raises(EmbeddedDatabaseError, match=r"is in use by 1 connection: stop "):
                restore(server, file, str, replace=True)
            psql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(30)'")
        assert psql(busy)
        restore(server, file, str, replace=True)
        assert psql("SELECT count(*) FROM dl_jobs") == "9999"


@pytest.mark.full
def test_a_failed_or_killed_backup_leaves_no_file(start, dataloader, data_dirs, tmp_path):
    first, _ = data_dirs
    sql(first, "CREATE TABLE t AS SELECT 1 AS x")
    with embedded_postgres(first) as server:
        command, environment = server.psql("-Xqc", "BEGIN; LOCK TABLE t; SELECT pg_sleep(30)")
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as holder:
            holds = "SELECT count(*) FROM pg_locks WHERE relation = 't'::regclass"
            end_dump = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'pg_dump'"
            wait_until(lambda: sql(first, holds) == "1")
            killed = start("backup", tmp_path / "b", "--data-dir", first)
            wait_until(lambda: sql(first, holds) == "2")
            killed.kill()
            killed.wait(timeout=60)
            # Its pg_dump is still writing.
            refused = dataloader("backup", tmp_path / "b", "--data-dir", first)
            assert (refused.returncode, refused.stderr) == (
                WRONG_USE,
                f"FILE: another backup to {tmp_path / 'b'} is in progress; wait until it ends\n",
            )
            sql(first, end_dump)
            wait_until(lambda: sql(first, holds) == "1")
            with (tmp_path / ".b.part").open() as part:
                fcntl.flock(part, fcntl.LOCK_EX)

            backup = start("backup", tmp_path / "b", "--data-dir", first)
            wait_until(lambda: sql(first, holds) == "2")
            assert not (tmp_path / "b").exists()
            sql(first, end_dump)
            _, errors = backup.communicate(timeout=60)
            (tmp_path / ".b.part").write_text("what was written before")
            holder.kill()
    assert backup.returncode == FAILED
    assert errors.splitlines()[0] == "pg_dump failed"
    assert "terminating connection" in errors
    assert dataloader("backup", tmp_path / "b", "--data-dir", first).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert (tmp_path / "b").read_bytes().startswith(b"PGDMP")


@pytest.mark.full
def test_a_backup_does_not_wait_for_the_stages_of_loads(dataloader, data_dirs, tmp_path):
    first, second = data_dirs
    assert dataloader("migrate", "--data-dir", first).returncode == 0
    sql(first, "CREATE UNLOGGED TABLE dl_stage_0197_5_0 AS SELECT 1 AS x")
    with embedded_postgres(first) as server:
        command, environment = server.psql("-Xqc", "BEGIN; LOCK TABLE dl_stage_0197_5_0; SELECT pg_sleep(30)")
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as holder:
            wait_until(lambda: sql(first, "SELECT count(*) FROM pg_locks WHERE mode = 'AccessExclusiveLock'") != "0")
            assert dataloader("backup", tmp_path / "b", "--data-dir", first).returncode == 0
            holder.kill()
    assert dataloader("restore", tmp_path / "b", "--data-dir", second).returncode == 0


@pytest.mark.full
def test_a_restore_that_fails_leaves_the_database_as_it_was(dataloader, data_dirs, tmp_path):
    first, second = data_dirs
    for data_dir in data_dirs:
        assert dataloader("migrate", "--data-dir", data_dir).returncode == 0
    sql(first, "CREATE ROLE reader; GRANT SELECT ON dl_jobs TO reader")
    sql(second, "CREATE TABLE mine AS SELECT 1 AS x")
    assert dataloader("backup", tmp_path / "b", "--data-dir", first).returncode == 0
    failed = dataloader("restore", tmp_path / "b", "--replace", "--data-dir", second)
    assert failed.returncode == FAILED
    assert 'role "reader" does not exist' in failed.stderr
    assert sql(second, "SELECT count(*) FROM mine") == "1"
    sql(second, "CREATE ROLE reader")
    assert dataloader("restore", tmp_path / "b", "--replace", "--data-dir", second).returncode == 0


@pytest.mark.full
def test_the_second_of_two_concurrent_restores_is_refused_and_harms_nothing(dataloader, data_dirs, tmp_path):
    first, _ = data_dirs
    sql(first, "CREATE TABLE dl_jobs AS SELECT 1 AS n")
    file = tmp_path / "one.backup"
    assert dataloader("backup", file, "--data-dir", first).returncode == 0
    with (first / "restore.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        sql(first, "CREATE DATABASE dataloader_restored")  # which the other restore fills
        refused = dataloader("restore", file, "--replace", "--data-dir", first)
        assert refused.returncode == 1
        assert refused.stderr == f"Another restore into {first} is in progress; wait until it ends\n"
        assert sql(first, "SELECT count(*) FROM pg_database WHERE datname = 'dataloader_restored'") == "1"
    assert dataloader("restore", file, "--replace", "--data-dir", first).returncode == 0
    assert sql(first, "SELECT n FROM dl_jobs") == "1"


@pytest.mark.full
def test_a_file_that_is_no_complete_backup_is_refused_without_a_new_directory(dataloader, data_dirs, tmp_path):
    first, second = data_dirs
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"must be a regular file, not .*pipe"):
        check_backup(tmp_path / "pipe")
    (tmp_path / "text").write_text("not a backup")
    refused = dataloader("restore", tmp_path / "text", "--data-dir", first)
    assert refused.returncode == WRONG_USE
    assert refused.stderr.startswith(f"FILE: {tmp_path / 'text'} is not a backup that PostgreSQL 18 can read (")
    assert not first.exists()
    sql(first, "CREATE TABLE t AS SELECT 1 AS x")
    assert dataloader("backup", tmp_path / "b", "--data-dir", first).returncode == 0
    refused = dataloader("restore", tmp_path / "b", "--replace", "--data-dir", first)
    assert refused.returncode == WRONG_USE
    assert refused.stderr == f"FILE: {tmp_path / 'b'} is the backup of another database: it has no table dl_jobs\n"
    sql(first, "CREATE TABLE dl_jobs AS SELECT gen_random_uuid() FROM generate_series(1, 9999)")
    assert dataloader("backup", tmp_path / "whole", "--data-dir", first).returncode == 0
    (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:-10_000])
    refused = dataloader("restore", tmp_path / "cut", "--data-dir", second)
    assert (refused.returncode, "is not a backup that PostgreSQL 18 can read (" in refused.stderr) == (WRONG_USE, True)
    assert not second.exists()


@pytest.mark.slow
def test_a_backup_to_an_existing_or_unwritable_file_is_an_error(dataloader, data_dirs, tmp_path):
    first, _ = data_dirs
    assert dataloader("backup", tmp_path / "b", "--data-dir", first).returncode == WRONG_USE
    assert not first.exists()
    sql(first, "SELECT 1")
    (tmp_path / "b").write_text("mine")
    refused = dataloader("backup", tmp_path / "b", "--data-dir", first)
    assert (refused.returncode, refused.stderr) == (
        WRONG_USE,
        f"FILE: {tmp_path / 'b'} already exists; choose another name, or remove it\n",
    )
    refused = dataloader("backup", tmp_path / "no" / "b", "--data-dir", first)
    assert refused.stderr == f"FILE: {tmp_path / 'no' / 'b'} cannot be written: No such file or directory\n"
    assert (tmp_path / "b").read_text() == "mine"


@pytest.mark.full
def test_a_server_of_another_version_moves_by_backup_and_restore(dataloader, data_dirs, tmp_path):
    first, second = data_dirs
    sql(first, "CREATE TABLE mine AS SELECT 16 AS x", version=16)
    refused = dataloader("migrate", "--data-dir", first)
    assert "move the data with `dataloader backup` and `restore`" in refused.stderr
    # The schema as a program with that server would have left it.
    with embedded_postgres(first, version=16) as server:
        command, environment = server.psql("-Xq", "-v", "ON_ERROR_STOP=1")
        script = dataloader("migrate", "--sql").stdout
        subprocess.run(command, env=environment, input=script, text=True, check=True, timeout=60, capture_output=True)
    assert dataloader("backup", tmp_path / "b", "--data-dir", first).returncode == 0
    assert dataloader("restore", tmp_path / "b", "--data-dir", second).returncode == 0
    assert sql(second, "SELECT x FROM mine") == "16"
    assert dataloader("trigger", "q", "t", "--data-dir", second).returncode == 0


def test_another_database_has_its_own_programs(on_database, tmp_path):
    (tmp_path / "b").touch()
    for command in ("backup", "restore"):
        refused = on_database(command, tmp_path / "b")
        assert refused.returncode == WRONG_USE
        assert refused.stderr.startswith(
            "DL_DB_DSN: is set, but this command is only for the embedded database; use pg_dump"
        )


@pytest.mark.slow
def test_config_shows_where_the_embedded_database_answers_while_it_runs(dataloader, data_dirs):
    long = data_dirs[0] / ("with spaces " * 10)

    def shown():
        rows = json.loads(dataloader("config", "--data-dir", long, "--json").stdout)
        return next((row["value"], row["source"]) for row in rows if row["name"] == "DL_DB_DSN")

    assert shown() == ("", "default")
    with embedded_postgres(long) as server:
        assert shown() == (mask_address(server.dsn), "embedded")
        assert os.fspath(server.socket_dir) in unquote(shown()[0])
    assert shown() == ("", "default")
