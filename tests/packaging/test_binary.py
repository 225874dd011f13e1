"""The standalone binary: its requirements on a machine, its processes, and one line for each failure to start.

It is built once for all of these tests; BINARY=dist/… names an existing one.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from bare_root import in_bare_root, make_bare_root

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "deploy" / "binary" / "build.py"
SOURCES = ("supervisor", "cli", "actors", "web", "flows", "store", "jobs", "src")
WATCHDOG_S = 300
LONG_AGO = time.time() - 31 * 86_400
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"

pytestmark = [
    pytest.mark.full,
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0 and "CI" not in os.environ, reason="only root can make an empty root"),
]

TASKS = """
import multiprocessing, os, subprocess
from concurrent.futures import ProcessPoolExecutor
from dataloader import ProcessJob, Tasks, ThreadJob

tasks = Tasks()

@tasks.task("own", max_attempts=1)
def own(job: ThreadJob) -> dict:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return {"pid": os.getpid(), "environment": dict(os.environ), "worker": pool.submit(os.getpid).result()}

@tasks.task("child", process=True, max_attempts=1)
def child(job: ProcessJob) -> dict:
    said = subprocess.run(["/bin/sh", "-c", "set"], capture_output=True, text=True, check=True).stdout
    return {"pid": os.getpid(), "environment": dict(os.environ), "set": said}
"""


@pytest.fixture(scope="session")
def binary(tmp_path_factory):
    """Return the file, built from the wheel by one of the test run's processes."""
    if given := os.environ.get("BINARY"):
        return Path(given).resolve()
    shared = tmp_path_factory.getbasetemp()
    shared = (shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared) / "binary"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made := [*shared.glob("dataloader-*")]):
            made = [build(shared)]
    return made[0]


def build(folder: Path) -> Path:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COVERAGE"))}
    source = folder / "source"  # setuptools writes next to its sources
    for name in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for command in (
        [sys.executable, "-m", "build", "--wheel", "--outdir", folder / "wheel", source],
        [sys.executable, BUILD, folder / "wheel" / "*.whl", folder, folder / "work", "--any-python"],
    ):
        arguments = [next(part.parent.glob(part.name)) if "*" in str(part) else part for part in command]
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    for name in ("source", "wheel", "work"):
        shutil.rmtree(folder / name)
    (made,) = folder.glob("dataloader-*")
    return made


@pytest.fixture(scope="module")
def cache(binary, tmp_path_factory):
    """Return a cache into which the file has been unpacked."""
    cache = tmp_path_factory.mktemp("cache")
    subprocess.run([binary, "--version"], env={"DATALOADER_CACHE": str(cache)}, check=True, timeout=WATCHDOG_S)
    yield cache
    shutil.rmtree(cache)


def start(command, **options):
    """Start a process that a watchdog ends."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(list(map(str, command)), **pipes | options)
    watchdog = threading.Timer(WATCHDOG_S, process.kill)
    watchdog.daemon = True
    watchdog.start()
    return process


def run(*command, **options):
    process = start(command, **options)
    out, err = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@contextmanager
def served(command, **options):
    """Run a service; yield it with its address."""
    process = start(command, **options)
    lines = []
    reader = threading.Thread(target=process.stderr.read, daemon=True)
    try:
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r'"url": ?"([^"]+)"|url=(\S+)', line):
                reader.start()
                yield process, found[1] or found[2]
                break
        else:
            raise AssertionError("".join(lines))
    finally:
        process.kill()
        process.wait()
        if reader.ident is not None:
            reader.join(WATCHDOG_S)
        process.stdout.close()
        process.stderr.close()


def trigger(command, task, url):
    done = run(*command, "trigger", "default", task, "--args", "{}", "--url", url, "--wait", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)["result"]


@pytest.fixture(scope="module")
def bare(binary, tmp_path_factory):
    """Return an empty root with the file, as `/bin/dataloader`, and tasks in the user's home."""
    root = make_bare_root(tmp_path_factory.mktemp("bare"))
    shutil.copy(binary, root / "bin" / "dataloader")
    (root / "home" / "bare" / "my_tasks.py").write_text(TASKS)
    yield root
    shutil.rmtree(root)


def test_the_demo_runs_in_an_empty_root_without_python_and_network(bare):
    done = run(*in_bare_root(bare, "/bin/dataloader", "demo", "--json", offline=True))
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["ok"]
    assert shown["table"] == shown["file"]
    assert shown["file"]["rates"] > 200_000


