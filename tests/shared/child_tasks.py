"""Tasks whose functions run in child processes, which import them from here."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import UUID

import attrs

from dataloader import (
    AioProcessJob,
    BadRequest,
    GiveUp,
    JobStopped,
    ProcessJob,
    RateLimit,
    Retry,
    RetryPolicy,
    Snooze,
    Supplier,
    Tasks,
    ThreadJob,
)
from dataloader.actors.children import wire

if "WITHOUT_GUARD" in os.environ:  # handlers import this module too, and should import only what they need
    import broken

    broken.take_out_what_is_named()

tasks = Tasks()


@attrs.frozen
class Sizes:
    """Typed args."""

    width: int
    height: int = 2


class NoSuchDayError(Exception):
    """Error that is not worth another run."""


if os.environ.get("CHILD_TASKS") == "broken" and "DATALOADER_CHILD" in os.environ:
    raise RuntimeError("no licence; password=hunter2-hunter2")


@tasks.task("noop", process=True)
def noop(job: ProcessJob) -> None:
    """Do nothing."""


@tasks.task("who", process=True, max_jobs=3)
def who(job: ProcessJob) -> int:
    return os.getpid()


@tasks.task("all", process=True, args=Sizes, retry=RetryPolicy(final=(NoSuchDayError,)))
def does_all(job: ProcessJob[Sizes]) -> dict[str, object]:
    job.progress({"n": 1})
    job.log.info("hello", of=job.task)
    job.keep("kept")
    print("printed")  # noqa: T201
    print("to stderr", file=sys.stderr, end="")  # noqa: T201
    if job.args.height == 13:
        raise NoSuchDayError("the 13th")
    return {"area": job.args.width * job.args.height, "attempt": job.attempt, "left": job.deadline - time.monotonic()}


@tasks.task("raises", process=True)
def raises(job: ProcessJob) -> object:  # noqa: C901
    match job.args["how"]:
        case "error":
            raise ValueError("no such day")
        case "exit":
            sys.exit(3)
        case "_exit":
            os._exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "deaf":
            os.closerange(3, 200)
            time.sleep(3_600)
        case "garbage":
            for fd in range(3, 200):
                with contextlib.suppress(OSError):
                    os.write(fd, b"{}\n")
            time.sleep(3_600)
        case "retry":
            return Retry(5, "later")
        case "snooze":
            return Snooze(7)
        case "give up":
            return GiveUp("never")
        case "object":
            return {"it": object()}
    return None


def unrun(job: ProcessJob) -> object:
    async def coroutine() -> None: ...

    def generator() -> Iterator[int]:
        yield 1

    async def async_generator() -> AsyncIterator[int]:
        yield 1

    made = {"a coroutine": coroutine, "a generator": generator, "an async generator": async_generator}
    return made[job.args["kind"]]()


@tasks.task("grows", process=True, memory_mb=128)
def grows(job: ProcessJob) -> int:
    return len(bytearray(job.args["mb"] * 2**20))


@tasks.task("prints", process=True)
def prints(job: ProcessJob) -> None:
    for number in range(job.args["lines"]):
        print(number, "x" * 80)  # noqa: T201


@tasks.task("enqueues", process=True)
def enqueues(job: ProcessJob) -> list[str]:
    try:
        job.enqueue("noop", priority=-1)
    except BadRequest as error:
        said = str(error)
    added = job.enqueue("noop", {"n": 1}, queue="other", after=[UUID(int=0)] if job.args.get("after") else None)
    return [said, str(added.job_id), added.status]


@tasks.task("aio", process=True, asyncio=True)
async def aio(job: AioProcessJob) -> list[int]:
    await job.progress({"n": 1})
    await job.checkpoint()
    if job.args.get("enqueue"):
        await job.enqueue("noop", queue="other")
    if job.args.get("s"):
        try:
            await asyncio.sleep(job.args["s"])
        finally:
            job.progress_nowait({"cleaned": job.stopped_by})
    return await asyncio.gather(*(asyncio.sleep(0.001, n) for n in range(job.args["to"])))


@tasks.task("naps", process=True)
def naps(job: ProcessJob) -> int:
    time.sleep(job.args["s"])
    return os.getpid()


@tasks.task("aio naps", process=True, asyncio=True)
async def aio_naps(job: AioProcessJob) -> int:
    await asyncio.sleep(job.args["s"])
    return os.getpid()


@tasks.task("adds many", process=True, asyncio=True, timeout_s=600)
async def adds_many(job: AioProcessJob) -> None:
    """Add more jobs concurrently than are added at a time, when a file exists."""
    await job.progress({"waits": True})
    while not Path(job.args["go"]).exists():  # noqa: ASYNC110, ASYNC240 - another process cannot signal it otherwise
        await asyncio.sleep(0.01)
    await asyncio.gather(*(job.enqueue("noop", queue="other") for _ in range(200)))


@tasks.task("leaves", process=True)
def leaves(job: ProcessJob) -> int:
    """Start a daemon that tries to outlive the job: a separate session, SIGTERM ignored."""
    return start_daemon()


def start_daemon(*held: int) -> int:
    """Start a daemon that keeps these file descriptors, and return its process ID."""
    code = "import os, signal, time\nos.setsid()\nsignal.signal(15, signal.SIG_IGN)\nprint(os.getpid(), flush=True)\n"
    code += "os.close(1)\nwhile True: time.sleep(3600)"
    started = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-S', '-c', {code!r}], pass_fds={held})"
    command = [sys.executable, "-S", "-c", started]
    return int(subprocess.run(command, stdout=subprocess.PIPE, check=True, pass_fds=held).stdout)


@tasks.task("ignores", process=True, timeout_s=3_600)
def ignores(job: ProcessJob) -> None:
    """Compute forever and ignore signals; start a daemon and report it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    job.progress({"pid": os.getpid(), "daemon": start_daemon()})
    while True:
        pass


