"""Guard of one body: kills it, with every process it has started, when its deadline passes or the service has ended.

The guard is a separate script (`python -P guard.py CONTROL DATA PARENT`). It imports none of our code and has no
thread, so that no user code can delay it. It forks the body, which imports the rest. The service sends commands through
the socket CONTROL:

    arm HARD LAST    the body may run until HARD, by CLOCK_BOOTTIME; answered by `armed`
    until HARD LAST  the same with later times, after a renewal of the lease
    idle             no job runs
    term             stop the body: SIGTERM for its process group
    kill             end the body and all that it has started

The guard sends `body PID` at its start, and `ended STATUS CAUSE` at its end, when no process of the body is left. These
rules hold whatever the body does:

* When HARD passes, or the service dies (its pidfd) or closes the socket, the guard kills all.
* If the guard is suspended or stuck, the kernel kills it at LAST (a timer whose signal is SIGKILL, which also counts
  while the machine sleeps), and the body with it (`PR_SET_PDEATHSIG`).
* A process that the body has left behind becomes the body's child and, when the body is dead, the guard's (both are
  subreapers). So the guard finds it, whatever session it has created.

Rejected: setitimer or a thread in the body, which its code can change or delay by the GIL; a process group alone, which
a daemon leaves; cgroups and namespaces, which most containers do not allow us to create.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import signal
import sys
import time
from typing import Final, NoReturn

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
TIMER_ABSTIME: Final = 1
TERM_NOTES: Final = b"x" * 64
"""Notes for the processes that inherit the pipe, a byte each. A SIGTERM without a note is ignored as foreign."""

_libc: Final = ctypes.CDLL(None, use_errno=True)


class _SignalEvent(ctypes.Structure):
    """`struct sigevent`, of 64 bytes."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    )


class _TimerSpec(ctypes.Structure):
    """`struct itimerspec`."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns"))


class LastTimer:
    """Timer of the kernel that kills this process. No code of the process has to run for that."""

    def __init__(self) -> None:
        """Create the timer, without setting it."""
        library = _libc if hasattr(_libc, "timer_create") else ctypes.CDLL("librt.so.1", use_errno=True)
        self._set = library.timer_settime
        self._timer = ctypes.c_void_p()
        event = _SignalEvent(None, signal.SIGKILL, 0, b"")
        _check_errno(library.timer_create(time.CLOCK_BOOTTIME, ctypes.byref(event), ctypes.byref(self._timer)))

    def set(self, at: float) -> None:
        """Kill this process at `at`, by CLOCK_BOOTTIME, instead of a former time; never if it is infinite."""
        whole, part = (0, 0.0) if at == math.inf else (int(at), at % 1)
        spec = _TimerSpec(0, 0, whole, int(part * 1e9))
        _check_errno(self._set(self._timer, TIMER_ABSTIME, ctypes.byref(spec), None))


class Guard:
    """Guard of one body. `_hard` is the time at which the body is killed, by CLOCK_BOOTTIME."""

    def __init__(self, control: int, parent: int, body: int, stop_notes: int) -> None:
        """Prepare to guard `body`. A note in the pipe `stop_notes` marks a SIGTERM as the service's."""
        self._control = control
        self._parent = parent
        self._body = body
        self._stop_notes = stop_notes
        self._hard = math.inf
        self._last = LastTimer()
        self._status: int | None = None

    def watch(self) -> NoReturn:
        """Obey the service until the body has ended."""
        woken, wakes = os.pipe()
        for end in (woken, wakes):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        waiting = select.poll()
        for watched in (woken, self._control, self._parent):
            waiting.register(watched, select.POLLIN)
        while True:
            self._reap()
            if self._status is not None:
                self._end("exit")
            left_s = self._hard - time.clock_gettime(time.CLOCK_BOOTTIME)
            if left_s <= 0:
                self._end("deadline")
            ready = {fd for fd, _ in waiting.poll(None if left_s == math.inf else math.ceil(left_s * 1_000))}
            if woken in ready:
                os.read(woken, 1_000)
            if self._parent in ready:
                self._end("parent")
            if self._control in ready:
                self._obey(self._hear().split())

    def _hear(self) -> bytes:
        try:
            return os.read(self._control, 1_000)
        except OSError:  # the service has ended and left data unread
            return b""

    def _obey(self, command: list[bytes]) -> None:
        match command:
            case [b"arm" | b"until" as name, hard, last]:
                self._hard = float(hard)
                self._last.set(float(last))
                if name == b"arm":
                    self._say("armed")
            case [b"idle"]:
                self._hard = math.inf
                self._last.set(math.inf)
            case [b"term"]:
                try:
                    os.write(self._stop_notes, TERM_NOTES)
                except BrokenPipeError:  # the body has just ended, or has become another program, which needs no note
                    pass
                _kill_group(self._body, signal.SIGTERM)
            case [b"kill"]:
                self._end("kill")
            case _:
                self._end("parent")

    def _say(self, text: str) -> None:
        try:
            os.write(self._control, text.encode())
        except OSError:
            self._end("parent")

    def _reap(self) -> None:
        """Reap the ended children: the body, and processes that it left behind."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._body:
                self._status = status

    def _end(self, cause: str) -> NoReturn:
        """Kill until no child is left. Children of a dead child become ours, and are killed in the next round."""
        _kill_group(self._body, signal.SIGKILL)
        # The body is dead, so the timer is not needed. On a busy machine it could end the guard before all leftovers.
        self._last.set(math.inf)
        try:
            while True:
                for pid in _children_of(os.getpid()):
                    _kill(pid)
                pid, status = os.waitpid(-1, 0)
                if pid == self._body:
                    self._status = status
                self._reap()
        except ChildProcessError:
            pass
        try:
            os.write(self._control, f"ended {self._status} {cause}".encode())
        except OSError:
            pass
        os._exit(0)


def _children_of(parent: int) -> list[int]:
    """Return the children of a process. Reads each `stat`: many kernels are built without the file `children`."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    ppid = file.read().rpartition(b")")[2].split()[1]
            except OSError:
                continue
            if int(ppid) == parent:
                found.append(int(name))
    return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # ended, or of another user, as with `sudo`: its end is awaited
        pass