def test_a_service_in_an_empty_root_drains_and_starts_again_after_a_kill(bare):
    """Each process gets the signal itself: the started one is the service, and its children are only PostgreSQL's."""
    command = in_bare_root(bare, "/bin/dataloader")
    serve = [*command, "serve", "--tasks", "my_tasks:tasks", "--port", "0", "--log-format", "json"]
    with served(serve) as (process, url):
        own, child = (trigger(command, task, url) for task in ("own", "child"))
        assert own["pid"] == process.pid
        assert len({own["pid"], own["worker"], child["pid"]}) == 3
        for environment in (own["environment"], child["environment"]):
            assert not [name for name in environment if name.startswith(("LD_", "_PYI", "PYTHON", "_dl"))]
        assert "_internal" not in child["set"]
        process.kill()
        assert process.wait() == -signal.SIGKILL
    with served(serve) as (process, url):
        assert trigger(command, "own", url)["pid"] == process.pid
        process.terminate()
        assert process.wait() == 0


def test_variables_set_by_the_user_stay_set(binary, cache, tmp_path):
    (tmp_path / "shown.py").write_text(
        "import os, sys\nfrom dataloader import Tasks\ntasks = Tasks()\n"
        "print(os.environ['LD_LIBRARY_PATH'], os.environ.get('LC_ALL'), sys.argv[1], oct(os.umask(0)), os.getcwd())\n"
    )
    folder = tmp_path / "with a space"
    folder.mkdir()
    link = folder / "link"
    link.symlink_to(binary)
    environment = {"DATALOADER_CACHE": str(cache), "LD_LIBRARY_PATH": "/own", "PYTHONHOME": "/no", "PYTHONPATH": "/no"}
    done = run(link, "tasks", "--tasks", "shown:tasks", cwd=tmp_path, env=environment, umask=0o027)
    assert (done.returncode, done.stderr) == (0, "no tasks\n")
    assert done.stdout.split("\n")[0] == f"/own None tasks 0o27 {tmp_path}"


