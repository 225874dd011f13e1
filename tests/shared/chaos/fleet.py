"""Processes of `just chaos`: three services, a foreign one, their database, and the faults that they suffer."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import trio
from histories import GRACE_S, Exit
from own_server import OwnServer
from services import FAST, LEASE_S, Service, start_service

from chaos import foreign_service, tasks
from chaos.away import AwayError, ask_once, insist
from chaos.notes import last_line_at

SERVICES = 3
QUEUES = {tasks.QUEUE: 8, foreign_service.QUEUE: 1, tasks.LIMITED: 6, tasks.LOADS: 2, "process.again": 4}
SETTINGS = FAST | {"cancel_grace_sec": GRACE_S, "drain_timeout_sec": 5}
PAUSES_S = (1.0, 6.0)
"""Shortest and longest time between two faults."""
FAULTS = {
    "kill -9 of a service": 5,
    "SIGTERM of a service": 4,
    "SIGSTOP of a service": 4,
    "database restart": 1,
    "database crash": 1,
    "end of lock sessions": 2,
    "kill -9 of the foreign one": 1,
}
"""Faults by weight."""
END_LOCK_SESSIONS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE '% locks'
"""
LEFT = "SELECT count(*) FROM dl_jobs WHERE status = 'running' AND claimed_by LIKE $1 || ':%'"
LEASE_IS_GONE = "a handler continues without its lease"
AFTER_AN_OUTAGE_S = 20
"""A service stopped within this time after an outage may leave rows to their leases: its exit code is 1 then."""


@attrs.define
class Member:
    """Service in successive processes. `told` is the last end signal and its time."""

    name: str
    service: Service
    told: tuple[float, signal.Signals] | None = None
    is_suspended: bool = False

    @property
    def url(self) -> str | None:
        if self.told or self.is_suspended:
            return None
        return next((line["url"] for line in [*self.service.lines] if line["event"] == "serving"), None)


