"""Builds with a guard taken out, which its test must notice: `pytest --without GUARD TEST`.

A test that cannot fail proves nothing. Each guard of the protocol has an entry here: how it is taken out of the running
program (the product has no such switches), and the test that must then fail. tests/faults/test_broken_builds.py tries
all of them; docs/guards.md, which `just reference` writes, lists them. A service under test takes out the guard that
the environment names.
"""

from __future__ import annotations

import importlib
import math
import os
import pkgutil
import tempfile
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from contextvars import copy_context
from datetime import timedelta
from operator import attrgetter
from pathlib import Path

import attrs
import trio

from dataloader.flows.processes.driver import _Drive
from dataloader.jobs.states import Step
from dataloader.store.connection.fair_places import FairPlaces
from dataloader.store.migrations import function_set
from dataloader.store.queue.claim import Claim
from dataloader.store.queue.leases import MAX_COUNT
from dataloader.store.queue.make_ready import Judged

VARIABLE = "WITHOUT_GUARD"


@attrs.frozen
class Guard:
    """Guard of the protocol: its purpose, its test, and the function that takes it out."""

    does: str
    test: str
    take_out: Callable[[], None]


def edit(place: str, old: str, new: str) -> Callable[[], None]:
    """Return a function that edits a constant, such as a statement; `place` is its name without `dataloader.`."""

    def take_out() -> None:
        module, name = _place(place)
        text = getattr(module, name)
        assert old in text, f"{place} has no {old!r} any more"
        setattr(module, name, text.replace(old, new))

    return take_out


def put(place: str, value: object) -> Callable[[], None]:
    """Return a function that replaces a value or a function of a module or a class."""

    def take_out() -> None:
        owner, name = _place(place)
        assert hasattr(owner, name), f"there is no {place} any more"
        setattr(owner, name, value)

    return take_out


def edit_schema(old: str, new: str) -> Callable[[], None]:
    """Return a function that edits the functions of the schema."""

    def take_out() -> None:
        whole = function_set.source()
        assert old in whole, f"no function has {old!r} any more"
        function_set.source = lambda: whole.replace(old, new)

    return take_out


def _place(place: str) -> tuple[object, str]:
    owner, _, name = f"dataloader.{place}".rpartition(".")
    return pkgutil.resolve_name(owner), name


def edit_guard(old: str, new: str) -> Callable[[], None]:
    """Return a function that edits the program that guards child processes; children that start later get the copy."""

    def take_out() -> None:
        child = importlib.import_module("dataloader.actors.children.child")
        whole = Path(child.__file__).with_name("guard.py").read_text()
        assert old in whole, f"the guard has no {old!r} any more"
        with tempfile.NamedTemporaryFile("w", prefix="guard", suffix=".py", delete=False) as file:
            file.write(whole.replace(old, new))
        child.GUARD = file.name

    return take_out


def _nothing(*_args: object, **_more: object) -> None:
    """Replace a guarding function: do nothing."""


async def _nothing_async(*_args: object, **_more: object) -> None:
    """Replace an async guarding function: do nothing."""


async def _true_async(*_args: object, **_more: object) -> bool:
    """Replace an async guarding function: return True."""
    return True


def _true(*_args: object, **_more: object) -> bool:
    """Replace a guarding function: return True."""
    return True


async def _none_of_them(*_args: object, **_more: object) -> dict[int, object]:
    """Replace a guarding function that reports what it did: do nothing."""
    return {}


def _not_ahead(*_args: object) -> timedelta:
    return timedelta(0)


def _refused_together(looks, lanes, _now) -> None:
    looks.failed(lanes)


def _begins_in_one_context(coroutine, _context):
    return BEGIN(coroutine, ONE_CONTEXT)


def _waits_in_any(run, scope) -> None:
    run.scope = scope


def _ends_unchecked(shared, *error) -> bool:
    scope = shared._run.scope
    return scope is not None and bool(scope.__exit__(*error))


def _ends_without_lease(lease, **given) -> tuple[float, object]:
    return BODY_ENDS(attrs.evolve(lease, until=math.inf), **given)


def _ends_without_key(lease, **given) -> tuple[float, object]:
    return BODY_ENDS(attrs.evolve(lease, key_safe_until=math.inf), **given)


def _ends_without_period(lease, **given) -> tuple[float, object]:
    return BODY_ENDS(attrs.evolve(lease, period_ends_at=math.inf), **given)


def _never_killed(_lease) -> tuple[float, float]:
    return math.inf, math.inf


def _no_hosts(*_args: object) -> list[object]:
    """Replace a function that splits an address."""
    return []


def _always(*_args: object, **_more: object) -> bool:
    """Replace a check: return True."""
    return True


async def _runs_in_the_pool(share, operation, *args, **named) -> object:
    return await share.pool.run(operation, *args, **named)


def _for_one_caller(*, most: int, most_of_one: int) -> FairPlaces:
    return FairPlaces(most=most, most_of_one=max(most, most_of_one))


def _place_without_a_wait(*_args: object) -> AbstractAsyncContextManager[None]:
    return nullcontext()


async def _room_by_seconds(self) -> None:
    while len(self) >= self.most:
        if not self.make_room():
            self._changed = trio.Event()
            with trio.move_on_after(min(map(self._may_go_at, GIVING_WAY)) - trio.current_time()):
                await self._changed.wait()


async def _no_checkpoint() -> None: ...


def _much_later(_clock, at: float) -> float:
    return at + 100_000


def _never(*_args: object) -> bool:
    """Replace a check that allows something: return False."""
    return False


def _are_successes(outcomes) -> bool:
    return all(outcome.step is Step.SUCCEED for outcome in outcomes)


async def _none_judged(*_args: object, **_named: object) -> Judged:
    """Replace a function that evaluates jobs."""
    return Judged(0, more=False)


async def _no(*_args: object) -> bool:
    return False


async def _yes(*_args: object) -> bool:
    """Replace an async check: return True."""
    return True


async def _step_until_it_ends(drive, snapshot, work, step=_Drive._step):
    """Replacement for a step after which the driver asks the database for its result in an outage."""
    while (stepped := await step(drive, snapshot, work))[0].outcome == "returned":
        pass
    return stepped


async def _watch_is_content(locks, _timeout_s: float) -> bool:
    locks.safe_until = trio.current_time() + locks._idle_s
    return True


async def _watch_sees_nothing(_locks, _timeout_s: float) -> bool:
    return False


def _expects(locks, job_id) -> bool:
    locks._expected.add(job_id)
    return True


def _forgets(locks, job_id) -> None:
    locks._expected.discard(job_id)


def _as_it_is(text: str, *_limit: int) -> str:
    return text


async def _all_or_nothing(recorder, write, rows) -> set[int]:
    return await recorder.session.write(write, rows)


async def _sends_unmarked(dispatcher, ask, lanes, names) -> Claim:
    more = {"look": ask.look, "after": ask.after, "limited": dispatcher._limited, "lanes": lanes}
    claim = await dispatcher.locks.claim(dispatcher.queue, ask.slots, names, dispatcher.backoff_s, **more)
    dispatcher.answered()
    return claim


def _reserves_at_any_time(dispatcher) -> bool:
    if not dispatcher.slots.free:
        return False
    dispatcher.slots.reserve()
    return True