def test_the_whole_standard_library_is_in(binary, cache, tmp_path):
    """Every module that the Python of its build can import can be imported in it."""
    (tmp_path / "library.py").write_text(
        "import importlib, os, sys, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "from pathlib import Path\n"
        "from dataloader import Tasks\n"
        "def missing(names):\n"
        "    for name in names:\n"
        "        try: importlib.import_module(name)\n"
        "        except BaseException as error: yield name\n"
        "names = Path('names').read_text().split()\n"
        "Path(sys.executable.replace('/', '_')).write_text('\\n'.join(missing(names)))\n"
        "tasks = Tasks()\n"
    )
    library = Path(os.__file__).parent
    files = (file.relative_to(library) for file in library.rglob("*.py"))
    no = {"site-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "__main__", "__phello__", "turtle"}
    parts = [[*file.with_suffix("").parts] for file in files]
    names = {".".join(part[:-1] if part[-1] == "__init__" else part) for part in parts if not no & {*part}}
    names |= sys.stdlib_module_names - no - {"_tkinter", "antigravity", "this"}
    names -= {"antigravity", "this", "", *(name for name in names if "-" in name)}
    (tmp_path / "names").write_text("\n".join(sorted(names)))
    own = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    own |= {"SETUPTOOLS_USE_DISTUTILS": "stdlib", "PYTHONDONTWRITEBYTECODE": "1"}
    found = []
    for command in ([binary], [sys.executable, "-m", "dataloader"]):
        before = {*tmp_path.iterdir()}
        done = run(
            *command,
            *("tasks", "--tasks", "library:tasks"),
            cwd=tmp_path,
            env=own | {"DATALOADER_CACHE": str(cache)},
        )
        assert done.returncode == 0, done.stderr
        (written,) = {*tmp_path.iterdir()} - before
        found.append({*written.read_text().split()})
    assert len(names) > 500
    assert found[0] - found[1] == set()


def test_packages_of_the_same_python_are_found_by_path(binary, cache, tmp_path):
    """With libraries in C, and with packages of which the program contains a part; others are refused in one line."""
    site = next(Path(folder) for folder in sys.path if folder.endswith("site-packages"))
    (tmp_path / "mine.py").write_text(
        "import sqlalchemy, aiohttp, yarl._quoting_c, pydantic, dateutil.rrule\n"
        "from dataloader import Tasks\ntasks = Tasks()\n"
    )
    tasks = [binary, "tasks", "--tasks", "mine:tasks"]
    options = {"cwd": tmp_path, "env": {"DATALOADER_CACHE": str(cache)}}
    assert run(*tasks, "--path", site, **options).stderr == "no tasks\n"
    done = run(*tasks, **options)
    assert done.returncode == 2
    assert "No module named 'sqlalchemy'" in done.stderr
    assert done.stderr.endswith(f"pass a site-packages folder of Python {PYTHON} as --path\n")
    other = tmp_path / "lib" / "python3.7" / "site-packages"
    other.mkdir(parents=True)
    assert run(*tasks, "--path", other, **options).stderr == (
        f"--path: {other} is for Python 3.7; this program uses Python {PYTHON}\n"
    )


def test_a_folder_with_files_named_as_modules_of_the_program_does_no_harm(binary, cache, tmp_path):
    for name in ("encodings", "dataloader", "site", "json", "trio"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not this one')")
    done = run(binary, "--version", cwd=tmp_path, env={"DATALOADER_CACHE": str(cache), "PYTHONPATH": "."})
    assert (done.returncode, done.stderr) == (0, "")


def test_twenty_concurrent_starts_unpack_one_folder(binary, tmp_path):
    environment = {"HOME": str(tmp_path)}
    first = [start([binary, "--version"], env=environment) for _ in range(20)]
    for process in first:
        out, err = process.communicate()
        assert (process.returncode, err) == (0, "")
        assert out.startswith("dataloader ")
    names = sorted(path.name for path in (tmp_path / ".cache" / "dataloader").iterdir())
    assert names[0] == ".lock"
    assert [bool(re.fullmatch("[0-9a-f]{16}", name)) for name in names[1:]] == [True]


def test_what_a_kill_leaves_half_unpacked_is_not_used_and_is_removed(binary, tmp_path):
    environment = {"DATALOADER_CACHE": str(tmp_path)}
    process = start([binary, "--version"], env=environment, start_new_session=True)
    while not (left := [*tmp_path.glob(".*.*/_internal")]):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert run(binary, "--version", env=environment).returncode == 0
    assert left[0].exists(), "it may be somebody's who is at it"


def unpacked(cache):
    (program,) = cache.glob("*/dataloader")
    return program.parent


def versions(cache):
    return sorted(path for path in cache.iterdir() if not path.name.startswith("."))


def test_a_version_unused_for_thirty_days_is_removed(binary, cache, tmp_path):
    own = unpacked(cache)
    (tmp_path / "waits.py").write_text("import time\nprint('waits', flush=True)\ntime.sleep(600)\n")
    old, recent, locked, run_from = (cache / (digit * 16) for digit in "abcd")
    others = cache / "another"
    for folder in (old, recent, locked, run_from, others):
        folder.mkdir()
        (folder / "used").touch()
        if folder is not recent:
            os.utime(folder / "used", (LONG_AGO, LONG_AGO))
    shutil.copy("/bin/sleep", run_from / "postgres")
    postgres = start([run_from / "postgres", "600"])
    with (locked / "used").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert run(binary, "--version", env={"DATALOADER_CACHE": str(cache)}).returncode == 0
        assert versions(cache) == sorted([own, recent, locked, run_from, others])
    postgres.kill()
    postgres.communicate()
    # A process of a version keeps it, however long ago it began.
    options = {"cwd": tmp_path, "env": {"DATALOADER_CACHE": str(cache)}}
    waits = start([binary, "tasks", "--tasks", "waits:tasks"], **options)
    assert waits.stdout.readline() == "waits\n"
    with (own / "used").open("r+") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    waits.kill()
    waits.communicate()
    assert waits.returncode == -signal.SIGKILL
    assert run(binary, "--version", **options).returncode == 0
    assert versions(cache) == sorted([own, recent, others])


def mounted(options, tmp_path):
    """Return the beginning of a command that runs with a separate file system at `tmp_path`/home."""
    (tmp_path / "home").mkdir(exist_ok=True)
    mount = f"mount -t tmpfs -o {options} tmpfs '{tmp_path}/home'"
    return ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "ro",
            "cannot unpack itself into {home}/.cache/dataloader: Read-only file system; set DATALOADER_CACHE",
        ),
        ("size=20m", "cannot unpack its \\d+ MB into {home}/.cache/dataloader: no space left; set DATALOADER_CACHE"),
        (
            "noexec",
            r"cannot run in {home}/.cache/dataloader, which does not allow programs \(noexec\); set DATALOADER_CACHE",
        ),
    ],
)
def test_a_home_that_can_not_hold_it_is_one_line(binary, tmp_path, options, said):
    home = tmp_path / "home"
    seen = ["sh", "-c", '"$@"; code=$?; ls -A "$HOME/.cache/dataloader" 2>/dev/null; exit $code', "sh"]
    done = run(*mounted(options, tmp_path), *seen, binary, "--version", env={"HOME": str(home), "PATH": os.defpath})
    assert done.returncode == 1
    assert re.fullmatch(f"dataloader: {said.format(home=home)} to another folder\n", done.stderr)
    assert done.stdout in {"", ".lock\n"}, "nothing is left"


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "cannot unpack itself: HOME is not set; set DATALOADER_CACHE to a folder"),
        (
            {"DATALOADER_CACHE": "here"},
            "cannot unpack itself into here, which is not an absolute path; set DATALOADER_CACHE",
        ),
        (
            {"HOME": "/dev/null"},
            "cannot unpack itself into /dev/null/.cache/dataloader: Not a directory; set DATALOADER_CACHE",
        ),
        ({"XDG_CACHE_HOME": "/proc"}, "cannot unpack itself into /proc/dataloader: No such file or directory; set"),
        ({"HOME": "/", "PATH": "/nowhere"}, "needs chmod on the path to unpack itself"),
    ],
)
def test_an_environment_that_names_no_place_is_one_line(binary, environment, said):
    done = run(binary, "--version", env=environment)
    assert done.returncode == 1
    assert done.stderr.startswith(f"dataloader: {said}")
    assert len(done.stderr.splitlines()) == 1


