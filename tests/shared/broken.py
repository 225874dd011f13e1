"""Builds with a guard taken out, which its test must notice: `pytest --without GUARD TEST`.

A test that can't fail proves nothing. Each guard of the protocol has an entry here: how it is taken out of the running
program (the product has no such switches), and the test that must then fail. tests/faults/test_broken_builds.py tries
them all; docs/guarantees.md shows the table. In a service under test the guard named by the environment is taken out.
"""

from __future__ import annotations

import importlib
import math
import os
import pkgutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import attrs
import trio

from dataloader.store.migrations import function_set
from dataloader.store.queue.make_ready import Judged

VARIABLE = "WITHOUT_GUARD"


@attrs.frozen
class Guard:
    """What it does, how it is taken out, and its test."""

    does: str
    test: str
    take_out: Callable[[], None]


def edit(place: str, old: str, new: str) -> Callable[[], None]:
    """Replaces text in a constant, such as a statement; `place` is its name without `dataloader.`."""

    def take_out() -> None:
        module, name = _place(place)
        text = getattr(module, name)
        assert old in text, f"{place} has no {old!r} any more"
        setattr(module, name, text.replace(old, new))

    return take_out


def put(place: str, value: object) -> Callable[[], None]:
    """Puts another value, or another function, in a module's or a class's place."""

    def take_out() -> None:
        owner, name = _place(place)
        assert hasattr(owner, name), f"there is no {place} any more"
        setattr(owner, name, value)

    return take_out


def edit_schema(old: str, new: str) -> Callable[[], None]:
    """Replaces text in the functions of the schema."""

    def take_out() -> None:
        whole = function_set.source()
        assert old in whole, f"no function has {old!r} any more"
        function_set.source = lambda: whole.replace(old, new)

    return take_out


def _place(place: str) -> tuple[object, str]:
    owner, _, name = f"dataloader.{place}".rpartition(".")
    return pkgutil.resolve_name(owner), name


def edit_guard(old: str, new: str) -> Callable[[], None]:
    """Replaces text in the program that guards the bodies in child processes: children that start later get a copy."""

    def take_out() -> None:
        child = importlib.import_module("dataloader.actors.children.child")
        whole = Path(child.__file__).with_name("guard.py").read_text()
        assert old in whole, f"the guard has no {old!r} any more"
        with tempfile.NamedTemporaryFile("w", prefix="guard", suffix=".py", delete=False) as file:
            file.write(whole.replace(old, new))
        child.GUARD = file.name

    return take_out


def _nothing(*_args: object, **_more: object) -> None:
    """In the place of a function that guards."""


async def _nothing_async(*_args: object, **_more: object) -> None:
    """In the place of an async one."""


async def _none_of_them(*_args: object, **_more: object) -> dict[int, object]:
    """In the place of one that tells what it did."""
    return {}


def _ends_without_lease(lease, **given) -> tuple[float, object]:
    return BODY_ENDS(attrs.evolve(lease, until=math.inf), **given)


def _ends_without_key(lease, **given) -> tuple[float, object]:
    return BODY_ENDS(attrs.evolve(lease, key_safe_until=math.inf), **given)


def _ends_without_period(lease, **given) -> tuple[float, object]:
    return BODY_ENDS(attrs.evolve(lease, period_ends_at=math.inf), **given)


def _never_killed(_lease) -> tuple[float, float]:
    return math.inf, math.inf


def _much_later(_clock, at: float) -> float:
    return at + 100_000


def _never(*_args: object) -> bool:
    """In the place of one that asks whether something may happen."""
    return False


async def _none_judged(*_args: object, **_named: object) -> Judged:
    """In the place of one that judges jobs."""
    return Judged(0, more=False)


async def _yes(*_args: object) -> bool:
    """In the place of one that looks."""
    return True


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


def _reserves_at_any_time(dispatcher) -> bool:
    if dispatcher.running >= dispatcher.concurrency:
        return False
    dispatcher.running += 1
    dispatcher.reserved += 1
    return True


BODY_ENDS = importlib.import_module("dataloader.actors.lease").Lease.body_ends
STORE, ACTORS, FAULTS = "tests/store/queue", "tests/actors", "tests/faults"
PROCESSES = "tests/store/processes"