@attrs.define
class Fleet:
    """All processes. `faults` counts the faults, `wrong` has the exits that were not as they should be."""

    server: OwnServer
    folder: Path
    source_url: str
    dice: random.Random
    faults: Counter[str] = attrs.field(factory=Counter)
    wrong: list[Exit] = attrs.field(factory=list)
    outages: list[float] = attrs.field(factory=list)
    errors: Counter[str] = attrs.field(factory=Counter)
    """Number of lines at level error in the services' logs, by event."""
    members: list[Member] = attrs.field(factory=list)
    is_over: bool = False
    _started: int = 0
    _foreign: Any = None
    _up: trio.Lock = attrs.field(factory=trio.Lock)
    """Held while the database is unavailable."""

    def start(self) -> None:
        for _ in range(SERVICES):
            name = self._next_name()
            self.members.append(Member(name, self._start(name)))
        self._start_foreign()

    def close(self) -> None:
        for member in self.members:
            self._keep_log(member)
            member.service.close()
        if self._foreign:
            self._foreign.kill()
            self._foreign.wait(20)

    def urls(self) -> list[str]:
        return [url for member in self.members if (url := member.url)]

    async def rage(self, until: float) -> None:
        """Cause faults until then; afterwards all processes run again."""
        async with trio.open_nursery() as nursery:
            await trio.sleep(self.dice.uniform(*PAUSES_S))
            while time.monotonic() < until:
                fault = self.dice.choices([*FAULTS], [*FAULTS.values()])[0]
                nursery.start_soon(self._strike, fault)
                await trio.sleep(self.dice.uniform(*PAUSES_S))

    async def _strike(self, fault: str) -> None:
        dice = self.dice
        well = [member for member in self.members if member.url]
        if fault.endswith("of a service"):
            if len(well) < 2:
                return  # otherwise no service might work on a slow machine
            member = dice.choice(well)
            self.faults[fault] += 1
            match fault.split(maxsplit=1)[0]:
                case "kill":
                    member.told = time.monotonic(), signal.SIGKILL
                    member.service.process.kill()
                case "SIGTERM":
                    member.told = time.monotonic(), signal.SIGTERM
                    member.service.signal(signal.SIGTERM)
                case _:
                    await self._suspend(member, dice.choice((0.3, 2, LEASE_S + 2, LEASE_S + 8)))
        elif fault.startswith("database"):
            await self._restart_database(
                "fast" if fault.endswith("restart") else "immediate", dice.choice((0, 1, 4, 8))
            )
            self.faults[fault] += 1
        elif fault == "end of lock sessions":
            self.outages.append(time.monotonic())
            with suppress(AwayError):
                await ask_once(self.server.dsn, lambda raw: raw.execute(END_LOCK_SESSIONS))
                self.faults[fault] += 1
        else:
            self._foreign.kill()
            await trio.to_thread.run_sync(self._foreign.wait, 20)
            self._start_foreign()
            self.faults[fault] += 1

    async def _suspend(self, member: Member, seconds: float) -> None:
        member.is_suspended = True
        member.service.signal(signal.SIGSTOP)
        await trio.sleep(seconds)
        member.service.signal(signal.SIGCONT)
        member.is_suspended = False

    async def _restart_database(self, mode: str, away_s: float) -> None:
        async with self._up:
            self.outages.append(time.monotonic())
            await self.server.stop(mode)
            await trio.sleep(away_s)
            await self.server.start()
            self.outages.append(time.monotonic())

    async def tend(self) -> None:
        """Restart ended processes, and judge how they ended."""
        while not self.is_over:
            for place, member in enumerate(self.members):
                if member.service.process.poll() is not None:
                    await self._judge(member)
                    name = self._next_name()
                    self.members[place] = Member(name, self._start(name))
            await trio.sleep(0.1)

    async def end(self, within_s: float) -> None:
        """Send all services SIGTERM, and judge how they end."""
        self.is_over = True
        for member in self.members:
            member.told = time.monotonic(), signal.SIGTERM
            member.service.signal(signal.SIGTERM)
        for member in self.members:
            with trio.move_on_after(within_s):
                while member.service.process.poll() is None:  # noqa: ASYNC110 - another process
                    await trio.sleep(0.05)
            if member.service.process.poll() is None:
                self._is_wrong(member, f"has not ended {within_s} s after its SIGTERM")
            else:
                await self._judge(member)

    async def _judge(self, member: Member) -> None:
        code, told = member.service.process.returncode, member.told
        await trio.to_thread.run_sync(member.service._reader.join, 5)
        if told is None:
            self._is_wrong(member, f"ended by itself with {code}")
        elif told[1] == signal.SIGKILL:
            if code != -signal.SIGKILL:
                self._is_wrong(member, f"was killed, and ended with {code}")
        elif code == 0:
            if left := await insist(self.server.dsn, lambda raw: raw.fetchval(LEFT, member.name)):
                self._is_wrong(member, f"ended with 0, and has left {left} rows running")
        elif code != 1 or not any(at > told[0] - AFTER_AN_OUTAGE_S for at in self.outages):
            self._is_wrong(member, f"ended with {code} after a SIGTERM")
        self._keep_log(member)
        member.service.close()

    def _is_wrong(self, member: Member, text: str) -> None:
        last = next((line for line in reversed(member.service.lines) if line["level"] == "critical"), {"event": ""})
        pid = member.service.process.pid
        notes = max(self.folder.glob(f"service-{pid}-*.notes"), default=Path("none"))
        is_gone = LEASE_IS_GONE in last["event"]
        text = f"{member.name} {text} {last}"
        at = last_line_at(notes) if notes.exists() else time.monotonic()
        self.wrong.append(Exit(process=notes.stem, at=at, text=text, lease_was_gone=is_gone))

    def _next_name(self) -> str:
        self._started += 1
        return f"chaos-{self._started:04}"

    def _start(self, name: str) -> Service:
        environment = {"CHAOS_FOLDER": str(self.folder), "SOURCE_URL": self.source_url}
        settings = SETTINGS | {"instance": name}
        return start_service(
            self.server.dsn, QUEUES, self.folder, tasks="chaos.tasks:tasks", environment=environment, **settings
        )

    def _start_foreign(self) -> None:
        environment = os.environ | {"CHAOS_FOLDER": str(self.folder), "CHAOS_DSN": self.server.dsn}
        environment["PYTHONPATH"] = str(Path(__file__).parents[1])
        command = [sys.executable, "-m", "chaos.foreign_service"]
        self._foreign = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)

    def _keep_log(self, member: Member) -> None:
        lines = [*member.service.lines]
        self.errors.update(line["event"] for line in lines if line["level"] in {"error", "critical", "no JSON"})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        Path(self.folder, f"{member.name}-{member.service.process.pid}.log").write_text(text)