def _kill_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        pass


def _check_errno(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _become_body(guard: int, data: int, stop_notes: int) -> None:
    """Set up the body's process and run its wrapper."""
    os.setsid()
    _check_errno(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))
    if os.getppid() != guard:
        os._exit(1)
    _check_errno(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1))
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    import json  # noqa: PLC0415 - the guard does not need it

    line = b""
    while not line.endswith(b"\n"):
        if not (part := os.read(data, 1)):
            os._exit(0)
        line += part
    declared = json.loads(line)
    sys.path[:] = declared["path"]
    if declared["calls"]:
        from dataloader.actors.children.call_body import answer_calls  # noqa: PLC0415 - only the body needs it

        answer_calls(data, declared)
    else:
        from dataloader.actors.children.body import live_in_body  # noqa: PLC0415 - as above

        live_in_body(data, stop_notes, declared)


def fork_and_guard() -> None:
    """Fork the body and guard it."""
    control, data, parent = map(int, sys.argv[1:4])
    parent_fd = os.pidfd_open(parent)
    if os.getppid() != parent:
        return
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # They come from a terminal, or from a service manager that signals every process. The service sends `term`.
        signal.signal(number, signal.SIG_IGN)
    _check_errno(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1))
    notes, told = os.pipe()
    os.set_blocking(notes, False)
    guard = os.getpid()
    body = os.fork()
    if body == 0:
        try:
            for other in (control, parent_fd, told):
                os.close(other)
            _become_body(guard, data, notes)
        except BaseException:  # noqa: ASYNC103, BLE001 - the guard sees the exit code; the job's log has the traceback
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    os.close(data)
    os.close(notes)
    # Only the body holds the output pipes: with a copy in the guard, the service would not see their end.
    null = os.open(os.devnull, os.O_RDWR)
    for output in (1, 2):
        os.dup2(null, output)
    os.write(control, f"body {body}".encode())
    Guard(control, parent_fd, body, told).watch()


if __name__ == "__main__":
    fork_and_guard()
