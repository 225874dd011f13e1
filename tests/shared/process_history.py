"""History of processes: actions on the database and on the model, and the comparison of the two.

Wake-up jobs are claimed only by SQL; a row's times are moved back to let time pass.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from functools import partial
from uuid import UUID

import attrs
from process_model import ModelJob, ModelOutcome, ModelRun, ProcessModel

from dataloader.store.processes.requests import Request, aio_act, aio_ask, aio_ask_many, row_of_request
from dataloader.store.processes.steps import StepOutcome, Wakeup, aio_begin, aio_commit

IDS = ("a", "b", "c")
HOUR = 3_600
CRASHES = (0, 2)
"""Number of repeats of a step, by the place of the process's ID."""

ROWS = """
SELECT json_build_object(
  'processes', (SELECT json_agg(p ORDER BY p.key) FROM (
    SELECT key, process_id, status, previous_status, detail, corrupted_by, aux_state, metadata, last_event_id, job_id,
           timer_task, timer_kind, round(extract(epoch FROM timer_at - now()) / 60) AS timer_in, timer_attempt,
           timer_first, timer_context, running_task, running_kind, running_token, crashes,
           removed_at IS NOT NULL AS removed
    FROM dl_processes WHERE type = $1) AS p),
  'tasks', (SELECT json_agg(t ORDER BY t.task_id) FROM (
    SELECT task_id, key, kind, method, status, args, response, error, attempt, first_task, context
    FROM dl_process_tasks WHERE type = $1) AS t),
  'events', (SELECT json_agg(e ORDER BY e.key, e.event_id) FROM (
    SELECT e.key, e.event_id, e.task_id, e.payload
    FROM dl_process_events e JOIN dl_processes USING (key) WHERE type = $1) AS e),
  'jobs', (SELECT json_agg(j ORDER BY j.job_id) FROM (
    SELECT job_id, task, status, waits_for, token,
           greatest(round(extract(epoch FROM available_at - now()) / 60), 0) AS ready_in,
           (args ->> 'key')::bigint AS key, cancel_requested
    FROM dl_jobs WHERE queue = 'process.' || $1 AND status IN ('queued', 'running')) AS j))
"""
ADVANCE = """
WITH p AS (UPDATE dl_processes SET timer_at = timer_at - make_interval(secs => $2) WHERE type = $1),
t AS (UPDATE dl_process_tasks SET expires_at = expires_at - make_interval(secs => $2)
      WHERE type = $1 AND status = 'waiting')
UPDATE dl_jobs SET available_at = available_at - make_interval(secs => $2),
  waits_for = CASE WHEN available_at - make_interval(secs => $2) > now() THEN waits_for END
WHERE queue = 'process.' || $1 AND status = 'queued'
"""
CLAIM = """
UPDATE dl_jobs SET status = 'running', token = (random() * 1e15)::bigint + 1, claimed_by = 'w',
  lease_expires_at = now() + interval '60 s'
WHERE job_id = $1 AND status = 'queued' AND waits_for IS NULL RETURNING token
"""
ENDED = "UPDATE dl_jobs SET status = 'canceled', finished_at = now() WHERE job_id = $1"
LOST = """
UPDATE dl_jobs SET status = 'queued', available_at = now(), waits_for = NULL, cancel_requested = false WHERE job_id = $1
"""