GUARDS = {
    "token in the finish": Guard(
        "a late outcome is void",
        f"{STORE}/test_finish.py::test_an_outcome_with_an_old_token_changes_nothing",
        edit("store.queue.finish._FINISH", "j.token = e.token AND ", ""),
    ),
    "token in the finish of a transaction": Guard(
        "rows that a late run has written go with its outcome",
        f"{STORE}/test_transaction.py::test_a_job_that_is_not_ours_any_more_has_its_rows_undone",
        edit("store.queue.finish._FINISH_PATIENTLY", "j.token = e.token AND ", ""),
    ),
    "token in the progress": Guard(
        "late progress is void",
        f"{STORE}/test_finish.py::test_progress_and_lines_with_an_old_token_change_nothing",
        edit("store.queue.finish._PROGRESS", "j.token = p.token AND ", ""),
    ),
    "token in the log": Guard(
        "late log lines are void",
        f"{STORE}/test_finish.py::test_progress_and_lines_with_an_old_token_change_nothing",
        edit("store.queue.finish._LOG", "j.token = l.token AND ", ""),
    ),
    "token in the heartbeat": Guard(
        "a run whose job is another's loses its lease",
        f"{STORE}/test_leases.py::test_a_job_that_is_not_ours_any_more_is_lost",
        edit("store.queue.leases._BEAT", "j.token = m.token AND ", ""),
    ),
    "memory of what was written": Guard(
        "an outcome that is sent twice is not taken for another's",
        f"{STORE}/test_finish.py::test_a_batch_that_is_sent_again_changes_nothing_and_is_not_void",
        edit("store.queue.finish._REST", "(j.status = 'succeeded') = (e.step = 'succeed')", "false"),
    ),
    "passing over locked rows in the finish": Guard(
        "a row that somebody has locked holds up no other outcome",
        f"{STORE}/test_finish.py::test_a_row_that_is_locked_holds_up_no_other_and_is_written_by_a_later_try",
        edit("store.queue.finish._FINISH", "SKIP LOCKED", ""),
    ),
    "passing over locked rows in the progress": Guard(
        "a row that somebody has locked holds up no other progress, and no outcome",
        f"{ACTORS}/test_outcomes.py::test_a_row_that_somebody_has_locked_holds_up_no_other_jobs_outcome",
        edit("store.queue.finish._PROGRESS", "SKIP LOCKED", ""),
    ),
    "passing over locked rows in the log": Guard(
        "a row that somebody has locked holds up no other lines, and no outcome",
        f"{ACTORS}/test_outcomes.py::test_a_row_that_somebody_has_locked_holds_up_no_other_jobs_outcome",
        edit("store.queue.finish._LOG", "SKIP LOCKED", ""),
    ),
    "cancel request in the finish": Guard(
        "a job that is to be canceled does not go back to the queue",
        f"{STORE}/test_finish.py::test_a_job_that_is_to_be_canceled_never_goes_back_to_the_queue",
        edit("store.queue.finish._FINISH", "WHEN j.cancel_requested THEN", "WHEN false THEN"),
    ),
    "refund of the attempt": Guard(
        "a job that a drain stopped has its attempt back",
        f"{ACTORS}/test_drain.py::test_what_the_deadline_stops_goes_back_with_its_attempt_refunded",
        edit("store.queue.finish._FINISH", "greatest(j.attempt - 1, 0)", "j.attempt"),
    ),
    "lease as the scope's deadline": Guard(
        "a body ends before its lease can go to another",
        f"{ACTORS}/test_leases.py::test_a_body_ends_before_its_lease_though_its_key_is_safe",
        put("actors.lease.Lease.body_ends", _ends_without_lease),
    ),
    "key as the scope's deadline": Guard(
        "a body ends before the server could give its key away",
        f"{ACTORS}/test_lock_keys.py::test_a_body_ends_before_its_key_though_its_lease_is_held",
        put("actors.lease.Lease.body_ends", _ends_without_key),
    ),
    "close of a period as the scope's deadline": Guard(
        "a run whose task stops it at the close of its work period does not go on",
        f"{ACTORS}/test_period_ends.py::test_a_run_is_stopped_its_margin_before_the_close_and_one_of_the_next_night_by_the_next_close",
        put("actors.lease.Lease.body_ends", _ends_without_period),
    ),
    "bound of a commit": Guard(
        "a commit that waits is given up before the lease can go to another",
        f"{ACTORS}/test_silence.py::test_a_commit_that_waits_is_given_up_before_the_lease_ends_and_leaves_nothing_waiting",
        put("actors.lease.Lease.commit_ends", lambda _lease: math.inf),
    ),
    "expired leases stay expired": Guard(
        "no heartbeat renews a lease that has ended",
        f"{STORE}/test_leases.py::test_an_expired_lease_is_never_renewed",
        edit("store.queue.leases._BEAT", " AND (j.lease_expires_at > now()) IS TRUE", ""),
    ),
    "advisory lock in the claim": Guard(
        "a key that is held elsewhere is not claimed",
        f"{STORE}/test_claim.py::test_a_key_held_elsewhere_parks_the_job_without_an_attempt",
        edit_schema("WHEN pg_try_advisory_lock(h) THEN 'run'", "WHEN pg_try_advisory_lock(h) OR true THEN 'run'"),
    ),
    "lock of a lane": Guard(
        "claims at once start no more jobs of a task than it allows",
        "tests/store/limits/test_limits_sql.py::test_two_claims_at_once_start_no_more_than_a_lane_allows",
        edit_schema("WHERE l.lane = v_task.name FOR NO KEY UPDATE SKIP LOCKED", "WHERE l.lane = v_task.name"),
    ),
    "turns of partitions": Guard(
        "a partition with most of the jobs has no more turns than another",
        "tests/store/limits/test_partitions.py::test_keys_that_wait_have_their_turns_however_many_jobs_one_has_and_whenever_they_came",
        edit_schema("SET last_partition = v_turn", "SET last_partition = NULL"),
    ),
    "lock of a supplier": Guard(
        "claims at once start no more jobs than a supplier's budget has",
        "tests/store/limits/test_limits_sql.py::test_two_claims_at_once_take_no_more_than_a_budget_has",
        edit_schema(
            "WHERE s.source = v_task.supplier FOR NO KEY UPDATE SKIP LOCKED", "WHERE s.source = v_task.supplier"
        ),
    ),
    "margin of a supplier": Guard(
        "a body that would begin later than its supplier's budget counts it goes back",
        "tests/actors/test_limits.py::test_a_body_that_would_begin_later_than_it_was_counted_goes_back",
        put("actors.dispatcher.BEGIN_SHARE", math.inf),
    ),
    "margin before midnight": Guard(
        "a start that might begin after midnight is counted by the day in which it begins",
        "tests/store/limits/test_day_budgets.py::test_a_loads_request_counts_in_the_day_and_what_costs_nothing_may_start_before_midnight",
        edit_schema("p_cost > 0 AND p_now + make_interval(secs => p_source.margin_s) >= v_midnight", "false"),
    ),
    "live lease in the claim": Guard(
        "a key whose holder lost its session, not its lease, is not claimed",
        f"{STORE}/test_claim.py::test_a_live_lease_blocks_its_key_when_the_lock_is_gone",
        edit_schema("IF v_live IS NOT NULL THEN", "IF false THEN"),
    ),
    "second look at a parked key": Guard(
        "a job that was parked while its key came free is woken",
        f"{ACTORS}/test_keys.py::test_a_job_that_was_parked_while_its_key_came_free_is_looked_at_again",
        put("actors.dispatcher.Dispatcher._test", _nothing_async),
    ),
    "wake-up at the release": Guard(
        "the end of a job wakes the next of its key",
        f"{STORE}/test_release_and_park.py::test_a_parked_job_starts_when_the_holder_ends",
        edit_schema("RETURN {schema}.dl_ready_next(p_hashes);", "RETURN 0;"),
    ),
    "repair of rows after a lost reply": Guard(
        "a job whose claim nobody heard of goes back",
        f"{STORE}/test_claim.py::test_a_claim_whose_reply_was_lost_goes_back_with_its_attempt",
        edit("store.queue.lock_session._GIVE_BACK", "WHERE status = 'running' AND", "WHERE false AND"),
    ),
    "repair passes over what is just being added": Guard(
        "a job that starts as it is added is not given back before the answer has come",
        f"{ACTORS}/test_direct_start.py::test_a_job_that_is_just_being_added_is_not_given_back_by_a_repair",
        edit("store.queue.lock_session._GIVE_BACK", "job_id <> ALL ($3::uuid[])", "$3::uuid[] IS NOT NULL"),
    ),
    "no start beside a repair": Guard(
        "no job starts as it is added while a repair is under way that does not know of it",
        f"{STORE}/test_lock_session.py::"
        "test_no_job_is_expected_while_a_repair_may_be_under_way_that_does_not_know_of_it",
        put("store.queue.lock_session.LockSession.expect", _expects),
    ),
    "repair of an addition without an answer": Guard(
        "a job that was added as ours, and nobody heard of it, goes back",
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
    "repair of locks after a lost reply": Guard(
        "a key that a failed claim has locked comes free",
        f"{STORE}/test_claim.py::test_surplus_locks_of_a_failed_claim_are_unlocked_and_parked_jobs_of_their_keys_wake",
        edit("store.queue.lock_session._HELD", "WHERE locktype", "WHERE false AND locktype"),
    ),
    "end of the ghost": Guard(
        "a former lock session behind a dead network does not keep our keys",
        f"{STORE}/test_lock_session.py::test_a_ghost_of_the_former_session_is_ended_and_does_not_keep_our_keys",
        edit("store.queue.lock_session._END_GHOST", "SELECT pg_terminate_backend(pid, 2000)", "SELECT true"),
    ),
    "silence ends the lock session": Guard(
        "a worker that is cut off loses its keys before its leases",
        f"{STORE}/test_lock_session.py::test_the_server_ends_a_session_that_is_silent_for_less_than_the_lease",
        put("store.queue.lock_session._PING", "SELECT $1::text IS NOT NULL"),
    ),
    "a claim that waits is no silence": Guard(
        "a locked table stops no job whose own lease holds",
        f"{ACTORS}/test_silence.py::test_a_claim_that_waits_for_a_table_stops_no_job_whose_own_lease_holds",
        put("store.queue.lock_session.LockSession.watch", _watch_sees_nothing),
    ),
    "only an answer keeps the keys": Guard(
        "bodies stop before their keys are free, also when the network goes while a claim waits",
        f"{ACTORS}/test_silence.py::"
        "test_a_network_that_goes_while_a_claim_waits_for_a_table_stops_the_bodies_before_their_keys_are_free",
        put("store.queue.lock_session.LockSession.watch", _watch_is_content),
    ),
    "end of a dead lock connection": Guard(
        "a claim whose request or answer is lost costs no job its key",
        f"{ACTORS}/test_silence.py::test_a_claim_that_the_network_has_swallowed_is_given_up_before_the_bodies_must_stop",
        put("store.connection.bridge.Session.drop", _nothing_async),
    ),
    "look after a unique job went in": Guard(
        "an older update that finds its key free does not run after a newer one",
        f"{STORE}/test_unique.py::test_an_older_one_that_finds_the_key_free_looks_for_a_newer_that_has_ended",
        edit_schema("j.version >= p_version AND j.job_id <> p_job_id", "false"),
    ),
    "lock of the job that stands for a request": Guard(
        "it does not start before the request's transaction has committed",
        f"{STORE}/test_unique.py::test_a_job_that_stands_for_a_request_does_not_start_before_that_is_committed",
        edit_schema("AND j.superseded_by IS NULL FOR NO KEY UPDATE;", "AND j.superseded_by IS NULL;"),
    ),
    "unique key as lock_key": Guard(
        "the newer job of a unique key starts when the older one has ended",
        f"{STORE}/test_unique.py::test_a_job_that_waits_stands_for_the_request_and_one_is_added_while_it_runs",
        edit_schema("p_task, p_args) END, v_key);", "p_task, p_args) END, p_job_id::text);"),
    ),
    "end of a superseded job": Guard(
        "a superseded job does not run again, whoever queues it",
        f"{STORE}/test_unique.py::test_a_run_that_is_superseded_does_not_run_again_and_the_newer_one_does",
        edit_schema("'UPDATE' AND NEW.superseded_by IS NOT NULL AND", "'UPDATE' AND false AND"),
    ),
    "unique key of a job that comes back": Guard(
        "nobody's UPDATE fails because a newer job has the place of an ended one",
        f"{STORE}/test_unique.py::test_nobodys_update_fails_and_a_retry_of_ours_is_refused_while_the_place_is_taken",
        edit_schema("    NEW.unique_key := NULL;\n", ""),
    ),
    "mark on who is waited for": Guard(
        "an ending and the look at the job that ends never miss each other",
        f"{STORE}/test_after.py::test_an_ending_and_the_job_that_waits_for_it_never_miss_each_other",
        edit_schema(
            "UPDATE {schema}.dl_jobs p SET awaited = true WHERE p.job_id = ANY (v_open) AND NOT p.awaited;", ""
        ),
    ),
    "look at all that came before": Guard(
        "a job does not run before a predecessor that was retried",
        f"{STORE}/test_after.py::test_one_that_is_retried_before_the_others_end_counts_by_what_it_comes_to",
        edit_schema("(array_agg(a.after_id) FILTER (WHERE p.status IN ('queued', 'running')))[1]", "NULL::uuid"),
    ),
    "stager below the notifications of endings": Guard(
        "a job whose predecessors have ended runs, though nobody has heard of it",
        f"{ACTORS}/test_graphs.py::test_a_graph_runs_to_its_end_and_its_handlers_get_what_came_before",
        put("actors.stager.ready_after", _none_judged),
    ),
    "count of crashes": Guard(
        "a job that kills its worker each time is lost in the end",
        f"{STORE}/test_leases.py::test_a_job_that_kills_its_worker_each_time_is_lost_though_its_attempts_are_given_back",
        edit("store.queue.leases._REAP", " OR j.crashes + 1 >= j.max_attempts", ""),
    ),
    "second look after a jump of the clock": Guard(
        "a database clock that jumps does not take all jobs from their workers",
        f"{STORE}/test_leases.py::test_after_a_jump_of_the_databases_clock_the_reaper_looks_twice",
        put("actors.reaper.JUMP_S", math.inf),
    ),
    "renewal after a jump of the clock": Guard(
        "live workers keep their jobs when the database's clock jumps",
        f"{FAULTS}/test_time.py::test_f32_live_workers_keep_their_jobs_when_the_databases_clock_jumps",
        put("actors.heartbeat.Heartbeat._revive", _none_of_them),
    ),
    "bound of the drain": Guard(
        "a thread that never returns does not hold up the exit",
        f"{FAULTS}/test_signals.py::test_a_thread_that_never_returns_is_named_and_left_behind",
        put("supervisor.drain.BOUND_S", 3_600.0),
    ),
    "doubt at the exit": Guard(
        "a process does not leave with 0 while a claim's reply is lost",
        f"{FAULTS}/test_signals.py::test_f10_what_a_claim_brought_whose_reply_was_lost_goes_back_or_the_exit_code_tells",
        put("store.queue.lock_session.LockSession.settled", value=True),
    ),
    "end of a process that can't stop a run": Guard(
        "a handler that does not stop is ended with its process when its lease is gone",
        f"{FAULTS}/test_stalls.py::test_f08_f29_a_process_whose_handler_does_not_stop_has_ended_before_another_runs_the_job",
        put("supervisor.serve._leave_unstoppable", _nothing),
    ),
    "bound of a log line's wait": Guard(
        "a log that nobody reads does not hold up a drain",
        f"{FAULTS}/test_signals.py::test_f12_a_log_that_nobody_reads_holds_up_no_drain",
        put("supervisor.log_stream._may_block", _never),
    ),
    "bound of the last word": Guard(
        "a log that nobody reads does not hold up the exit",
        f"{FAULTS}/test_signals.py::test_f12_a_log_that_nobody_reads_does_not_keep_the_process_from_ending",
        put("supervisor.total_deadline.LAST_WORD_S", 3_600.0),
    ),
    "bound of notifications": Guard(
        "a flood of notifications ends the listening, not the leases",
        f"{ACTORS}/test_cancel.py::test_a_flood_of_notifications_costs_their_latency_and_no_lease",
        put("store.queue.notifications.FLOOD", math.inf),
    ),
    "look at the locks": Guard(
        "no process starts where an advisory lock is not a session's own",
        "tests/supervisor/test_server_check.py::test_a_server_whose_locks_always_succeed_is_refused",
        put("store.connection.server_check._aio_excludes", _yes),
    ),
    "masking of secrets": Guard(
        "no line, error or event shows a password",
        "tests/system/test_serving.py::test_every_line_of_a_job_says_whose_it_is_and_none_shows_a_secret",
        put("actors.failure_text.mask_text", str),
    ),
    "masking of names and keys": Guard(
        "no answer shows a secret that stands in a queue's or task's name or in a key",
        "tests/web/test_secrets.py::test_a_jobs_names_and_keys_are_masked_wherever_they_are_shown",
        put("web.shown.mask_text", str),
    ),
    "row lock in a request to a process": Guard(
        "a call beside the last word of a run finds a job that runs it",
        f"{PROCESSES}/test_process_races.py::test_a_call_beside_the_last_word_of_a_run_finds_a_job_that_runs_it",
        edit_schema(
            "p.removed_at IS NULL FOR NO KEY UPDATE;\n    IF FOUND THEN\n      verdict := CASE",
            "p.removed_at IS NULL;\n    IF FOUND THEN\n      verdict := CASE",
        ),
    ),
    "passing over locked rows in a request to many processes": Guard(
        "nobody waits with others for a process that somebody has locked",
        f"{PROCESSES}/test_asker.py::test_who_calls_a_locked_process_waits_with_its_other_callers_and_with_nobody_else",
        edit_schema(
            "p.key = ANY (v_called) ORDER BY p.key FOR NO KEY UPDATE SKIP LOCKED",
            "p.key = ANY (v_called) ORDER BY p.key FOR NO KEY UPDATE",
        ),
    ),
    "row lock in the begin of a step": Guard(
        "a step begins with what was asked for before, not with the timer",
        f"{PROCESSES}/test_process_races.py::test_a_begin_beside_a_call_waits_for_it_and_gives_it_before_the_timer",
        edit_schema("ORDER BY p.key FOR NO KEY UPDATE SKIP LOCKED) AS l;\n\n", "ORDER BY p.key) AS l;\n\n"),
    ),
    "fence in the commit of a step": Guard(
        "a step whose wake-up job is another run's writes nothing",
        f"{PROCESSES}/test_process_races.py::test_a_run_whose_job_is_anothers_neither_begins_nor_commits",
        edit_schema("WHERE j.token = a.token\n    FOR NO KEY", "WHERE true\n    FOR NO KEY"),
    ),
    "mark of the step that runs": Guard(
        "a step that is sent twice is written once",
        f"{PROCESSES}/test_process_races.py::test_a_commit_that_is_sent_again_is_void_and_a_begin_tells_how_it_goes_on",
        edit_schema("AND p.running_task = a.task AND p.running_token = a.token", ""),
    ),
    "token of the mark": Guard(
        "a step that has lost its worker is found out",
        f"{PROCESSES}/test_steps.py::test_a_step_that_lost_its_worker_is_a_zombie_or_is_run_again_as_often_as_allowed",
        edit_schema("p.running_token <> a.token AS crashed", "false AS crashed"),
    ),
    "oldest call first": Guard(
        "calls of a process run in the order in which they came",
        f"{PROCESSES}/test_steps.py::test_calls_go_before_a_timer_that_is_due_and_the_oldest_first",
        edit_schema("ORDER BY t.key, t.task_id LIMIT 1", "ORDER BY t.task_id DESC LIMIT 1"),
    ),
    "hash of a request to a process": Guard(
        "one idempotency key does not stand for two requests",
        f"{PROCESSES}/test_steps.py::test_a_key_stands_for_one_request_and_another_one_is_a_conflict",
        edit_schema("CASE WHEN v_known.request_hash = p_hash THEN 'again' ELSE 'conflict' END", "'again'"),
    ),
    "undoing of a request whose key is another's": Guard(
        "a request that has lost its key leaves no process behind",
        f"{PROCESSES}/test_process_races.py::test_one_key_sent_twice_at_once_stands_for_the_request_that_came_first",
        edit_schema("IF v_made THEN  -- for", "IF false THEN  -- for"),
    ),
    "no going on after a stop": Guard(
        "a stop does not hit the step after the one that it was for",
        f"{PROCESSES}/test_process_races.py::test_a_stop_beside_the_end_of_its_step_does_not_stop_the_next_one",
        edit_schema("AND (s.job_id = ANY (v_stopped)) IS NOT TRUE", ""),
    ),
    "row lock in taking a call back": Guard(
        "a call that has begun is not told to have been taken back",
        f"{PROCESSES}/test_process_races.py::test_a_call_is_not_taken_back_beside_its_beginning",
        edit_schema("ORDER BY p.key FOR NO KEY UPDATE) AS l;", "ORDER BY p.key) AS l;"),
    ),
    "deadline of a child": Guard(
        "a body in a child process dies before its lease is over, whatever it and its supervisor do",
        f"{ACTORS}/test_children.py::test_a_lease_that_is_not_renewed_ends_the_body_before_it_is_over",
        put("actors.lease.Lease.body_is_killed", _never_killed),
    ),
    "deadline beside a Dask worker": Guard(
        "a body beside a Dask worker dies before its lease is over when nobody can renew it",
        f"{FAULTS}/test_dask_losses.py::test_a_body_whose_service_is_cut_off_from_the_cluster_dies_before_another_runs_its_job",
        put("actors.cluster.talk.FarClock.there", _much_later),
    ),
    "kernel's timer of a child": Guard(
        "it dies in time though the process that guards it is stopped",
        f"{ACTORS}/test_children.py::test_a_body_whose_guard_is_stopped_dies_before_its_lease_is_over_too",
        edit_guard("self._last.set(float(last))", "pass"),
    ),
    "death signal of a child": Guard(
        "it dies with its guard",
        f"{FAULTS}/test_children.py::test_a_body_whose_service_and_guard_stand_still_dies_before_its_lease_is_over",
        edit_guard("_check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))", "pass"),
    ),
    "kill of all that a child has started": Guard(
        "what a function leaves behind dies with its process, whatever session it has made for itself",
        f"{ACTORS}/test_children.py::test_processes_that_a_function_leaves_behind_are_killed_before_its_end_is_recorded",
        edit_guard(
            "for pid in _children_of(os.getpid()):",
            "if self._status is not None:\n                    break\n                for pid in ():",
        ),
    ),
    "look at what a function has left behind": Guard(
        "a function's processes do not outlive its job in a child that goes on",
        f"{ACTORS}/test_children.py::test_processes_that_a_function_leaves_behind_are_killed_before_its_end_is_recorded",
        put("actors.children.process_bounds._leaves_processes", _never),
    ),
    "look at the threads that a function has left": Guard(
        "what a thread prints that was left behind is no line of the next job's",
        f"{ACTORS}/test_children.py::test_a_thread_that_a_function_leaves_behind_prints_nothing_to_the_next_jobs_log",
        put("actors.children.process_bounds._leaves_threads", _never),
    ),
    "search for what a killed guard has left": Guard(
        "what a function has started dies though its guard was killed",
        f"{ACTORS}/test_children.py::test_a_guard_or_body_that_is_killed_leaves_nothing_and_fails_the_attempt",
        put("actors.children.child.kill_left_behind", _nothing),
    ),
    "end of a child with its service": Guard(
        "no body outlives a service that was killed",
        f"{FAULTS}/test_children.py::test_the_bodies_of_a_service_that_is_killed_die_at_once",
        edit_guard(
            "        _kill_group(self._body, signal.SIGKILL)\n", '        cause == "parent" and time.sleep(3600)\n'
        ),
    ),
    "kill of a load's process": Guard(
        "what a load's pages run in does not outlive its stop, nor does what that has started",
        "tests/flows/etl/test_processes.py::test_a_stop_kills_what_goes_on_with_all_that_it_has_started",
        put("actors.children.child.Child.end", _nothing_async),
    ),
}


def take_out(name: str) -> None:
    """Take a guard out of this process, and of the services that it starts."""
    os.environ[VARIABLE] = name
    GUARDS[name].take_out()


def take_out_what_is_named() -> None:
    """In a service: as the test that started it."""
    if name := os.environ.get(VARIABLE):
        GUARDS[name].take_out()
