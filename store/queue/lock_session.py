"""The one session of a process that holds advisory locks: it makes claims, frees keys, and is kept alive.

It records the jobs of this worker: `tokens` maps the token of each claimed job that is not released to the hash of the
key held for it. The value is None for a job without a key, and for one that has lost its key (it is still ours to
stop). A claim adds its jobs while it has the session, so that a repair never takes a successful claim for a lost one. A
job that another connection adds as ours is announced first (`expect`); repairs skip it until its answer has arrived.

A failed claim leaves two things unknown: which locks were taken, and which rows were committed. Before the next claim,
`_aio_repair` compares both with memory: it unlocks surplus locks, and queues unknown rows again without counting the
attempt. After a lost session, the next one terminates the former, which may have survived behind a dead network, and
takes the locks again. Jobs whose lock went to another session meanwhile are reported through `lost`.

Each ping compares the database's clock with ours, and so does a new session before its first claim. After a jump ahead,
leases granted before it look expired although their workers may be alive. The repair before the next claim records the
jump in the database, and from then on these leases count for their whole length.

The server ends a silent session after its idle timeout. The keys are safe for that time from the last moment at which
the server is known to have received a message of ours or to have been working for us: a claim that waits for a locked
table is not silence. `watch` asks on another connection whether the server is working. If the network is down, it has
no answer either, and the keys are safe only for the time that the last answer allows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final, TypeVar
from uuid import UUID

import asyncpg
import trio

from dataloader.jobs.logger import get_logger
from dataloader.store.connection.bridge import Database, Session
from dataloader.store.connection.error_meanings import UNANSWERED
from dataloader.store.queue.claim import Claim, ClaimRequest, claim_of
from dataloader.store.queue.finish import MAX_REFUNDS
from dataloader.store.queue.lease_clock import lease_time
from dataloader.store.queue.leases import JUMP_S, aio_mark_jump, aio_revive
from dataloader.store.queue.plain_claim import PlainClaims, aio_claim_plain

log = get_logger(__name__)
T = TypeVar("T")

IDLE_SHARE: Final = 0.8
"""Share of the shortest lease after which the server ends a silent session, so that its keys are freed in time."""

MIN_PING_S: Final = 1.0

DOUBT_S: Final = 2.0
"""Seconds that a statement with a lost answer may still run in the server. Until then, repairs search for its jobs."""

_CLAIM: Final = "SELECT * FROM dl_claim_known($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)"
_RELEASE: Final = "SELECT dl_release($1)"
_HELD: Final = """
SELECT objid::bigint::bit(32)::int AS hash FROM pg_locks
WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND objsubid = 1
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
_UNLOCK: Final = "SELECT count(pg_advisory_unlock(h)) FROM unnest($1::int[]) AS u (h)"
_TAKE: Final = "SELECT h, pg_try_advisory_lock(h) AS got FROM unnest($1::int[]) AS u (h)"
_GIVE_BACK: Final = f"""
WITH unknown AS MATERIALIZED (
  SELECT job_id FROM dl_jobs
  WHERE status = 'running' AND claimed_by = $1 AND token <> ALL ($2::bigint[]) AND job_id <> ALL ($3::uuid[])
), free AS MATERIALIZED (
  SELECT j.job_id FROM unknown u JOIN dl_jobs j ON j.job_id = ANY (ARRAY[u.job_id])
  WHERE (j.status = 'running') IS TRUE AND j.claimed_by = $1 AND j.token <> ALL ($2::bigint[])
  FOR NO KEY UPDATE OF j SKIP LOCKED
), returned AS (
  UPDATE dl_jobs j SET
    status = (CASE WHEN j.cancel_requested THEN 'canceled'
                   WHEN j.refunds >= {MAX_REFUNDS} AND j.attempt >= j.max_attempts THEN 'failed'
                   ELSE 'queued' END)::dl_status,
    attempt = CASE WHEN j.refunds < {MAX_REFUNDS} THEN greatest(j.attempt - 1, 0) ELSE j.attempt END,
    refunds = least(j.refunds, {MAX_REFUNDS} - 1) + 1,
    finished_at = CASE WHEN j.cancel_requested OR (j.refunds >= {MAX_REFUNDS} AND j.attempt >= j.max_attempts)
                       THEN now() END,
    lease_expires_at = NULL,
    claimed_by = NULL
  FROM free f WHERE j.job_id = ANY (ARRAY[f.job_id])
  RETURNING j.job_id, j.queue, j.status
), journal AS (
  INSERT INTO dl_job_events (job_id, queue, kind, payload)
  SELECT job_id, queue, CASE status WHEN 'queued' THEN 'requeue' ELSE status::text END,
         '{{"reason": "the claim''s reply was lost"}}'::jsonb
  FROM returned
)
SELECT (SELECT count(*) FROM unknown), (SELECT count(*) FROM returned)
"""
_WHO: Final = """
SELECT pid, backend_start, current_setting('max_locks_per_transaction')::int AS locks,
       current_setting('max_connections')::int + current_setting('max_prepared_transactions')::int AS sessions
FROM pg_stat_activity WHERE pid = pg_backend_pid()
"""
_END_GHOST: Final = "SELECT pg_terminate_backend(pid, 2000) FROM pg_stat_activity WHERE pid = $1 AND backend_start = $2"
"""Waits until the session has ended: until then it holds its locks, which we would attribute to another worker."""
_PING: Final = """
SELECT current_setting('transaction_read_only') = 'off', extract(epoch FROM clock_timestamp())::float8
FROM set_config('idle_session_timeout', $1, false)
"""
_STATE: Final = """
SELECT state = 'active' AS at_work, state_change FROM pg_stat_activity WHERE pid = $1 AND backend_start = $2
"""
_TAKE_AFTER_S: Final = (0.0, 0.02, 0.1, 0.4)
"""Pauses before each attempt to take our locks again: a claim or a check of another session may hold one briefly."""


