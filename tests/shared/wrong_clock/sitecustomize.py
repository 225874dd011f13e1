"""Wrong clock for one process: Python imports this first if its folder is on PYTHONPATH.

The time of day is CLOCK_AHEAD_S seconds ahead of the machine's, or behind it. A SIGUSR1 moves it by CLOCK_STEP_S more,
as a correction of the machine's clock does. Monotonic clocks are not changed.
"""

import ctypes
import datetime as dt
import gc
import os
import signal
import time

_ahead_s = float(os.environ["CLOCK_AHEAD_S"])
_time, _time_ns, _now = time.time, time.time_ns, dt.datetime.now


def _step(*_: object) -> None:
    global _ahead_s  # noqa: PLW0603 - a process has one time of day
    _ahead_s += float(os.environ["CLOCK_STEP_S"])


def _wrong_now(_cls: type, tz: dt.tzinfo | None = None) -> dt.datetime:
    return _now(tz) + dt.timedelta(seconds=_ahead_s)


time.time = lambda: _time() + _ahead_s
time.time_ns = lambda: _time_ns() + int(_ahead_s * 1_000_000_000)
# A subclass would be another type for C code that creates and reads datetimes, so the type itself is changed.
gc.get_referents(dt.datetime.__dict__)[0]["now"] = classmethod(_wrong_now)
ctypes.pythonapi.PyType_Modified(ctypes.py_object(dt.datetime))
signal.signal(signal.SIGUSR1, _step)