GIVING_WAY = importlib.import_module("dataloader.web.server.connections")._GIVING_WAY
BEGIN, ONE_CONTEXT = importlib.import_module("dataloader.actors.first_step").begin, copy_context()
BODY_ENDS = importlib.import_module("dataloader.actors.lease").Lease.body_ends
RANDOM_TOKEN = "greatest(uuid_hash_extended(gen_random_uuid(), 0) & 9007199254740991, 1)"
STORE, ACTORS, FAULTS = "tests/store/queue", "tests/actors", "tests/faults"
PROCESSES = "tests/store/processes"
JUMPS = "tests/store/test_clock_jumps.py"
STEP_OUTAGES = "tests/flows/processes/test_step_outages.py"

GUARDS = {
    "token in the finish": Guard(
        "a late outcome has no effect",
        f"{STORE}/test_finish.py::test_an_outcome_with_an_old_token_changes_nothing",
        edit("store.queue.finish._FINISH", "j.token = e.token AND ", ""),
    ),
    "token in the finish of successes": Guard(
        "a late success has no effect",
        f"{STORE}/test_finish.py::test_an_outcome_with_an_old_token_changes_nothing",
        edit("store.queue.finish._SUCCEED", "j.token = e.token AND ", ""),
    ),
    "token in the finish of a transaction": Guard(
        "rows of a late run are rolled back with its outcome",
        f"{STORE}/test_transaction.py::test_a_job_that_is_not_ours_any_more_has_its_rows_undone",
        edit("store.queue.finish._FINISH_PATIENTLY", "j.token = e.token AND ", ""),
    ),
    "token in the progress": Guard(
        "late progress has no effect",
        f"{STORE}/test_finish.py::test_progress_and_lines_with_an_old_token_change_nothing",
        edit("store.queue.finish._PROGRESS", "j.token = p.token AND ", ""),
    ),
    "token in the log": Guard(
        "late log lines have no effect",
        f"{STORE}/test_finish.py::test_progress_and_lines_with_an_old_token_change_nothing",
        edit("store.queue.finish._LOG", "j.token = l.token AND ", ""),
    ),
    "token in the heartbeat": Guard(
        "a run loses its lease when its job belongs to another run",
        f"{STORE}/test_leases.py::test_a_job_that_is_not_ours_any_more_is_lost",
        edit("store.queue.leases._BEAT", "j.token = m.token AND ", ""),
    ),
    "token in the heartbeat's join": Guard(
        "a heartbeat does not report a run as renewed because another run of its job was",
        f"{STORE}/test_leases.py::test_of_two_runs_of_one_job_only_the_one_with_the_token_is_renewed",
        edit("store.queue.leases._BEAT", " AND r.token = m.token", ""),
    ),
    "random token": Guard(
        "a restored database does not issue a token again",
        f"{STORE}/test_leases.py::test_a_restored_database_gives_no_token_out_again",
        edit_schema(RANDOM_TOKEN, "nextval('{schema}.former_tokens')"),
    ),
    "random token in the plain claim": Guard(
        "a restored database does not issue a token again to plain claims",
        f"{STORE}/test_leases.py::test_a_restored_database_gives_no_token_out_again",
        edit("store.queue.plain_claim._CLAIM", RANDOM_TOKEN, "nextval('former_tokens')"),
    ),
    "stop of the former run": Guard(
        "a job that is claimed again by its process starts after its former run has ended",
        f"{ACTORS}/test_run_identity.py::test_a_job_claimed_again_here_starts_after_its_former_run_ended",
        put("actors.job_runs.Runs._replace", _nothing),
    ),
    "context of each run": Guard(
        "context variables of a handler do not reach the next job of the same Trio task",
        f"{ACTORS}/test_shared_tasks.py::test_what_a_handler_sets_in_its_context_does_not_reach_the_next",
        put("actors.slots.begin", _begins_in_one_context),
    ),
    "deadline of a handler that waits": Guard(
        "a handler that shares a Trio task is stopped before its own lease ends",
        f"{ACTORS}/test_shared_tasks.py::test_a_handler_has_its_own_deadline_from_its_first_wait_on",
        put("actors.job_runs.Run.waits_in", _waits_in_any),
    ),
    "limit of unrecorded ends": Guard(
        "the number of unrecorded ends is at most half of the slots",
        f"{ACTORS}/test_slots.py::test_handlers_run_ahead_of_their_record_by_half_of_the_slots",
        put("actors.slots.Slots.used", property(attrgetter("running"))),
    ),
    "check for an open scope": Guard(
        "a cancel scope that a handler leaves open stops no other job",
        f"{ACTORS}/test_shared_tasks.py::test_a_cancel_scope_that_a_handler_leaves_open_fails_its_own_job_alone",
        put("actors.shared_scope.SharedScope.__exit__", _ends_unchecked),
    ),
    "content in the ident": Guard(
        "the key of a step depends on its content, not on a number that a restore repeats",
        f"{PROCESSES}/test_idents.py::test_a_step_run_again_after_a_restore_has_idents_by_its_content",
        edit_schema("uuid_send(p_of) || convert_to(p_content, 'UTF8')", "uuid_send(p_of) || convert_to('', 'UTF8')"),
    ),
    "random ident": Guard(
        "a new request with a repeated number has another key",
        f"{PROCESSES}/test_idents.py::test_a_new_request_under_a_used_number_has_another_ident",
        edit_schema("coalesce(p_ident, gen_random_uuid())", "md5(p_kind)::uuid"),
    ),
    "ident of a task in its answer": Guard(
        "a client that waits for a task lost by a restore does not get another task's answer",
        "tests/flows/processes/test_step_keys.py"
        "::test_a_wait_for_a_task_undone_by_a_restore_gets_no_other_tasks_answer",
        put("store.processes.reads.check_ident", _nothing),
    ),
    "ident in a withdrawal": Guard(
        "a caller withdraws no call of another client with the same number after a restore",
        "tests/flows/processes/test_step_keys.py::test_a_cancelled_caller_withdraws_no_call_of_another_client",
        edit_schema("AND t.ident IS NOT DISTINCT FROM p_idents[array_position(p_tasks, t.task_id)]", ""),
    ),
    "ident in the end of a delivery": Guard(
        "a delivery ends no other row with the same number after a restore",
        f"{PROCESSES}/test_idents.py::test_a_delivery_ends_no_row_that_has_its_number_after_a_restore",
        edit_schema("AND o.ident IS NOT DISTINCT FROM p_idents[array_position(p_done, o.id)]", ""),
    ),
    "ident in the end of a message": Guard(
        "a message does not count as delivered because another one had its number",
        f"{PROCESSES}/test_idents.py::test_a_delivery_ends_no_row_that_has_its_number_after_a_restore",
        edit("store.processes.outbox_rows._DELIVERED", "ident IS NOT DISTINCT", "$2::uuid IS NOT DISTINCT"),
    ),
    "version that a live worker serves": Guard(
        "a process that has not begun is not moved from a version that is served",
        f"{PROCESSES}/test_process_upkeep.py::test_an_init_process_never_moves_from_a_version_that_is_served",
        edit_schema("s.version = p.version AND s.served_until > now())\n  LOOP", "false)\n  LOOP"),
    ),
    "version that a live worker of the previous release serves": Guard(
        "workers that report only their tasks keep the processes that they serve",
        f"{PROCESSES}/test_process_upkeep.py::test_an_init_process_never_moves_from_a_version_that_is_served",
        edit_schema("v_version = v_process.version OR EXISTS (", "v_version = v_process.version OR false AND EXISTS ("),
    ),
    "memory of written outcomes": Guard(
        "an outcome that is sent twice is not reported as another run's",
        f"{STORE}/test_finish.py::test_a_batch_that_is_sent_again_changes_nothing_and_is_not_void",
        edit("store.queue.finish._REST", "(j.status = 'succeeded') = (e.step = 'succeed')", "false"),
    ),
    "skipping locked rows in the finish": Guard(
        "a locked row delays no other outcome",
        f"{STORE}/test_finish.py::test_a_row_that_is_locked_holds_up_no_other_and_is_written_by_a_later_try",
        edit("store.queue.finish._FINISH", "SKIP LOCKED", ""),
    ),
    "skipping locked rows in the finish of successes": Guard(
        "a locked row delays no other success",
        f"{STORE}/test_finish.py::test_a_row_that_is_locked_holds_up_no_other_and_is_written_by_a_later_try",
        edit("store.queue.finish._SUCCEED", "SKIP LOCKED", ""),
    ),
    "general statement for a success with an error": Guard(
        "a success whose result could not be stored keeps its error",
        f"{STORE}/test_finish.py::test_one_unstorable_row_neither_stops_the_others_nor_runs_again",
        put("store.queue.finish._are_plain", _are_successes),
    ),
    "skipping locked rows in the progress": Guard(
        "a locked row delays no other progress and no outcome",
        f"{ACTORS}/test_outcomes.py::test_a_locked_row_delays_no_other_jobs_outcome",
        edit("store.queue.finish._PROGRESS", "SKIP LOCKED", ""),
    ),
    "skipping locked rows in the log": Guard(
        "a locked row delays no other log lines and no outcome",
        f"{ACTORS}/test_outcomes.py::test_a_locked_row_delays_no_other_jobs_outcome",
        edit("store.queue.finish._LOG", "SKIP LOCKED", ""),
    ),
    "cancel request in the finish": Guard(
        "a job with a cancel request does not go back to the queue",
        f"{STORE}/test_finish.py::test_a_job_that_is_to_be_canceled_never_goes_back_to_the_queue",
        edit("store.queue.finish._FINISH", "WHEN j.cancel_requested THEN", "WHEN false THEN"),
    ),
    "refund of the attempt": Guard(
        "a job that a drain stopped does not use an attempt",
        f"{ACTORS}/test_drain.py::test_a_job_stopped_by_the_deadline_is_released_with_its_attempt_refunded",
        edit("store.queue.finish._FINISH", "greatest(j.attempt - 1, 0)", "j.attempt"),
    ),
    "lease as the scope's deadline": Guard(
        "a handler ends before its lease can go to another worker",
        f"{ACTORS}/test_leases.py::test_a_body_ends_before_its_lease_though_its_key_is_safe",
        put("actors.lease.Lease.body_ends", _ends_without_lease),
    ),
    "key as the scope's deadline": Guard(
        "a handler ends before its key can go to another worker",
        f"{ACTORS}/test_lock_keys.py::test_a_body_ends_before_its_key_though_its_lease_is_held",
        put("actors.lease.Lease.body_ends", _ends_without_key),
    ),
    "close of a period as the scope's deadline": Guard(
        "a run stops at the close of its work period if its task says so",
        f"{ACTORS}/test_period_ends.py::test_a_run_stops_before_the_period_end_and_a_later_run_before_the_next_one",
        put("actors.lease.Lease.body_ends", _ends_without_period),
    ),
    "deadline of a commit": Guard(
        "a waiting commit is abandoned before the lease can go to another worker",
        f"{ACTORS}/test_silence.py::test_a_waiting_commit_is_abandoned_before_the_lease_ends",
        put("actors.lease.Lease.commit_ends", lambda _lease: math.inf),
    ),
    "expired leases stay expired": Guard(
        "no heartbeat renews a lease that has ended",
        f"{STORE}/test_leases.py::test_an_expired_lease_is_never_renewed",
        edit("store.queue.leases._BEAT", " AND (j.lease_expires_at > now()) IS TRUE", ""),
    ),
    "advisory lock in the claim": Guard(
        "a key that is held by another session is not claimed",
        f"{STORE}/test_claim.py::test_a_key_held_elsewhere_parks_the_job_without_an_attempt",
        edit_schema("WHEN pg_try_advisory_lock(h) THEN 'run'", "WHEN pg_try_advisory_lock(h) OR true THEN 'run'"),
    ),
    "skipping unknown tasks in the claim": Guard(
        "a claim neither locks nor writes jobs of unknown tasks",
        f"{STORE}/test_claim.py::test_a_claim_neither_locks_nor_writes_jobs_of_unknown_tasks",
        edit_schema(
            """
        AND (j.task = ANY (p_tasks) OR j.cancel_requested)
""",
            "\n",
        ),
    ),
    "skipping unknown tasks in the search for locked jobs": Guard(
        "a locked job of an unknown task does not cause repeated claims",
        f"{STORE}/test_claim.py::test_a_locked_job_of_an_unknown_task_is_not_worth_another_claim",
        edit_schema(
            "j.waits_for IS NULL AND (j.task = ANY (p_tasks) OR j.cancel_requested)\n", "j.waits_for IS NULL\n"
        ),
    ),
    "all or none in the plain claim": Guard(
        "a job that is not plain keeps its place in the order of claims",
        f"{STORE}/test_plain_claim.py::test_jobs_between_plain_ones_are_claimed_as_by_the_general_claim",
        edit("store.queue.plain_claim._CLAIM", "AND (SELECT are_plain FROM found)", "AND p.is_plain"),
    ),
    "general claim of a job with a key": Guard(
        "the plain claim takes no job with a key",
        f"{STORE}/test_claim.py::test_a_key_held_elsewhere_parks_the_job_without_an_attempt",
        edit("store.queue.plain_claim._CLAIM", "NOT (j.keyed OR ", "NOT ("),
    ),
    "skipping unknown tasks in the plain claim": Guard(
        "the plain claim neither locks nor writes jobs of unknown tasks",
        f"{STORE}/test_claim.py::test_a_claim_neither_locks_nor_writes_jobs_of_unknown_tasks",
        edit(
            "store.queue.plain_claim._CLAIM",
            " AND (j.task = ANY ($4) OR j.cancel_requested)\n    AND (j.p",
            "\n AND (j.p",
        ),
    ),
    "skipping unknown tasks in the plain search for locked jobs": Guard(
        "a locked job of an unknown task does not cause repeated plain claims",
        f"{STORE}/test_claim.py::test_a_locked_job_of_an_unknown_task_is_not_worth_another_claim",
        edit(
            "store.queue.plain_claim._CLAIM",
            """
                           AND (j.task = ANY ($4) OR j.cancel_requested)
""",
            "\n",
        ),
    ),
    "skipping locked rows in the plain claim": Guard(
        "a locked job delays no other job",
        f"{STORE}/test_plain_claim.py::test_a_job_that_another_session_has_locked_is_passed_over",
        edit("store.queue.plain_claim._CLAIM", "FOR NO KEY UPDATE SKIP LOCKED", ""),
    ),
    "search for changed rows in the plain claim": Guard(
        "a job that changes between snapshot and lock is claimed soon",
        f"{STORE}/test_plain_claim.py::test_a_row_that_changes_between_snapshot_and_lock_is_left_for_the_next_claim",
        edit(
            "store.queue.plain_claim._CLAIM",
            "THEN EXISTS (SELECT FROM dl_jobs j",
            "THEN false AND EXISTS (SELECT FROM dl_jobs j",
        ),
    ),
    "return to the front with new tasks": Guard(
        "skipped jobs are found when their task becomes known",
        f"{ACTORS}/test_unknown_tasks.py::test_a_task_that_becomes_known_between_two_claims_is_looked_for_from_the_front",
        put("actors.claim_cursor.ClaimCursor.to_front", _nothing),
    ),
    "lock of a limit queue": Guard(
        "concurrent claims do not exceed the concurrency limit of a task",
        "tests/store/limits/test_limits_sql.py::test_a_lane_that_another_claim_has_locked_starts_no_job",
        edit_schema("WHERE l.lane = v_task.name FOR NO KEY UPDATE SKIP LOCKED", "WHERE l.lane = v_task.name"),
    ),
    "separate evaluation of limit queues": Guard(
        "an error in one limit queue closes only that one",
        "tests/actors/test_closed_lanes.py::test_an_error_in_one_limit_queue_stops_no_other_job",
        put("actors.lane_looks.LaneLooks.refused", _refused_together),
    ),
    "check of time zones": Guard(
        "a time zone that the database does not know is refused",
        "tests/actors/test_zones.py::test_a_zone_that_the_database_does_not_know_is_refused",
        put("store.limits.limit_rows.aio_check_zone", _nothing_async),
    ),
    "database's clock in work periods": Guard(
        "a run stops at the close of a period by the database's clock",
        "tests/actors/test_zones.py::test_runs_that_stop_at_a_close_go_by_the_databases_clock_of_a_zone",
        put("store.limits.limit_rows._database_is_ahead", _not_ahead),
    ),
    "round-robin of partitions": Guard(
        "partition keys are served round-robin, whatever their number of jobs",
        "tests/store/limits/test_partitions.py::test_waiting_partition_keys_are_served_round_robin",
        edit_schema("SET last_partition = v_turn", "SET last_partition = NULL"),
    ),
    "lock of a supplier": Guard(
        "concurrent claims do not exceed a supplier's rate limit",
        "tests/store/limits/test_limits_sql.py::test_a_long_lock_of_a_supplier_delays_only_its_own_lanes",
        edit_schema(
            "WHERE s.source = v_task.supplier FOR NO KEY UPDATE SKIP LOCKED", "WHERE s.source = v_task.supplier"
        ),
    ),
    "margin of a supplier": Guard(
        "a job that would start after its rate-limit reservation goes back",
        "tests/actors/test_limits.py::test_a_body_that_would_begin_later_than_it_was_counted_goes_back",
        put("actors.slots.BEGIN_SHARE", math.inf),
    ),
    "margin before midnight": Guard(
        "a start that may happen after midnight counts for the next day",
        "tests/store/limits/test_day_rate_limits.py::test_a_loads_request_counts_in_its_day_and_free_starts_may_precede_midnight",
        edit_schema("p_cost > 0 AND p_now + make_interval(secs => p_source.margin_s) >= v_midnight", "false"),
    ),
    "live lease in the claim": Guard(
        "a key is not claimed while a lease of its jobs lasts, even if its lock is free",
        f"{STORE}/test_claim.py::test_a_live_lease_blocks_its_key_when_the_lock_is_gone",
        edit_schema("IF v_live IS NOT NULL THEN", "IF false THEN"),
    ),
    "second check of a parked key": Guard(
        "a job whose key was released while it was parked becomes ready",
        f"{ACTORS}/test_keys.py::test_a_job_that_was_parked_while_its_key_came_free_is_looked_at_again",
        put("actors.dispatcher.Dispatcher._test", _nothing_async),
    ),
    "wake-up at the release": Guard(
        "the end of a job makes the next job of its key ready",
        f"{STORE}/test_release_and_park.py::test_a_parked_job_starts_when_the_holder_ends",
        edit_schema("RETURN {schema}.dl_ready_next(p_hashes);", "RETURN 0;"),
    ),
    "repair of rows after a lost reply": Guard(
        "a job whose claim had no reply goes back",
        f"{STORE}/test_claim.py::test_a_claim_whose_reply_was_lost_goes_back_with_its_attempt",
        edit("store.queue.lock_session._GIVE_BACK", "WHERE status = 'running' AND", "WHERE false AND"),
    ),
    "repair skips jobs that are being added": Guard(
        "a job that starts as it is added is not released before the answer",
        f"{ACTORS}/test_direct_start.py::test_a_job_that_is_just_being_added_is_not_given_back_by_a_repair",
        edit("store.queue.lock_session._GIVE_BACK", "job_id <> ALL ($3::uuid[])", "$3::uuid[] IS NOT NULL"),
    ),
    "no start during a repair": Guard(
        "no job starts as it is added during a repair that does not know it",
        f"{STORE}/test_lock_session.py::"
        "test_no_job_is_expected_while_a_repair_may_be_under_way_that_does_not_know_of_it",
        put("store.queue.lock_session.LockSession.expect", _expects),
    ),
    "repair of an addition without an answer": Guard(
        "a job that was added as running without an answer goes back",
        f"{STORE}/test_lock_session.py::test_a_job_in_doubt_is_looked_for_until_its_statement_must_be_over",
        put("store.queue.lock_session.LockSession.doubt", _forgets),
    ),
    "pause in the addition": Guard(
        "no job starts as it is added while its queue is paused",
        f"{ACTORS}/test_direct_start.py::test_a_job_that_may_not_run_yet_or_here_waits_for_its_claim",
        edit("store.queue.job_inserts._ADD_ONE_STARTED", "AND q.paused", "AND false"),
    ),
    "place of a job that found no slot": Guard(
        "a job that waits for a slot is not overtaken by later ones",
        f"{ACTORS}/test_direct_start.py::test_a_job_that_finds_no_slot_is_not_overtaken_by_a_later_one",
        put("actors.dispatcher.Dispatcher.reserve", _reserves_at_any_time),
    ),
    "place of a job added during a claim": Guard(
        "a job added while a claim is under way is not overtaken by later ones",
        f"{ACTORS}/test_direct_start.py::test_a_job_added_during_a_claim_is_not_overtaken_by_a_later_one",
        put("actors.direct_start.DirectStart.added", lambda _starter, _jobs: None),
    ),
    "repair of locks after a lost reply": Guard(
        "a key that a failed claim has locked is released",
        f"{STORE}/test_claim.py::test_a_failed_claim_unlocks_its_surplus_locks_and_wakes_parked_jobs",
        edit("store.queue.lock_session._HELD", "WHERE locktype", "WHERE false AND locktype"),
    ),
    "termination of a stale session": Guard(
        "a former lock session behind a dead network does not keep its keys",
        f"{STORE}/test_lock_session.py::test_a_stale_former_session_is_terminated_and_does_not_keep_our_keys",
        edit("store.queue.lock_session._END_GHOST", "SELECT pg_terminate_backend(pid, 2000)", "SELECT true"),
    ),
    "silence ends the lock session": Guard(
        "a worker that is cut off loses its keys before its leases",
        f"{STORE}/test_lock_session.py::test_the_server_ends_a_session_that_is_silent_for_less_than_the_lease",
        edit("store.queue.lock_session._PING", "set_config('idle_session_timeout', $1, false)", "concat($1::text)"),
    ),
    "a waiting claim is no silence": Guard(
        "a locked table stops no job whose own lease lasts",
        f"{ACTORS}/test_silence.py::test_a_claim_that_waits_for_a_table_stops_no_job_whose_own_lease_holds",
        put("store.queue.lock_session.LockSession.watch", _watch_sees_nothing),
    ),
    "only an answer keeps the keys": Guard(
        "handlers stop before their keys are free, even if the network fails during a waiting claim",
        f"{ACTORS}/test_silence.py::test_a_network_loss_during_a_waiting_claim_stops_runs_before_keys_are_free",
        put("store.queue.lock_session.LockSession.watch", _watch_is_content),
    ),
    "end of a dead lock connection": Guard(
        "a claim whose request or answer is lost costs no job its key",
        f"{ACTORS}/test_silence.py::test_a_claim_lost_in_the_network_is_abandoned_before_runs_must_stop",
        put("store.connection.bridge.Session.drop", _nothing_async),
    ),
    "check after a unique job was added": Guard(
        "an older update that finds its key free does not run after a newer one",
        f"{STORE}/test_unique.py::test_an_older_one_that_finds_the_key_free_looks_for_a_newer_that_has_ended",
        edit_schema("j.version >= p_version AND j.job_id <> p_job_id", "false"),
    ),
    "lock of the job that stands for a request": Guard(
        "that job does not start before the request's transaction has committed",
        f"{STORE}/test_unique.py::test_a_job_that_stands_for_a_request_does_not_start_before_that_is_committed",
        edit_schema("AND j.superseded_by IS NULL FOR NO KEY UPDATE;", "AND j.superseded_by IS NULL;"),
    ),
    "unique key as lock_key": Guard(
        "the newer job of a unique key starts when the older one has ended",
        f"{STORE}/test_unique.py::test_a_waiting_duplicate_is_kept_and_a_running_one_allows_another",
        edit_schema("p_task, p_args) END, v_key);", "p_task, p_args) END, p_job_id::text);"),
    ),
    "end of a superseded job": Guard(
        "a superseded job does not run again, whoever queues it",
        f"{STORE}/test_unique.py::test_a_run_that_is_superseded_does_not_run_again_and_the_newer_one_does",
        edit_schema("'UPDATE' AND NEW.superseded_by IS NOT NULL AND", "'UPDATE' AND false AND"),
    ),
    "unique key of a job that is queued again": Guard(
        "no UPDATE fails because a newer job has the key of an ended one",
        f"{STORE}/test_unique.py::test_a_retry_is_refused_while_its_unique_key_is_taken_and_plain_updates_work",
        edit_schema("    NEW.unique_key := NULL;\n", ""),
    ),
    "mark on awaited jobs": Guard(
        "the end of a job and the evaluation of jobs that wait for it never miss each other",
        f"{STORE}/test_after.py::test_an_ending_and_the_job_that_waits_for_it_never_miss_each_other",
        edit_schema(
            "UPDATE {schema}.dl_jobs p SET awaited = true WHERE p.job_id = ANY (v_open) AND NOT p.awaited;", ""
        ),
    ),
    "check of all predecessors": Guard(
        "a job does not run before a predecessor that was retried",
        f"{STORE}/test_after.py::test_one_that_is_retried_before_the_others_end_counts_by_what_it_comes_to",
        edit_schema("(array_agg(a.after_id) FILTER (WHERE p.status IN ('queued', 'running')))[1]", "NULL::uuid"),
    ),
    "stager in addition to notifications": Guard(
        "a job whose predecessors have ended runs even if the notification was lost",
        f"{ACTORS}/test_graphs.py::test_a_graph_runs_to_its_end_and_its_handlers_get_earlier_results",
        put("actors.stager.ready_after", _none_judged),
    ),
    "count of crashes": Guard(
        "a job that kills its worker each time is lost in the end",
        f"{STORE}/test_leases.py::test_a_job_that_kills_its_worker_each_time_is_lost_despite_refunded_attempts",
        edit("store.queue.leases._REAP", f" OR least(crashes, {MAX_COUNT}) + 1 >= max_attempts", ""),
    ),
    "second check after a jump of the clock": Guard(
        "a jump of the database's clock does not take all jobs from their workers",
        f"{STORE}/test_leases.py::test_after_a_jump_of_the_databases_clock_the_reaper_looks_twice",
        edit("store.queue.leases._REAP", "> $3::float8, false)", "> $3::float8 + 'infinity', false)"),
    ),
    "mark of a jump of the clock": Guard(
        "leases of cut-off workers count for their whole length after a jump of the clock",
        f"{JUMPS}::test_leases_count_for_their_length_after_the_clock_jumped_ahead",
        put("store.queue.lock_session.aio_mark_jump", _nothing_async),
    ),
    "correction of a supplier's times": Guard(
        "a rate limit that was used while the clock was ahead is not closed until then",
        f"{JUMPS}::test_a_rate_limit_used_while_the_clock_was_ahead_is_not_closed_until_then",
        edit_schema("SELECT * INTO v_source FROM {schema}.dl_cut_back(v_source);", ""),
    ),
    "calls during a wrong clock": Guard(
        "units taken while the clock was ahead count when the clock is right again",
        f"{JUMPS}::test_a_rate_limit_used_while_the_clock_was_ahead_is_not_closed_until_then",
        edit_schema("FROM ahead a HAVING count(*) > 0;", "FROM ahead a HAVING false;"),
    ),
    "correction of schedules' times": Guard(
        "a schedule whose next time was computed while the clock was ahead does not wait until then",
        f"{JUMPS}::test_schedules_whose_next_time_the_clock_put_off_are_cut_back",
        edit("store.schedules.cut_back._CUT_BACK", "s.next_at = u.former", "false"),
    ),
    "share of each host": Guard(
        "a host that does not answer does not hide the other hosts of an address",
        "tests/store/connection/test_hosts.py::test_a_host_that_is_silent_does_not_hide_the_next_one",
        put("store.connection.connect.hosts_of", _no_hosts),
    ),
    "commit of a repeated request": Guard(
        "a repeated request is answered when the synchronous standby has it",
        f"{FAULTS}/test_failover.py::test_a_request_sent_again_is_answered_when_the_standby_has_it",
        edit("store.queue.enqueue._REPLICATE", "<> ''", "IS NULL"),
    ),
    "renewal after a jump of the clock": Guard(
        "live workers keep their jobs when the database's clock jumps",
        f"{FAULTS}/test_time.py::test_f32_live_workers_keep_their_jobs_when_the_databases_clock_jumps",
        put("actors.heartbeat.Heartbeat._revive", _none_of_them),
    ),
    "deadline of the drain": Guard(
        "a thread that never returns does not delay the exit",
        f"{FAULTS}/test_signals.py::test_a_thread_that_never_returns_is_named_and_left_behind",
        put("supervisor.drain.BOUND_S", 3_600.0),
    ),
    "doubt at the exit": Guard(
        "a process does not exit with 0 while a claim's reply is lost",
        f"{FAULTS}/test_signals.py::test_f10_a_claim_with_a_lost_reply_is_released_or_the_exit_code_reports_it",
        put("store.queue.lock_session.LockSession.settled", value=True),
    ),
    "end of a process that cannot stop a run": Guard(
        "a process exits when a handler continues after its lease",
        f"{FAULTS}/test_stalls.py::test_f08_f29_a_process_with_a_stuck_handler_exits_before_its_job_runs_again",
        put("supervisor.serve._leave_unstoppable", _nothing),
    ),
    "limit of a log line's wait": Guard(
        "an unread log does not delay a drain",
        f"{FAULTS}/test_signals.py::test_f12_an_unread_log_delays_no_drain",
        put("supervisor.log_stream._may_block", _never),
    ),
    "limit of the last log line": Guard(
        "an unread log does not delay the exit",
        f"{FAULTS}/test_signals.py::test_f12_an_unread_log_does_not_keep_the_process_from_ending",
        put("supervisor.total_deadline.LAST_WORD_S", 3_600.0),
    ),
    "limit of notifications": Guard(
        "a flood of notifications ends the listener, not the leases",
        f"{ACTORS}/test_cancel.py::test_a_flood_of_notifications_costs_their_latency_and_no_lease",
        put("store.queue.notifications.FLOOD", math.inf),
    ),
    "process heartbeat in restored tables": Guard(
        "a service declares its tasks again in tables that were restored in place",
        f"{ACTORS}/test_history_watch.py::test_tasks_are_declared_again_when_older_tables_are_restored_in_place",
        edit("store.queue.worker_rows._SHOW", "coalesce((SELECT f.seen_at >=", "true OR coalesce((SELECT f.seen_at >="),
    ),
    "limit queue of the task alone": Guard(
        "a job that SQL has put into another task's limit queue stops no queue",
        f"{ACTORS}/test_unknown_tasks.py::test_a_job_in_the_lane_of_another_task_stops_no_queue",
        edit_schema("IF NEW.lane <> NEW.task THEN", "IF false THEN"),
    ),
    "conditions of triggers": Guard(
        "a row that another service has left wrong reaches the function that corrects it",
        f"{STORE}/test_trigger_conditions.py::test_conditions_of_update_triggers_let_through_all_that_is_changed",
        edit_schema("NEW.waits_for IS NOT NULL OR NEW.lane <> NEW.task\n", "NEW.waits_for IS NOT NULL\n"),
    ),
    "check of all names of a job": Guard(
        "a job that is added by SQL has no invalid name or key",
        f"{STORE}/test_dl_enqueue.py::test_an_invalid_argument_is_refused_by_its_name",
        edit_schema("OR v_names ~ E'", "OR false AND v_names ~ E'"),
    ),
    "check for unique tasks in a list of jobs": Guard(
        "a list of jobs is added completely or not at all",
        f"{STORE}/test_enqueue.py::test_a_list_with_a_refused_job_of_a_unique_task_adds_nothing",
        edit("store.queue.job_inserts._ADD_ALL", "u.uniqueness IS NOT NULL", "false"),
    ),
    "end of the claims in a drain": Guard(
        "a drain ends the claims of a backlog while slots are free",
        f"{ACTORS}/test_drain.py::test_a_drain_ends_claims_of_a_backlog_while_slots_are_free",
        put("actors.dispatcher.trio.lowlevel.checkpoint_if_cancelled", _no_checkpoint),
    ),
    "limits keep a closing limit queue": Guard(
        "limits that are set while their task's limit queue closes are kept",
        "tests/store/limits/test_unknown_blocks.py::test_limits_set_while_a_lane_closes_keep_it",
        edit("store.limits.limit_rows._NEEDED", "WHERE lane = $1", "WHERE false AND lane = $1"),
    ),
    "mark of a claim in progress": Guard(
        "a process counts new tasks as known when no earlier claim is in progress",
        f"{ACTORS}/test_closed_lanes.py::test_learning_tasks_waits_for_a_claim_from_one_lane_alone",
        put("actors.dispatcher.Dispatcher._send", _sends_unmarked),
    ),
    "limit queues for jobs without one": Guard(
        "jobs are found whose limit queue was dropped at the same time",
        "tests/store/limits/test_unknown_blocks.py::test_jobs_in_a_lane_that_was_dropped_beside_them_are_found",
        edit("store.limits.unknown_blocks._WITHOUT_LANE", "WHERE lane IS NOT NULL\nON", "WHERE false\nON"),
    ),
    "limit queue of a job that is queued again": Guard(
        "a job whose limit queue was dropped is ready when it is queued again",
        "tests/store/limits/test_unknown_blocks.py::test_a_lane_closes_when_all_workers_of_its_queue_have_known_the_task_for_an_hour",
        edit_schema("    NEW.lane := (SELECT l.lane FROM {schema}.dl_lanes l WHERE l.lane = NEW.lane);\n", ""),
    ),
    "observed keys": Guard(
        "an inserted snapshot ends at the next one that has observed the key, changed or not",
        "tests/store/etl/test_history_weave.py::test_a_row_that_did_not_change_later_ends_what_is_woven_in",
        put("store.etl.history_merge.aio_note_keys", _nothing_async),
    ),
    "observed times": Guard(
        "a late row ends at the next row of its key, changed or not",
        "tests/store/etl/test_history_changes.py::test_a_change_that_comes_late_ends_where_its_row_was_seen_unchanged",
        put("store.etl.history_merge.aio_note_times", _nothing_async),
    ),
    "time at which a connection may be closed": Guard(
        "many new connections at the same time end no part of the service",
        "tests/web/server/test_connections.py::test_a_connection_that_grows_old_while_room_is_sought_gives_way",
        put("web.server.connections.Connections.room", _room_by_seconds),
    ),
    "isolation of a schedule": Guard(
        "an error of one schedule pauses it, and the others add their jobs",
        "tests/store/schedules/test_tick.py::test_an_error_of_one_schedule_pauses_it_and_the_others_add_their_jobs",
        put("store.schedules.tick.is_temporary", _always),
    ),
    "check of advisory locks": Guard(
        "no process starts on a server whose advisory locks do not exclude other sessions",
        "tests/supervisor/test_server_check.py::test_a_server_whose_locks_always_succeed_is_refused",
        put("store.connection.server_check._aio_excludes", _yes),
    ),
    "masking of secrets": Guard(
        "no line, error or event shows a password",
        "tests/system/test_serving.py::test_every_line_of_a_job_says_whose_it_is_and_none_shows_a_secret",
        put("actors.failure_text.mask_text", str),
    ),
    "masking of names and keys": Guard(
        "no answer shows a secret in a name of a queue or task or in a key",
        "tests/web/test_secrets.py::test_a_jobs_names_and_keys_are_masked_wherever_they_are_shown",
        put("jobs.secrets.record_masks.mask_of", lambda _kind: lambda record: record),
    ),
    "row lock in a request to a process": Guard(
        "a call during the last write of a run finds a job that runs it",
        f"{PROCESSES}/test_process_races.py::test_a_call_beside_the_last_word_of_a_run_finds_a_job_that_runs_it",
        edit_schema(
            "p.removed_at IS NULL FOR NO KEY UPDATE;\n    IF FOUND THEN\n      verdict := CASE",
            "p.removed_at IS NULL;\n    IF FOUND THEN\n      verdict := CASE",
        ),
    ),
    "skipping locked rows in a request to many processes": Guard(
        "callers do not wait for a locked process of other callers",
        f"{PROCESSES}/test_asker.py::test_a_call_of_a_locked_process_waits_only_with_others_of_that_process",
        edit_schema(
            "p.key = ANY (v_called) ORDER BY p.key FOR NO KEY UPDATE SKIP LOCKED",
            "p.key = ANY (v_called) ORDER BY p.key FOR NO KEY UPDATE",
        ),
    ),
    "row lock in the beginning of a step": Guard(
        "a step begins with the earlier call, not with the timer",
        f"{PROCESSES}/test_process_races.py::test_a_begin_beside_a_call_waits_for_it_and_gives_it_before_the_timer",
        edit_schema(
            "ORDER BY p.key FOR NO KEY UPDATE SKIP LOCKED) AS l;\n  IF v_sinks THEN  -- those",
            "ORDER BY p.key) AS l;\n  IF v_sinks THEN  -- those",
        ),
    ),
    "fence in the commit of a step": Guard(
        "a step whose wake-up job belongs to another run writes nothing",
        f"{PROCESSES}/test_process_races.py::test_a_run_whose_job_is_anothers_neither_begins_nor_commits",
        edit_schema("WHERE (j.token = a.token) IS TRUE\n    FOR NO KEY", "WHERE true\n    FOR NO KEY"),
    ),
    "mark of the running step": Guard(
        "a step that is sent twice is written once",
        f"{PROCESSES}/test_process_races.py::test_a_commit_that_is_sent_again_is_void_and_a_begin_tells_how_it_goes_on",
        edit_schema("AND (p.running_task = a.task AND p.running_token = a.token) IS TRUE", ""),
    ),
    "token of the mark": Guard(
        "a step that has lost its worker is detected",
        f"{PROCESSES}/test_steps.py::test_a_step_that_lost_its_worker_is_a_zombie_or_is_run_again_as_often_as_allowed",
        edit_schema("p.running_token <> a.token AS crashed", "false AS crashed"),
    ),
    "oldest call first": Guard(
        "calls of a process run in the order of arrival",
        f"{PROCESSES}/test_steps.py::test_calls_go_before_a_timer_that_is_due_and_the_oldest_first",
        edit_schema("ORDER BY t.key, t.task_id LIMIT 1", "ORDER BY t.task_id DESC LIMIT 1"),
    ),
    "hash of a request to a process": Guard(
        "an idempotency key identifies one request only",
        f"{PROCESSES}/test_steps.py::test_a_key_stands_for_one_request_and_another_one_is_a_conflict",
        edit_schema("CASE WHEN v_known.request_hash = p_hash THEN 'again' ELSE 'conflict' END", "'again'"),
    ),
    "rollback of a request whose key is taken": Guard(
        "a request that has lost its key leaves no process behind",
        f"{PROCESSES}/test_process_races.py::test_one_key_sent_twice_at_once_stands_for_the_request_that_came_first",
        edit_schema("IF v_made THEN  -- for", "IF false THEN  -- for"),
    ),
    "no next step after a stop": Guard(
        "a stop does not affect the step after the one that it was for",
        f"{PROCESSES}/test_process_races.py::test_a_stop_beside_the_end_of_its_step_does_not_stop_the_next_one",
        edit_schema("AND (s.job_id = ANY (v_stopped)) IS NOT TRUE", ""),
    ),
    "row lock in a withdrawal": Guard(
        "a call that has begun is not reported as withdrawn",
        f"{PROCESSES}/test_process_races.py::test_a_call_is_not_taken_back_beside_its_beginning",
        edit_schema("ORDER BY p.key FOR NO KEY UPDATE) AS l;", "ORDER BY p.key) AS l;"),
    ),
    "outage that is no outcome of a step": Guard(
        "a database outage within a step does not put its process in error",
        f"{STEP_OUTAGES}::test_an_outage_within_a_steps_transaction_runs_the_step_again_with_its_key",
        put("flows.processes.step_call.is_outage", _never),
    ),
    "check of a step's COMMIT without an answer": Guard(
        "a step whose COMMIT succeeded without an answer does not run again",
        f"{STEP_OUTAGES}::test_a_commit_without_an_answer_that_happened_is_not_done_again",
        put("flows.processes.driver._Drive._step", _step_until_it_ends),
    ),
    "end of a step that is written after its lease": Guard(
        "an outage that outlasts a step's lease does not put its process in error",
        f"{STEP_OUTAGES}::test_an_outage_that_outlasts_the_lease_puts_no_process_in_error",
        put("actors.runner._write_late", _nothing_async),
    ),
    "probe of an unclear error": Guard(
        "a server that accepts no writes is an outage, whatever the code of its error",
        "tests/store/connection/test_error_meanings.py::test_a_probe_distinguishes_a_limit_of_a_value_from_one_of_the_server",
        put("store.connection.bridge.Crossing.is_served", _yes),
    ),
    "limit of outages while the database serves": Guard(
        "an outage of another queue does not repeat a step without end",
        f"{STEP_OUTAGES}::test_an_outage_of_another_queue_becomes_the_steps_own_error",
        put("jobs.outages.Outages.may_repeat", _yes),
    ),
    "outages that are not counted": Guard(
        "an outage of the queue's own database is no failed delivery",
        f"{STEP_OUTAGES}::test_an_outage_that_a_sinks_handler_meets_is_no_failed_delivery",
        put("jobs.outages.Outages.may_repeat", _no),
    ),
    "probe of an outage that a statement can cause": Guard(
        "an error of a step's own statement is the step's error, even with the code of an outage",
        f"{STEP_OUTAGES}::test_an_error_in_the_steps_own_sql_is_the_steps_error",
        put("store.queue.transaction.can_be_raised", _never),
    ),
    "bug of all schedules": Guard(
        "a bug that stops all schedules pauses none of them",
        "tests/store/schedules/test_tick.py::test_a_bug_that_concerns_all_schedules_pauses_none_and_their_times_wait",
        put("store.schedules.tick.is_bug", _never),
    ),
    "bug of one schedule": Guard(
        "a bug of one schedule pauses it, and the others add their jobs",
        "tests/store/schedules/test_tick.py::test_a_bug_of_one_schedule_alone_pauses_it_when_others_add_their_jobs",
        put("store.schedules.tick.is_temporary", _always),
    ),
    "deadline of a child": Guard(
        "a handler in a child process dies before its lease ends",
        f"{ACTORS}/test_children.py::test_a_lease_that_is_not_renewed_ends_the_body_before_it_is_over",
        put("actors.lease.Lease.body_is_killed", _never_killed),
    ),
    "deadline beside a Dask worker": Guard(
        "a handler beside a Dask worker dies before its lease ends",
        f"{FAULTS}/test_dask_losses.py::test_a_dask_handler_whose_service_is_cut_off_dies_before_its_job_runs_again",
        put("actors.cluster.talk.FarClock.there", _much_later),
    ),
    "kernel's timer of a child": Guard(
        "a child dies in time even if its guard is suspended",
        f"{ACTORS}/test_children.py::test_a_body_whose_guard_is_stopped_dies_before_its_lease_is_over_too",
        edit_guard("self._last.set(float(last))", "pass"),
    ),
    "death signal of a child": Guard(
        "a child dies with its guard",
        f"{FAULTS}/test_children.py::test_a_handler_whose_service_and_guard_are_suspended_dies_before_its_lease_ends",
        edit_guard("_check_errno(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))", "pass"),
    ),
    "kill of all child processes": Guard(
        "processes that a function has started die with it, in whatever session",
        f"{ACTORS}/test_children.py::test_processes_left_by_a_handler_are_killed_before_its_end_is_recorded",
        edit_guard(
            "for pid in _children_of(os.getpid()):",
            "if self._status is not None:\n                    break\n                for pid in ():",
        ),
    ),
    "check for processes left by a function": Guard(
        "processes of a function do not outlive its job in a reused child",
        f"{ACTORS}/test_children.py::test_processes_left_by_a_handler_are_killed_before_its_end_is_recorded",
        put("actors.children.process_bounds._leaves_processes", _never),
    ),
    "check for threads left by a function": Guard(
        "output of a left thread does not reach the next job's log",
        f"{ACTORS}/test_children.py::test_a_thread_that_a_function_leaves_behind_prints_nothing_to_the_next_jobs_log",
        put("actors.children.process_bounds._leaves_threads", _never),
    ),
    "search for processes left by a killed guard": Guard(
        "processes that a function has started die even if its guard was killed",
        f"{ACTORS}/test_children.py::test_a_guard_or_body_that_is_killed_leaves_nothing_and_fails_the_attempt",
        put("actors.children.child.kill_left_behind", _nothing),
    ),
    "end of a child with its service": Guard(
        "no handler outlives a service that was killed",
        f"{FAULTS}/test_children.py::test_handlers_of_a_killed_service_die_immediately",
        edit_guard(
            "        _kill_group(self._body, signal.SIGKILL)\n", '        cause == "parent" and time.sleep(3600)\n'
        ),
    ),
    "share of the pool for reads over HTTP": Guard(
        "slow reads leave a connection to enqueueing and the actors",
        "tests/web/test_fair_reads.py::test_reads_that_wait_for_the_database_leave_a_connection_to_the_queue",
        put("store.connection.read_share.ReadShare.run", _runs_in_the_pool),
    ),
    "share of one caller in the reads": Guard(
        "slow reads of one API token leave connections to others",
        "tests/store/connection/test_read_share.py::test_slow_reads_of_a_caller_leave_half_of_the_share_to_others",
        put("store.connection.read_share.FairPlaces", _for_one_caller),
    ),
    "slots of whole pages": Guard(
        "many page requests of one visitor delay neither others nor the queue",
        "tests/web/test_fair_reads.py::test_pages_wait_for_the_places_of_their_visitor_and_acts_and_files_do_not",
        put("web.pages.page_server._place_to_render", _place_without_a_wait),
    ),
    "storable record of a failure": Guard(
        "a failure is recorded whatever its text",
        "tests/store/etl/test_failure_rows.py::test_a_failure_with_any_text_is_recorded",
        put("store.etl.failure_rows.storable_text", _as_it_is),
    ),
    "note in place of a refused failure": Guard(
        "a failure that the database refuses does not end the run",
        "tests/store/etl/test_failure_rows.py::test_a_refused_failure_becomes_a_note_and_its_segment_commits",
        put("store.etl.failure_rows.meaning_of_error", _nothing),
    ),
    "search for a refused line": Guard(
        "a refused log line or progress does not lose those of other jobs",
        f"{ACTORS}/test_hostile_handlers.py::test_a_refused_line_or_progress_does_not_affect_other_jobs",
        put("actors.recorder.Recorder._by_halves", _all_or_nothing),
    ),
    "holder of a load": Guard(
        "only one run of a load begins at a time, whatever its key",
        "tests/store/etl/test_load_holders.py::test_a_second_run_of_a_load_does_not_begin_and_leaves_no_record",
        edit("store.etl.load_holders._RUNS", "IS TRUE", "IS NULL"),
    ),
    "holder in the commit of a segment": Guard(
        "a run of a load that another run holds commits nothing",
        "tests/store/etl/test_load_holders.py::test_a_run_whose_load_another_one_holds_commits_nothing",
        edit("store.etl.load_holders._FENCE", "h.run_id = j.job_id AND h.token = j.token", "true"),
    ),
    "row lock in the commit of a segment": Guard(
        "a load is not free before a commit in progress has ended",
        "tests/store/etl/test_load_holders.py::test_a_load_is_not_free_before_a_commit_under_way_has_ended",
        edit("store.etl.load_holders._FENCE", "FOR NO KEY UPDATE OF j FOR SHARE OF h", ""),
    ),
    "ledger row of a segment": Guard(
        "a commit that is repeated because its answer was lost merges nothing again",
        "tests/flows/etl/test_lost_commits.py::test_a_commit_whose_answer_was_lost_counts_once",
        edit("store.etl.segment_commit._LEDGER", "DO NOTHING", "(run_id, task, segment) DO UPDATE SET counts = $4"),
    ),
    "end of a stopped commit": Guard(
        "a worker that stops in the middle of a commit does not hold its segment for long",
        "tests/store/etl/test_segment_commit.py::test_the_server_ends_the_transaction_of_a_stopped_worker",
        put("store.etl.segment_commit._END_IDLE", "SELECT {0}"),
    ),
    "end of a function's rows": Guard(
        "a run whose rows are committed does not load them again when its job runs again",
        "tests/flows/etl/test_rows.py::test_a_job_that_runs_again_after_its_load_was_committed_doubles_no_row",
        put("flows.etl.run.load_run.has_last_segment", _never),
    ),
    "end of a function's requests": Guard(
        "a function in a thread sends no request after its run",
        "tests/flows/etl/test_rows.py::test_a_function_in_a_thread_sends_no_request_after_its_run",
        put("flows.etl.rows.row_reading._Call.end", _nothing),
    ),
    "failures of a dropped segment of rows": Guard(
        "a refused row counts once if its function is called again",
        "tests/flows/etl/test_rows.py::test_refused_rows_of_a_failed_call_are_not_counted",
        put("flows.etl.run.load_progress.LoadProgress.take_back_failures", _nothing),
    ),
    "all rows in each run that deletes": Guard(
        "a run that continues at a checkpoint does not mark the other rows as deleted",
        "tests/flows/etl/test_rows.py::test_a_checkpoint_of_a_load_that_deletes_missing_rows_is_refused",
        put("flows.etl.rows.row_reading.RowReading._no_checkpoints", None),
    ),
    "stop after a refused segment of rows": Guard(
        "rows after a refused segment of a table without a key are not duplicated by the next run",
        "tests/flows/etl/test_rows.py::test_without_a_key_no_rows_follow_a_refused_segment",
        put("flows.etl.rows.row_reading.is_committed", _true),
    ),
    "kill of a load's process": Guard(
        "processes of a load end when it is stopped",
        "tests/flows/etl/test_processes.py::test_a_stop_kills_running_transforms_and_their_child_processes",
        put("actors.children.child.Child.end", _nothing_async),
    ),
}


def take_out(name: str) -> None:
    """Take a guard out of this process, and of the services that it starts."""
    os.environ[VARIABLE] = name
    GUARDS[name].take_out()


def take_out_what_is_named() -> None:
    """Take out the same guard in a service as in the test that started it."""
    if name := os.environ.get(VARIABLE):
        GUARDS[name].take_out()
