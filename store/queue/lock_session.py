"""The process's one session that holds advisory locks: claims are made on it, keys are freed on it, it is kept alive.

Owner of what this worker holds: `tokens` maps each claimed, unreleased job's token to the hash of the key that is held
for it, None where it has no key, or has lost it (the job is still ours to stop). What a claim adds to it is added while
the session's turn is held, so that a repair never takes a claim that just succeeded for a lost one. A job that another
connection adds as ours is announced before (`expect`), and repairs pass it over until its answer has come.

Whatever goes wrong in a claim leaves two things unknown: locks that were taken and rows that were committed. Before the
next claim `_aio_repair` compares both with memory: surplus locks are unlocked, unknown rows go back with their attempt.
When the session was lost, the next one ends the former (a ghost may live on behind a dead network) and takes the locks
again; jobs whose lock was taken by another meanwhile are reported through `lost`.

Each ping compares the database's clock with ours, and so does a new session before its first claim. If it has jumped
ahead, leases that another clock has granted look ended though their workers may be at work: the repair before the next
claim notes the jump in the database, and they count for their whole length from then on.

The server ends a silent session after its idle timeout. The keys are safe for that long from the last moment at which
the server is known to have heard from us or to have been at work for us: a claim that waits for a locked table is no
silence. Whether it is at work is asked on another connection (`watch`); when the network is gone, that has no answer
either, and the keys are safe no longer than the last answer says.
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
"""The server ends a session silent for this share of the shortest lease, so that a ghost frees its keys in time."""

MIN_PING_S: Final = 1.0

DOUBT_S: Final = 2.0
"""How long a statement whose answer was lost may go on in the server: for so long repairs look for its jobs again."""

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
"""Waits for its end: while it goes on, so do its locks, and we would take ourselves for a stranger."""
_PING: Final = """
SELECT current_setting('transaction_read_only') = 'off', extract(epoch FROM clock_timestamp())::float8
FROM set_config('idle_session_timeout', $1, false)
"""
_STATE: Final = """
SELECT state = 'active' AS at_work, state_change FROM pg_stat_activity WHERE pid = $1 AND backend_start = $2
"""
_TAKE_AFTER_S: Final = (0.0, 0.02, 0.1, 0.4)
"""Pauses before each attempt to take our locks again: a claim or a look of somebody else may hold one for a moment."""


class LockSession:
    """Claims jobs and holds their keys for one worker."""

    def __init__(
        self, database: Database, worker: str, *, lost: Callable[[list[int]], None], doubt_s: float = DOUBT_S
    ) -> None:
        """`worker` becomes `claimed_by`; `lost` is told the tokens of running jobs whose key went to another.

        For `doubt_s` seconds repairs look again for the jobs of a statement whose answer was lost.
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
        """True while the session is open, as far as we know."""
        return self._session.connected

    @property
    def settled(self) -> bool:
        """False while rows may be ours that memory doesn't know: a claim is under way, or an answer was lost."""
        return self._settled.is_set()

    def expect(self, job_id: UUID) -> bool:
        """A job is about to be added as ours on another connection: no repair gives it back until `adopt` or `doubt`.

        False, and nothing is expected, while a repair may be under way that does not know of the job, and if the same
        job is expected or in doubt already.
        """
        if self._repairing or job_id in self._expected or job_id in self._doubted:
            return False
        self._expected.add(job_id)
        return True

    def adopt(self, job_id: UUID, token: int | None) -> None:
        """The answer has come: the job is ours, with this token, or (None) is not."""
        self._expected.discard(job_id)
        if token is not None:
            self.tokens[token] = None

    def doubt(self, job_id: UUID) -> None:
        """No answer has come: if the job was added as ours, a repair gives it back."""
        self._expected.discard(job_id)
        self._doubted[job_id] = trio.current_time() + self._doubt_s
        if self.settled:
            self._settled = trio.Event()

    async def wait_settled(self) -> None:
        """Return when no row is ours that memory doesn't know; the repair of a later claim or ping sees to it."""
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

        A job whose key is held is parked, for `backoff_s` seconds at most. `look` at more than `slots`, and what can't
        run is parked many at a time. Those up to `after`, the `last` of a
        former claim, are not looked at, unless a key that is freed now has made one ready.

        `limited` are those of `tasks` that have a lane, `lanes` those of them that are worth a look. With `tasks` None
        only jobs of these lanes are looked at.

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
        """Run an operation (asyncio-flavoured) that claims depend on, on their session, shielded with a deadline."""
        return await self._session.write(operation, *args)

    def forget(self, token: int) -> None:
        """The job's run has ended and is recorded (or is somebody else's now).

        Its key, if it has one, is to be freed at the next chance.
        """
        lock_hash = self.tokens.pop(token, None)
        if lock_hash is not None:
            self._to_release.append(lock_hash)

    async def release(self) -> None:
        """Free the keys of what was forgotten, and wake their next jobs, unless a claim takes them along."""
        while self._claims:
            await self._claimed.wait()
            # Whoever claims again does so in the turn in which its last claim came back.
            await trio.lowlevel.checkpoint()
        if self._to_release:
            await self._session.write(self._aio_release)

    async def ping(self, shortest_lease_s: float) -> None:
        """Show the server that we live, and tell it after how long a silence to take us for dead."""
        idle_s = shortest_lease_s * IDLE_SHARE
        # A second try, on a new connection, must come before the server ends the session.
        timeout_s = max(idle_s / 4, MIN_PING_S)
        sent_at = await self._session.write_within(timeout_s, self._aio_ping, idle_s)
        self._idle_s = idle_s
        self.safe_until = sent_at + idle_s

    async def repair(self) -> None:
        """Make the server agree with memory after a claim or a session was lost; else there is nothing to do."""
        if self._needs_repair:
            await self._session.write(self._aio_release)

    async def watch(self, timeout_s: float) -> bool:
        """Ask on another connection, for `timeout_s` seconds at most, whether the server is at work on the session.

        To be called while an operation has the session for long. True means that the server is at work: our keys are as
        safe as after a ping. If the server was idle, and since the same moment, at two looks at one operation, that
        operation's request or answer is lost: the session is dropped, and the operation raises `StoreUnavailable`.

        Raises `StoreUnavailable` when the other connection has no answer.
        """
        if self._keys_are_with is None:
            return False
        operation = self._session.operation
        sent_at, state = await self._beside.write_within(timeout_s, _aio_state, *self._keys_are_with)
        if state is not None and state["at_work"]:
            # Not by how long it has been idle else: that would be measured by a clock that may jump.
            self.safe_until = max(self.safe_until, sent_at + self._idle_s)
            return True
        # A server that does not track what its sessions do knows nothing of this one either.
        idle_since = None if state is None else state["state_change"]
        seen = None if idle_since is None or operation is None else (operation, idle_since)
        if seen is not None and seen == self._idle_when_seen:
            log.warning("the lock session's connection is dead: the server waits for us, and we for it")
            await self._session.drop()
        self._idle_when_seen = seen
        return False

    async def end_watch(self) -> None:
        """Close the connection on which `watch` asks."""
        self._idle_when_seen = None
        await self._beside.close()

    def holds(self, token: int) -> bool:
        """Whether we have this run's key, as far as we know; False for one that has none."""
        return self.tokens.get(token) is not None

    async def revive(self, runs: Sequence[tuple[UUID, int]], *, timeout_s: float) -> set[int]:
        """Renew expired leases of (job_id, token) whose keys we hold (F32); the tokens of those come back."""
        return await self._session.write_within(timeout_s, self._aio_revive, runs) if runs else set()

    async def cut(self) -> None:
        """End the session without waiting for an answer."""
        await self._session.cut()
        await self._beside.cut()

    async def close(self) -> None:
        """End the session; the server frees what it still holds."""
        await self._session.close()
        await self._beside.close()

    async def _aio_claim(self, connection: Any, request: ClaimRequest) -> Claim:
        if self._needs_repair:
            await self._aio_repair(connection)
        # Whatever ends the claim before its reply is in memory, a deadlock after which it is repeated included, leaves
        # locks and rows behind that nobody knows.
        suspect, self._suspect = self._suspect, True
        if self.settled:
            self._settled = trio.Event()
        try:
            claim = await self._aio_claim_either_way(connection, request)
        except asyncpg.PostgresError as error:
            # What the server has refused it has undone, but for the locks.
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
        """The keys that a statement frees, for as long as it takes."""
        hashes, self._to_release = self._to_release, []
        try:
            yield hashes
        except BaseException:
            # Unlocked or not, the repair finds out; that nobody woke the next job is mended by asking again.
            self._suspect = True
            self._to_release.extend(hashes)
            raise

    async def _aio_ping(self, connection: Any, idle_s: float) -> float:
        # Nothing that could wait for a table, such as a repair: whoever waits for long counts as silent here.
        sent_at = lease_time()
        if idle_s < self._idle_s:
            # The server may go by it though we never hear of that.
            self._idle_s = idle_s
            self.safe_until = min(self.safe_until, sent_at + idle_s)
        await self._aio_ask(connection, idle_s)
        return sent_at

    async def _aio_ask(self, connection: Any, idle_s: float) -> None:
        """Say after how long a silence the session ends; read whether the server takes writes, and its clock."""
        asked_at = lease_time()
        self.writable, shown = await connection.fetchrow(_PING, str(int(idle_s * 1000)))
        earliest, latest = shown - lease_time(), shown - asked_at
        if self._ahead_s is not None and earliest > self._ahead_s + JUMP_S:
            log.warning("the database's clock jumped ahead", by_s=round(earliest - self._ahead_s, 1))
            self._jumped = self._suspect = True
        self._ahead_s = latest

    async def _aio_revive(self, connection: Any, runs: Sequence[tuple[UUID, int]]) -> set[int]:
        # After the session's turn has come: a new one has taken its locks again by now, or knows which it has not.
        held = [(job_id, token) for job_id, token in runs if self.holds(token)]
        return await aio_revive(connection, held) if held else set()

    async def _aio_repair(self, connection: Any) -> None:
        """Make the server's locks and rows agree with memory. Claims begin after it."""
        if self._jumped:
            await aio_mark_jump(connection)
            self._jumped = False
        surplus = [record["hash"] for record in await connection.fetch(_HELD)]
        for lock_hash in self._held():
            with contextlib.suppress(ValueError):
                surplus.remove(lock_hash)
        # Keys of ended jobs are surplus, or went with a former session; their next jobs were not woken.
        now = trio.current_time()
        with self._freeing() as freed:
            # Until a repair has its answer: one that went with its session may be under way in the server still.
            self._repairing = True
            ours = self.worker, list(self.tokens), list(self._expected)
            unknown, returned = await connection.fetchrow(_GIVE_BACK, *ours)
            self._repairing = False
            if surplus:
                await connection.fetchval(_UNLOCK, surplus)
            if surplus or freed:
                await connection.fetchval("SELECT dl_ready_next($1)", [*{*surplus, *freed}])
        # A row that somebody else has locked at the moment is given back by the next repair.
        self._suspect = returned < unknown
        self._doubted = {job_id: until for job_id, until in self._doubted.items() if until > now}
        self._settle()
        if surplus or returned:
            log.warning("repaired after an interrupted claim", locks=len(surplus), jobs=returned)

    async def _aio_connected(self, connection: asyncpg.Connection[Any]) -> None:
        """A new session: the former one is ended, its locks are taken again."""
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
        log.warning("the lock session was lost; its locks are taken again", taken=len(held - gone), lost=len(lost))
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