@tasks.task("ignores for five seconds", process=True, timeout_s=5)
def ignores_for_five_seconds(job: ProcessJob) -> None:
    """Compute forever, with a timeout."""
    ignores.handler(job)


@tasks.task("holds", process=True, timeout_s=4, max_attempts=3, retry=RetryPolicy(base_s=0.1))
def holds(job: ProcessJob) -> None:
    """Hold the lock of its key while it or its daemon lives; report if another process holds it."""
    folder = Path(os.environ["CHAOS"])
    with (folder / str(job.lock_key)).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with (folder / "overlaps").open("a") as overlaps:
                overlaps.write(f"{job.lock_key} {job.job_id} attempt {job.attempt}\n")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        start_daemon(file.fileno())
        ends_at = time.monotonic() + job.args["s"]
        while time.monotonic() < ends_at:
            pass


@tasks.task("cleans", process=True)
def cleans(job: ProcessJob) -> None:
    job.progress({"pid": os.getpid()})
    try:
        while True:
            time.sleep(0.01)
    except JobStopped:
        job.log.info("cleaned", why=job.stopped_by)
        raise


@tasks.task("deafens", process=True)
def deafens(job: ProcessJob) -> None:
    """Break the reader of the service's answers."""

    def read(_line: bytes) -> None:
        raise RecursionError

    wire.read_from_service = read  # type: ignore[assignment]
    job.take("slow")


@tasks.task("orphans", timeout_s=60)
def orphans(job: ThreadJob) -> None:
    """Leave a process behind, which ends soon."""
    started = "import subprocess; subprocess.Popen(['sleep', '0.2'], start_new_session=True)"
    subprocess.run([sys.executable, "-S", "-c", started], check=True)


@tasks.task("becomes", process=True)
def becomes(job: ProcessJob) -> None:
    """Become another program, which reports a stop request."""
    os.execvp("sh", ["sh", "-c", "trap 'echo told; exit' TERM; echo ready; while :; do sleep 0.05; done"])


@tasks.task("leaves a thread", process=True)
def leaves_a_thread(job: ProcessJob) -> int:
    """Leave a thread that prints forever."""

    def speak() -> None:
        while True:
            print("of job", job.job_id)  # noqa: T201
            time.sleep(0.01)

    if job.args["leave"]:
        threading.Thread(target=speak, daemon=True).start()
    else:
        time.sleep(0.3)
    return os.getpid()


_former: list[ProcessJob] = []


@tasks.task("haunts", process=True)
def haunts(job: ProcessJob) -> str:
    """Use the handle of the previous run, as a thread that was left behind would."""
    _former.append(job)
    try:
        _former[0].keep("of another job")
    except RuntimeError as error:
        return str(error)
    return "heard"


@tasks.task("wakes", process=True)
def wakes(job: ProcessJob) -> str:
    """Return after a stop instead of raising."""
    job.progress({"pid": os.getpid()})
    try:
        time.sleep(3_600)
    except JobStopped:
        return "all the same"
    return "slept"


tasks.supplier(Supplier("slow", rate_limits=(RateLimit(1, per_s=3_600),), margin_s=60))
"""Supplier that grants one unit, then nothing for an hour."""


@tasks.task("takes", process=True, timeout_s=60)
def takes(job: ProcessJob) -> str:
    """Wait in another thread for a grant that does not come; meanwhile this thread logs and sends requests."""
    job.take("slow")
    told: list[BaseException] = []

    def wait() -> None:
        try:
            job.take("slow", max_wait_s=7_200)
        except BaseException as error:  # noqa: ASYNC103, BLE001 - the test reports it
            told.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    for number in range(3):
        job.log.info("line", n=number)
        job.enqueue("noop", queue="other")
        assert job.deadline > time.monotonic()
    assert waiting.is_alive()
    job.progress({"waits": True})
    if job.args.get("stop"):
        job.take("slow", max_wait_s=7_200)
    return str(told)


@tasks.task("aio takes", process=True, asyncio=True, timeout_s=60)
async def aio_takes(job: AioProcessJob) -> list[object]:
    """Wait in another task for a grant that does not come; meanwhile others log and send requests."""
    await job.take("slow")
    waiting = asyncio.create_task(job.take("slow", max_wait_s=7_200))
    for number in range(3):
        job.log.info("line", n=number)
        await job.enqueue("noop", queue="other")
        await asyncio.gather(*(job.enqueue("noop", queue="other") for _ in range(50)))
    await job.progress({"waits": not waiting.done()})
    if job.args.get("stop"):
        await waiting
    waiting.cancel()
    await asyncio.sleep(job.args.get("s", 0))
    return [type(error).__name__ for error in await asyncio.gather(waiting, return_exceptions=True)]


@tasks.around
@contextlib.contextmanager
def around(job):
    with contextlib.ExitStack() as stack:
        if job.task == "all":
            stack.callback(job.log.info, "after it")
        yield