def test_a_broken_file_is_one_line(binary, tmp_path):
    whole = binary.read_bytes()
    changed = bytearray(whole)
    changed[-1000] ^= 1
    for name, content in (
        ("cut off", whole[: len(whole) // 2]),
        ("cut in its head", whole[:2000]),
        ("changed", changed),
    ):
        broken = tmp_path / name
        broken.write_bytes(content)
        broken.chmod(0o755)
        done = run(broken, "--version", env={"HOME": str(tmp_path)})
        assert done.returncode == 1
        assert done.stderr == (
            f"dataloader: {broken} is damaged: its archive is not complete or was changed; copy it again\n"
        )


def test_tasks_on_a_dask_cluster_are_refused_in_one_line(binary, cache, tmp_path):
    (tmp_path / "far.py").write_text(
        "from dataloader import ProcessJob, Tasks\ntasks = Tasks()\n"
        "@tasks.task('far', dask='tcp://127.0.0.1:1')\ndef far(job: ProcessJob) -> None: ...\n"
    )
    serve = ["serve", "--tasks", "far:tasks", "--port", "0"]
    done = run(binary, *serve, cwd=tmp_path, env={"DATALOADER_CACHE": str(cache), "HOME": str(tmp_path)})
    assert done.returncode == 2
    assert done.stderr.endswith("task 'far': dask: the standalone binary has no Dask; use an installed dataloader\n")


def test_files_unpacked_by_another_user_are_not_run(binary, cache, tmp_path):
    own = unpacked(cache)
    folder = tmp_path / own.name
    folder.mkdir()
    shutil.copy("/bin/true", folder / "dataloader")
    os.chown(folder, 10_001, 10_001)
    done = run(binary, "--version", env={"DATALOADER_CACHE": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"dataloader: does not run the contents of {folder}, which belongs to another user; set"
    )


def test_a_cache_that_is_another_users_is_not_used(binary, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    os.chown(cache, 10_001, 10_001)
    done = run(binary, "--version", env={"DATALOADER_CACHE": str(cache)})
    assert done.returncode == 1
    assert done.stderr.startswith(f"dataloader: does not use {cache}, which belongs to another user; set")
    assert not list(cache.iterdir())


def test_a_new_cache_is_not_writable_by_others_under_any_umask(binary, tmp_path):
    done = run(
        "/bin/sh", "-c", f"umask 000; exec '{binary}' --version", env={"DATALOADER_CACHE": str(tmp_path / "cache")}
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "cache").stat().st_mode & 0o022