@attrs.define(eq=False)
class ProcessHistory:
    """History of actions on the database and on the model."""

    raw: object
    other: object
    type: str
    did: Counter
    model: ProcessModel = attrs.field(factory=ProcessModel)
    now: float = 0
    runs: list[ModelRun] = attrs.field(factory=list)
    old: list[tuple[ModelRun, object, ModelOutcome]] = attrs.field(factory=list)
    keyed: object = None
    leaving: set[str] = attrs.field(factory=set)
    """Jobs of processes that were removed while a worker had them: the queue ends these runs."""

    def process(self, a):
        return self.model.find(IDS[a % len(IDS)])

    async def ask(self, kind, a, b, **fields):
        """Send one request, alone or together with others as clients do."""
        await self._ask_many([(kind, a, b, fields)], b, together=kind != "repair" and b // 4 % 2)

    async def call_many(self, a, b):
        """Call several processes together, one of them twice, and start one that may exist."""
        calls = [("call", a + place, b // (1 + place), {"method": "m"}) for place in (0, 1, 2, 0)]
        await self._ask_many([*calls, ("init", a, b, {})], b, together=True)

    async def _ask_many(self, wanted, b, *, together):
        requests = [self._request(kind, a, b, **fields) for kind, a, b, fields in wanted]
        rows = [row_of_request(request) for request, _ in requests]
        answers = await self.raw.run(partial(aio_ask_many, waits=bool(b % 2)), rows, 60) if together else {}
        # Requests with another answer than "added" are sent one by one afterwards.
        for place in sorted(range(len(wanted)), key=lambda place: place not in answers):
            request, expires = requests[place]
            asked = answers.get(place) or await self.raw.run(aio_ask, request, 60)
            self._check(wanted[place], request, expires, asked)
            if place in answers:
                self.did["together", asked.verdict] += 1

    def _request(self, kind, a, b, **fields):
        expires = (None, None, HOUR, -HOUR)[b // 8 % 4] if kind == "call" else None
        request = Request(
            type=self.type,
            process_id=IDS[a % len(IDS)],
            kind=kind,
            args=(None, {"n": 1})[b % 2],
            key=(None, None, None, None, None, None, "k", "l")[b // 2 % 8],
            expires_at=None if expires is None else datetime.now(UTC) + timedelta(seconds=expires),
            **fields,
        )
        return request, None if expires is None else self.now + expires

    def _check(self, wanted, request, expires, asked):
        kind, a, b, fields = wanted
        verdict, status, task, process = self.model.ask(request, self.now, CRASHES[a % len(IDS) % 2], expires)
        self.did[kind, verdict] += 1
        assert (asked.verdict, asked.status) == (verdict, status)
        if verdict == "added":
            assert asked.task_id > max((t.id or 0 for t in process.tasks), default=0)
            task.id = asked.task_id
            self.keyed = self.keyed if request.key is None else (kind, a, b, fields)
        else:
            assert asked.task_id == (task and task.id)

    async def ask_again(self, _a, _b):
        """Send the same key again, as a client without an answer does."""
        if self.keyed is not None:
            kind, a, b, fields = self.keyed
            await self.ask(kind, a, b, **fields)

    async def init(self, a, b):
        await self.ask("init", a, b)

    async def call(self, a, b):
        await self.ask("call", a, b, method="m")

    async def start_and_call(self, a, b):
        await self.ask("call", a, b, method="m", may_start=True, start=(None, {"s": 1})[b % 2])

    async def repair(self, a, b):
        await self.ask("repair", a, b)

    async def act(self, a, b):
        await self._act(a, ("stop", "stop", "stop", "remove")[b % 4])

    async def resume(self, a, _b):
        await self._act(a, "resume")

    async def mend(self, a, b):
        """Request a repair of a process in error, or resume it."""
        broken = [place for place, one in enumerate(IDS) if (p := self.model.find(one)) and p.status == "error"]
        if broken and b % 2:
            await self._act(broken[a % len(broken)], "resume")
        elif broken:
            await self.ask("repair", broken[a % len(broken)], b)

    async def _act(self, a, act):
        process = self.process(a)
        if act == "remove" and process and process.job and process.job.status == "running":
            self.leaving.add(process.job.id)
        acted = await self.raw.run(aio_act, self.type, IDS[a % len(IDS)], act, 60)
        verdict, told = self.model.act(IDS[a % len(IDS)], act, self.now)
        self.did[act, verdict] += 1
        assert (acted.verdict, sorted(acted.told)) == (verdict, sorted(task.id for task in told))

    async def claim(self, a, _b):
        for process in self.model.processes[a % 2 :]:
            job = process.job
            if job is not None and job.status == "queued" and job.at <= self.now:
                job.token = await self.raw.fetchval(CLAIM, UUID(job.id))
                assert job.token, "the wake-up job is not ready"
                job.status = "running"
                self.runs.append(ModelRun(process, job, job.token))

    async def claim_and_begin(self, a, b):
        await self.claim(0, 0)
        await self.begin(a, b)

    async def run(self, _a, b):
        """Let a worker do the available work."""
        await self.claim(0, 0)
        await self.begin(0, 0)
        await self.end(0, b)

    async def late_begin(self, a, _b):
        """Let a worker that has lost its job begin only now."""
        if self.old:
            run, _, _ = self.old[a % len(self.old)]
            if run not in self.runs:
                self.runs.append(run)
                run.task = None

    async def begin(self, a, _b):
        new = [run for run in self.runs if run.task is None]
        await self._begin(new[a % 2 :] or new)

    async def _begin(self, runs, locked=()):
        # One statement has each process once: a late run belongs to another worker's statement.
        for batch in _apart(runs):
            wakeups = [
                Wakeup(run.process.key, UUID(run.job.id), run.token, run.process.crashes_allowed) for run in batch
            ]
            answers = await self.raw.run(aio_begin, wakeups)
            for run, begun in zip(batch, answers, strict=True):
                if run.process in locked:
                    assert begun.verdict == "locked"
                    self.did["begin", "locked"] += 1
                    continue
                verdict, told = self.model.begin(run, self.now)
                self.did["begin", verdict] += 1
                assert (begun.verdict, sorted(begun.told)) == (verdict, sorted(task.id for task in told))
                if verdict != "step":
                    self.runs.remove(run)
                    continue
                process, work = run.process, run.task
                assert (begun.work.kind, begun.work.method, begun.work.args) == (work.kind, work.method, work.args)
                assert (begun.work.attempt, begun.work.context) == (work.attempt, work.context)
                assert begun.snapshot.aux_state == process.state
                assert (begun.snapshot.status, begun.snapshot.last_event_id) == (process.status, len(process.events))

    async def end(self, a, b):
        going = [run for run in self.runs if run.task is not None]
        await self._commit([(run, _outcome(run.task, b + place)) for place, run in enumerate(going[a % 2 :] or going)])

    async def go_on(self, _a, b):
        """Commit as `run` does, and continue with the next step of each."""
        going = [run for run in self.runs if run.task is not None]
        ends = [(run, _outcome(run.task, b + place)) for place, run in enumerate(going)]
        await self._commit([(run, attrs.evolve(end, go_on=True)) for run, end in ends])

    async def _commit(self, ends, locked=(), *, again=False):
        ends = [(run, run.task, end) if len(one) == 2 else one for one in ends for run, *_, end in [one]]
        for batch in _apart(ends):
            steps = [_step(run, task, end) for run, task, end in batch]
            answers = await self.raw.run(aio_commit, steps)
            for (run, task, end), committed in zip(batch, answers, strict=True):
                if run.process in locked:
                    assert committed.verdict == "locked"
                    self.did["commit", "locked"] += 1
                    continue
                verdict, told = self.model.commit(run, task, end, self.now)
                self.did[f"{task.kind} {end.outcome}", verdict] += 1
                assert (committed.verdict, sorted(committed.told)) == (verdict, sorted(one.id for one in told))
                if verdict == "next":
                    mark = run.process.mark
                    assert (committed.work.kind, committed.work.method, committed.work.args) == (
                        mark.kind, mark.method, mark.args,
                    )  # fmt: skip
                    assert committed.work.attempt == mark.attempt
                    mark.id = mark.id or committed.work.task_id
                    assert committed.work.task_id == mark.id
                elif run in self.runs:
                    self.runs.remove(run)
                if not again:
                    self.old.append((run, task, end))

    async def late(self, a, _b):
        """Repeat a commit that was sent already, or send one after the job was given to another worker."""
        if self.old:
            await self._commit([self.old[a % len(self.old)]], again=True)

    async def crash(self, a, b):
        """Let a worker die, or only its lease: then it sends its commit later."""
        going = [run for run in self.runs if run.process.job is run.job and run.job.token == run.token]
        if going:
            run = going[a % len(going)]
            await self.raw.execute(LOST, UUID(run.job.id))
            run.job.status, run.job.at, run.job.stop = "queued", self.now, False
            if b % 2:
                self.runs.remove(run)

    async def lose_job(self, a, _b):
        """End the wake-up job externally, which the sweep finds."""
        process = self.process(a)
        if process is not None and process.job is not None:
            await self.raw.execute(ENDED, UUID(process.job.id))
            process.job.status = "ended"
            assert await self.raw.fetchval("SELECT dl_process_mend($1, 60)", [process.key]) == process.busy
            process.job = None
            if process.mark:
                process.crashes = 1_000_000  # ending the job of a step externally also ends its repeats
            if process.busy:
                runs = process.waiting or process.mark
                process.job = ModelJob("", self.now if runs else process.timer.at)

    async def drain(self, a, _b):
        going = [run for run in self.runs if run.task is not None]
        if going:
            await self._commit([(going[a % len(going)], ModelOutcome("returned"))])

    async def locked(self, a, _b):
        """Lock a process's row in another session."""
        process = self.process(a)
        await self.claim(0, 0)
        if process is not None:
            held = self.other.asyncpg.transaction()
            await self.other.run(lambda _: held.start())
            await self.other.execute("SELECT FROM dl_processes WHERE key = $1 FOR UPDATE", process.key)
            await self._begin([run for run in self.runs if run.task is None], (process,))
            # Void runs do not report locks.
            mine = [run for run in self.runs if run.task is not None and run.process.token == run.token]
            await self._commit([(run, _outcome(run.task, a)) for run in mine if not run.process.removed], (process,))
            await self.other.run(lambda _: held.rollback())

    async def advance(self, _a, b):
        await self.raw.execute(ADVANCE, self.type, HOUR * (1 + b % 2))
        self.now += HOUR * (1 + b % 2)

    async def check(self):
        found = json.loads(await self.raw.fetchval(ROWS, self.type))
        processes, jobs = found["processes"] or [], {row["job_id"]: row for row in found["jobs"] or []}
        assert len(processes) == len(self.model.processes)
        rows_of = {key: list(rows) for key, rows in itertools.groupby(sorted(found["tasks"] or [], key=_key), key=_key)}
        for process, row in zip(self.model.processes, processes, strict=True):
            process.key = row["key"]
            self._learn(process, row, rows_of.get(row["key"], []))
        for process, row in zip(self.model.processes, processes, strict=True):
            assert row == self._process(process)
            rows = [self._task(process, task) for task in process.tasks if task.status != "timer"]
            assert rows_of.get(process.key, []) == sorted(rows, key=lambda task: task["task_id"])
        assert (found["events"] or []) == [
            {"key": process.key, "event_id": number, "task_id": task.id, "payload": payload}
            for process in self.model.processes
            for number, (task, payload) in enumerate(process.events, 1)
        ]
        known = {process.job.id for process in self.model.processes if process.job}
        assert known <= jobs.keys() <= known | self.leaving
        for process in self.model.processes:
            if process.job:
                assert jobs[process.job.id] == self._job(process)
        self.model.check_work(self.now)

    def _learn(self, process, row, rows):
        """Learn the IDs that the database has generated."""
        if process.timer and process.timer.id is None:
            process.timer.id = row["timer_task"]
            assert process.timer.id > max(task.id or 0 for task in process.tasks if task is not process.timer)
        for task in process.tasks:
            if task.id is None and task.kind == "init":
                task.id = next(one["task_id"] for one in rows if one["kind"] == "init")
        if process.job and not process.job.id:
            process.job.id = row["job_id"]

    def _process(self, process):
        timer, mark = process.timer, process.mark
        return {
            "key": process.key, "process_id": process.id, "status": process.status, "previous_status": process.previous,
            "detail": process.detail, "corrupted_by": process.corrupted and process.corrupted.id,
            "aux_state": process.state, "metadata": process.metadata, "last_event_id": len(process.events),
            "job_id": process.job and process.job.id,
            "timer_task": timer and timer.id, "timer_kind": timer and timer.kind,
            "timer_in": timer and round((timer.at - self.now) / 60), "timer_attempt": timer and timer.attempt,
            "timer_first": timer and timer.first and timer.first.id, "timer_context": timer and timer.context,
            "running_task": mark and mark.id, "running_kind": mark and mark.kind, "running_token": process.token,
            "crashes": process.crashes, "removed": process.removed,
        }  # fmt: skip

    def _task(self, process, task):
        return {
            "task_id": task.id, "key": process.key, "kind": task.kind, "method": task.method, "status": task.status,
            "args": task.args, "response": task.response, "error": task.error, "attempt": task.attempt,
            "first_task": task.first and task.first.id, "context": task.context,
        }  # fmt: skip

    def _job(self, process):
        job = process.job
        waits = job.status == "queued" and job.at > self.now
        return {
            "job_id": job.id, "task": f"process.{self.type}.v1", "status": job.status, "key": process.key,
            "waits_for": "time" if waits else None, "token": job.token, "cancel_requested": job.stop,
            "ready_in": max(round((job.at - self.now) / 60), 0),
        }  # fmt: skip


def _key(row):
    return row["key"]


def _apart(runs):
    """Return batches in which each process occurs once."""
    batches = []
    for one in runs:
        process = (one if isinstance(one, ModelRun) else one[0]).process
        for batch in batches:
            if process not in batch:
                batch[process] = one
                break
        else:
            batches.append({process: one})
    return [list(batch.values()) for batch in batches]


def _outcome(task, b):
    """Return one of the possible outcomes of a step of this kind."""
    if task.kind == "remove":
        return ModelOutcome("done" if b % 4 else "failed", error=None if b % 4 else "stopped by an operator")
    outcome = ("done", "done", "done", "failed" if task.kind != "timeout" or b % 8 < 4 else "retry")[b % 4]
    if outcome == "retry":
        return ModelOutcome("retry", error="not yet", after_s=(0, HOUR)[b // 4 % 2], go_on=b % 3 > 0)
    if outcome == "failed":
        return ModelOutcome("failed", error="broken")
    if task.kind != "timeout" and b % 16 == 9:
        return ModelOutcome("refused", error="no", go_on=b % 3 > 0)
    following = ("keep", "timeout", "keep", "timeout", "suspend", "remove", "timeout", "gone")[b // 4 % 8]
    return ModelOutcome(
        "done",
        response={"r": b} if b % 3 else None,
        state={"s": b} if b % 5 else None,
        metadata={"m": b} if b % 7 == 0 else None,
        events=tuple(range(b % 3)),
        following=following,
        after_s=(0, HOUR, 2 * HOUR)[b // 2 % 3] if following in {"timeout", "remove"} else None,
        context={"c": b} if following == "timeout" and b % 2 else None,
        go_on=b % 4 != 1,
    )


def _step(run, task, end):
    def text(value):
        return None if value is None else json.dumps(value)

    return StepOutcome(
        wakeup=Wakeup(run.process.key, UUID(run.job.id), run.token),
        task_id=task.id,
        outcome=end.outcome,
        response=text(end.response),
        error=end.error,
        state=text(end.state),
        metadata=text(end.metadata),
        events=json.dumps(list(end.events)) if end.events else None,
        following=end.following,
        after_s=end.after_s,
        context=text(end.context),
        go_on=end.go_on,
    )