class LockSession:
    """Claims jobs and holds their keys for one worker."""

    def __init__(
        self, database: Database, worker: str, *, lost: Callable[[list[int]], None], doubt_s: float = DOUBT_S
    ) -> None:
        """Create the session. `worker` becomes `claimed_by`. `lost` receives the tokens of jobs that lost their keys.

        For `doubt_s` seconds, repairs search again for the jobs of a statement whose answer was lost.
        """
        self.worker = worker
        self.tokens: dict[int, int | None] = {}
        self.safe_until = lease_time()
        self.on_termination: Callable[[], None] = lambda: None
        self.capacity = 0
        self.writable = False
        self._lost = lost
        self._doubt_s = doubt_s
        self._to_release: list[int] = []
        self._plain = PlainClaims()
        self._ghost: tuple[int, Any] | None = None
        self._keys_are_with: tuple[int, Any] | None = None
        self._suspect = False
        self._ahead_s: float | None = None
        self._jumped = False
        self._expected: set[UUID] = set()
        self._doubted: dict[UUID, float] = {}
        self._repairing = False
        self._settled = trio.Event()
        self._settled.set()
        self._claims = 0
        self._claimed = trio.Event()
        self._idle_s = 60.0
        self._session = Session(database, "locks", direct=True, on_connect=self._aio_connected)
        self._idle_when_seen: tuple[object, object] | None = None
        self._beside = Session(database, "watch", direct=True)

    @property
    def connected(self) -> bool:
        """Whether the session is open, as far as we know."""
        return self._session.connected

    @property
    def settled(self) -> bool:
        """Whether all our rows are in memory: no claim is in progress, and no answer was lost."""
        return self._settled.is_set()

    def expect(self, job_id: UUID) -> bool:
        """Announce a job that another connection adds as ours: no repair gives it back before `adopt` or `doubt`.

        Returns False, and announces nothing, if a repair that does not include the job may be running, or if the job is
        already expected or in doubt.
        """
        if self._repairing or job_id in self._expected or job_id in self._doubted:
            return False
        self._expected.add(job_id)
        return True

    def adopt(self, job_id: UUID, token: int | None) -> None:
        """Record the answer for an expected job: it is ours with this token, or (None) it is not ours."""
        self._expected.discard(job_id)
        if token is not None:
            self.tokens[token] = None

    def doubt(self, job_id: UUID) -> None:
        """Record that no answer has arrived: if the job was added as ours, a repair gives it back."""
        self._expected.discard(job_id)
        self._doubted[job_id] = trio.current_time() + self._doubt_s
        if self.settled:
            self._settled = trio.Event()

    async def wait_settled(self) -> None:
        """Wait until all our rows are in memory; the repair of a later claim or ping achieves this."""
        while not self.settled:
            await self._settled.wait()

    async def claim(
        self,
        queue: str,
        slots: int,
        tasks: Sequence[str] | None,
        backoff_s: float,
        *,
        look: int = 0,
        after: UUID | None = None,
        limited: Sequence[str] = (),
        lanes: Sequence[str] = (),
    ) -> Claim:
        """Claim up to `slots` jobs of `queue` whose task is in `tasks`; jobs of other tasks are skipped.

        A job whose key is held is parked, for at most `backoff_s` seconds. With `look` larger than `slots`, the claim
        reads that many jobs, and parks all of those that cannot run. Jobs up to `after`, the `last` of a former claim,
        are not read, unless a key that is freed now has made one of them ready.

        `limited` are the tasks that have a lane, `lanes` those of them whose lane should be read. If `tasks` is None,
        only jobs of these lanes are read.

        Keys that were released meanwhile are freed first, in the same statement.
        """
        request = ClaimRequest(
            queue,
            slots,
            max(slots, look),
            None if tasks is None else list(tasks),
            backoff_s,
            after,
            list(limited),
            list(lanes),
        )
        self._claims += 1
        try:
            claim = await self._session.write(self._aio_claim, request)
        finally:
            self._claims -= 1
            self._claimed.set()
            self._claimed = trio.Event()
        self.safe_until = max(self.safe_until, claim.sent_at + self._idle_s)
        return claim

    async def ask(self, operation: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run an operation (asyncio-flavored) that claims depend on, on their session, shielded with a deadline."""
        return await self._session.write(operation, *args)

    def forget(self, token: int) -> None:
        """Forget a job whose run has ended and is recorded, or that now belongs to another worker.

        Its key, if it has one, is freed at the next opportunity.
        """
        lock_hash = self.tokens.pop(token, None)
        if lock_hash is not None:
            self._to_release.append(lock_hash)

    async def release(self) -> None:
        """Free the keys of forgotten jobs and wake their next jobs, unless a running claim does so."""
        while self._claims:
            await self._claimed.wait()
            # A caller that claims again does so immediately after its last claim has returned.
            await trio.lowlevel.checkpoint()
        if self._to_release:
            await self._session.write(self._aio_release)

    async def ping(self, shortest_lease_s: float) -> None:
        """Show the server that this session is alive, and set the silence after which the server ends it."""
        idle_s = shortest_lease_s * IDLE_SHARE
        # A second attempt, on a new connection, must happen before the server ends the session.
        timeout_s = max(idle_s / 4, MIN_PING_S)
        sent_at = await self._session.write_within(timeout_s, self._aio_ping, idle_s)
        self._idle_s = idle_s
        self.safe_until = sent_at + idle_s

    async def repair(self) -> None:
        """Make the server agree with memory after a claim or a session was lost; otherwise do nothing."""
        if self._needs_repair:
            await self._session.write(self._aio_release)

    async def watch(self, timeout_s: float) -> bool:
        """Ask on another connection, for at most `timeout_s` seconds, whether the server is working on the session.

        Call it while an operation takes long on the session. True means that the server is working: our keys are as
        safe as after a ping. If two checks of one operation find the server idle since the same time, the operation's
        request or answer is lost: the session is dropped, and the operation raises `StoreUnavailable`.

        Raises `StoreUnavailable` if the other connection gets no answer.
        """
        if self._keys_are_with is None:
            return False
        operation = self._session.operation
        sent_at, state = await self._beside.write_within(timeout_s, _aio_state, *self._keys_are_with)
        if state is not None and state["at_work"]:
            # The server's own time of idleness is not used: its clock may jump.
            self.safe_until = max(self.safe_until, sent_at + self._idle_s)
            return True
        # A server that does not track the activity of sessions reports nothing for this one either.
        idle_since = None if state is None else state["state_change"]
        seen = None if idle_since is None or operation is None else (operation, idle_since)
        if seen is not None and seen == self._idle_when_seen:
            log.warning("the lock session's connection is dead: the server and this process wait for each other")
            await self._session.drop()
        self._idle_when_seen = seen
        return False

    async def end_watch(self) -> None:
        """Close the connection on which `watch` asks."""
        self._idle_when_seen = None
        await self._beside.close()

    def holds(self, token: int) -> bool:
        """Return whether we hold this run's key, as far as we know; False for a run without a key."""
        return self.tokens.get(token) is not None

    async def revive(self, runs: Sequence[tuple[UUID, int]], *, timeout_s: float) -> set[int]:
        """Renew expired leases of (job_id, token) whose keys we hold (F32); return the tokens of the renewed ones."""
        return await self._session.write_within(timeout_s, self._aio_revive, runs) if runs else set()

    async def cut(self) -> None:
        """End the session without waiting for an answer."""
        await self._session.cut()
        await self._beside.cut()

    async def close(self) -> None:
        """End the session; the server frees the keys that it still holds."""
        await self._session.close()
        await self._beside.close()

    async def _aio_claim(self, connection: Any, request: ClaimRequest) -> Claim:
        if self._needs_repair:
            await self._aio_repair(connection)
        # If the claim ends before its reply is in memory, it may leave unknown locks and rows behind; also after a
        # deadlock, which is followed by another attempt.
        suspect, self._suspect = self._suspect, True
        if self.settled:
            self._settled = trio.Event()
        try:
            claim = await self._aio_claim_either_way(connection, request)
        except asyncpg.PostgresError as error:
            # The server has undone what it refused, except the locks.
            if not suspect and not self._doubted and not isinstance(error, UNANSWERED):
                self._settled.set()
            raise
        for job in claim.jobs:
            self.tokens[job.token] = job.lock_hash
        self._suspect = suspect
        self._settle()
        return claim

    async def _aio_claim_either_way(self, connection: Any, request: ClaimRequest) -> Claim:
        """Claim by the plain statement, or by the general one, which also frees keys, if a job is not plain."""
        if not self._to_release and self._plain.may_serve(request):
            if (claim := await aio_claim_plain(connection, self.worker, request)) is not None:
                return claim
            self._plain.put_off(request.queue)
        sent_at = lease_time()
        with self._freeing() as freed:
            records = await connection.fetch(
                _CLAIM,
                request.queue,
                request.look,
                request.slots,
                self.worker,
                request.tasks,
                self._held(),
                request.backoff_s,
                freed,
                request.after,
                request.limited,
                request.lanes,
            )
        return claim_of(request, records, sent_at)

    async def _aio_release(self, connection: Any) -> None:
        if self._needs_repair:
            await self._aio_repair(connection)
        with self._freeing() as hashes:
            if hashes:
                await connection.fetchval(_RELEASE, hashes)

    @contextlib.contextmanager
    def _freeing(self) -> Iterator[list[int]]:
        """Take the keys that a statement frees; if it fails, keep them for the next one."""
        hashes, self._to_release = self._to_release, []
        try:
            yield hashes
        except BaseException:
            # The repair finds out whether they were unlocked; asking again wakes the next jobs, if that has not
            # happened.
            self._suspect = True
            self._to_release.extend(hashes)
            raise

    async def _aio_ping(self, connection: Any, idle_s: float) -> float:
        # No statement that could wait for a table, such as a repair: a long wait would count as silence here.
        sent_at = lease_time()
        if idle_s < self._idle_s:
            # The server may use the new value even if its answer is lost.
            self._idle_s = idle_s
            self.safe_until = min(self.safe_until, sent_at + idle_s)
        await self._aio_ask(connection, idle_s)
        return sent_at

    async def _aio_ask(self, connection: Any, idle_s: float) -> None:
        """Set the silence after which the session ends; read whether the server accepts writes, and its clock."""
        asked_at = lease_time()
        self.writable, shown = await connection.fetchrow(_PING, str(int(idle_s * 1000)))
        earliest, latest = shown - lease_time(), shown - asked_at
        if self._ahead_s is not None and earliest > self._ahead_s + JUMP_S:
            log.warning("the database's clock jumped ahead", by_s=round(earliest - self._ahead_s, 1))
            self._jumped = self._suspect = True
        self._ahead_s = latest

    async def _aio_revive(self, connection: Any, runs: Sequence[tuple[UUID, int]]) -> set[int]:
        # Only now, when the operation has the session: a new one has taken its locks again, or knows which it has lost.
        held = [(job_id, token) for job_id, token in runs if self.holds(token)]
        return await aio_revive(connection, held) if held else set()

    async def _aio_repair(self, connection: Any) -> None:
        """Make the server's locks and rows agree with memory, before the next claim."""
        if self._jumped:
            await aio_mark_jump(connection)
            self._jumped = False
        surplus = [record["hash"] for record in await connection.fetch(_HELD)]
        for lock_hash in self._held():
            with contextlib.suppress(ValueError):
                surplus.remove(lock_hash)
        # Keys of ended jobs are surplus, or were lost with a former session; their next jobs were not woken.
        now = trio.current_time()
        with self._freeing() as freed:
            # Until the repair has its answer: one that was lost with its session may still run in the server.
            self._repairing = True
            ours = self.worker, list(self.tokens), list(self._expected)
            unknown, returned = await connection.fetchrow(_GIVE_BACK, *ours)
            self._repairing = False
            if surplus:
                await connection.fetchval(_UNLOCK, surplus)
            if surplus or freed:
                await connection.fetchval("SELECT dl_ready_next($1)", [*{*surplus, *freed}])
        # The next repair gives back rows that another session has locked now.
        self._suspect = returned < unknown
        self._doubted = {job_id: until for job_id, until in self._doubted.items() if until > now}
        self._settle()
        if surplus or returned:
            log.warning("repaired after an interrupted claim", locks=len(surplus), jobs=returned)

    async def _aio_connected(self, connection: asyncpg.Connection[Any]) -> None:
        """Begin a new session: terminate the former one and take its locks again."""
        self._keys_are_with = None
        if self._ghost is not None:
            await connection.fetchval(_END_GHOST, *self._ghost)
        record: Any = await connection.fetchrow(_WHO)
        self._ghost = (record["pid"], record["backend_start"])
        self.capacity = record["locks"] * record["sessions"]
        await self._aio_ask(connection, self._idle_s)
        connection.add_termination_listener(self._on_termination)
        if self.tokens:
            await self._aio_take_again(connection)
        self._keys_are_with = self._ghost
        self._suspect = True

    async def _aio_take_again(self, connection: asyncpg.Connection[Any]) -> None:
        held = gone = set(self._held())
        for pause_s in _TAKE_AFTER_S:
            await asyncio.sleep(pause_s)
            records = await connection.fetch(_TAKE, list(gone))
            gone = {record["h"] for record in records if not record["got"]}
            if not gone:
                break
        lost = [token for token, lock_hash in self.tokens.items() if lock_hash in gone]
        log.warning("the lock session was lost; acquiring its locks again", taken=len(held - gone), lost=len(lost))
        if lost:
            for token in lost:
                self.tokens[token] = None
            self._lost(lost)

    @property
    def _needs_repair(self) -> bool:
        return self._suspect or bool(self._doubted)

    def _settle(self) -> None:
        if not self._needs_repair:
            self._settled.set()

    def _held(self) -> list[int]:
        return [lock_hash for lock_hash in self.tokens.values() if lock_hash is not None]

    def _on_termination(self, _connection: object) -> None:
        self.on_termination()


async def _aio_state(connection: Any, pid: int, backend_start: object) -> tuple[float, Any]:
    sent_at = lease_time()
    return sent_at, await connection.fetchrow(_STATE, pid, backend_start)
