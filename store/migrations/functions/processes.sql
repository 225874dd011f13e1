-- Steps of durable processes. The lock of a process's row orders all operations on it: the session that has it decides
-- by a snapshot taken after it. Lock order: process rows by key, then idempotency keys, then dl_jobs; the queue never
-- locks a process row.
-- Plans are pinned as in the claim (see claim.sql). Steps are joined with steps by a hash. They are never joined with a
-- table by a bare =, so that the only possible plan is an index lookup for each step. If a row is found by its ID, its
-- other conditions are written with IS TRUE: a plan made while the table was empty would otherwise permanently use an
-- index of those.

-- Gives the claimed wake-up jobs their work: one row for each, with its verdict.
--   step    the task to run is marked with the job's token; the other columns are filled
--   zombie  a step had lost its worker: the process is in error, and its job has ended
--   rest    nothing can run now: the job waits for the timer again, or is deleted
--   void    the job belongs to another run, or the process is gone
--   locked  another session has locked the row: try again soon
-- `ident` is the ident of the step: the key of its external effects. It is that of its task, and of each of its
-- attempts. p_crashes: how many times in a row a step that has lost its worker is run again; 0: never.
CREATE OR REPLACE FUNCTION {schema}.dl_process_begin_steps(p_keys bigint[], p_jobs uuid[], p_tokens bigint[], p_crashes int[])
RETURNS TABLE (key bigint, verdict text, type text, process_id text, version int, status text, aux_state text, metadata text,
               last_event_id bigint, corrupted_by bigint, task_id bigint, kind text, method text, args text, context text,
               attempt int, first_task bigint, ident uuid, told bigint[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_hashjoin = on SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off
AS $$
#variable_conflict use_column
DECLARE
  v_locked bigint[];
  v_sinks boolean;
BEGIN
  SELECT coalesce(array_agg(l.key), '{}'), EXISTS (SELECT FROM {schema}.dl_process_sinks) INTO v_locked, v_sinks FROM (
    SELECT p.key FROM {schema}.dl_processes p WHERE p.key = ANY (p_keys) ORDER BY p.key FOR NO KEY UPDATE SKIP LOCKED) AS l;
  IF v_sinks THEN  -- those that become zombies below
    PERFORM {schema}.dl_process_tell(array_agg(p.key), 'failed', 'zombie detected')
    FROM unnest(p_keys, p_jobs, p_tokens, p_crashes) AS a (key, job_id, token, crashes)
    JOIN {schema}.dl_processes p ON p.key = ANY (ARRAY[a.key])
    WHERE a.key = ANY (v_locked) AND p.removed_at IS NULL AND p.job_id = a.job_id AND p.running_task IS NOT NULL
      AND p.running_token <> a.token AND p.crashes >= a.crashes
      AND (SELECT j.token = a.token AND j.status = 'running' FROM {schema}.dl_jobs j WHERE j.job_id = a.job_id);
  END IF;

  RETURN QUERY
  WITH asked AS MATERIALIZED (
    SELECT * FROM unnest(p_keys, p_jobs, p_tokens, p_crashes) AS a (key, job_id, token, crashes)
  ), own AS MATERIALIZED (
    SELECT p.*, a.token, a.crashes AS crashes_allowed,
           -- Without a condition on the status, for which all running jobs would be read.
           coalesce((SELECT j.token = a.token AND j.status = 'running' FROM {schema}.dl_jobs j WHERE j.job_id = a.job_id), false)
             AND p.removed_at IS NULL AND p.job_id = a.job_id AS ours,
           p.running_task IS NOT NULL AND p.running_token <> a.token AS crashed
    FROM asked a JOIN {schema}.dl_processes p ON p.key = ANY (ARRAY[a.key])
    WHERE a.key = ANY (v_locked)
  ), expired AS (
    UPDATE {schema}.dl_process_tasks t SET status = 'cancelled', error = 'expired', finished_at = statement_timestamp()
    FROM own o CROSS JOIN LATERAL (
      SELECT w.task_id FROM {schema}.dl_process_tasks w
      WHERE w.key BETWEEN o.key AND o.key AND w.status = 'waiting' AND w.expires_at <= statement_timestamp()
        AND w.task_id IS DISTINCT FROM o.running_task
      ORDER BY w.key, w.expires_at
    ) AS late
    WHERE o.ours AND t.task_id = ANY (ARRAY[late.task_id])
    RETURNING t.task_id, t.key, t.watched
  ), picked AS MATERIALIZED (
    SELECT o.*, o.crashed AND o.crashes >= o.crashes_allowed AS dead,
           c.task_id AS call_id, c.kind AS call_kind, c.method AS call_method, c.args AS call_args, c.context AS call_context,
           c.ident AS call_ident, o.timer_at <= statement_timestamp() AS due
    FROM own o
    LEFT JOIN LATERAL (
      SELECT t.* FROM {schema}.dl_process_tasks t
      WHERE t.key BETWEEN o.key AND o.key AND t.status = 'waiting'
        AND (t.task_id = o.running_task OR t.expires_at IS NULL OR t.expires_at > statement_timestamp())
      ORDER BY t.key, t.task_id LIMIT 1
    ) AS c ON NOT (o.crashed AND o.running_task IS NOT DISTINCT FROM o.timer_task)
    WHERE o.ours
  ), work AS MATERIALIZED (
    -- A step that runs again continues with its own task: a call's row still waits, and is the oldest. A timer's task
    -- comes before calls; otherwise a timer that kills its worker each time would never be detected while there are
    -- calls.
    SELECT p.*,
           CASE WHEN dead THEN 'zombie'
                WHEN call_id IS NOT NULL AND status <> 'error' OR call_kind = 'repair' THEN 'step'
                WHEN due AND status <> 'error' OR due AND corrupted_by IS NOT NULL THEN 'step'
                ELSE 'rest' END AS v,
           CASE WHEN call_id IS NOT NULL THEN call_id ELSE timer_task END AS work_id,
           CASE WHEN call_id IS NOT NULL THEN call_kind ELSE timer_kind END AS work_kind,
           CASE WHEN call_id IS NOT NULL THEN call_ident ELSE timer_ident END AS work_ident
    FROM picked p
  ), marked AS (
    UPDATE {schema}.dl_processes p SET
      running_task = CASE w.v WHEN 'step' THEN w.work_id END,
      running_kind = CASE w.v WHEN 'step' THEN w.work_kind END,
      running_token = CASE w.v WHEN 'step' THEN w.token END,
      running_ident = CASE w.v WHEN 'step' THEN w.work_ident END,
      running_at = CASE w.v WHEN 'step' THEN statement_timestamp() END,
      crashes = CASE WHEN w.v = 'step' AND w.crashed THEN p.crashes + 1 ELSE 0 END,
      previous_status = CASE WHEN w.v = 'zombie' AND p.status <> 'error' THEN p.status ELSE p.previous_status END,
      status = CASE WHEN w.v = 'zombie' THEN 'error' ELSE p.status END,
      status_changed_at = CASE WHEN w.v = 'zombie' AND p.status <> 'error' THEN statement_timestamp() ELSE p.status_changed_at END,
      detail = CASE WHEN w.v = 'zombie' THEN 'zombie detected' ELSE p.detail END,
      error_group = CASE WHEN w.v = 'zombie' THEN hashtextextended(w.type || E'\n' || 'zombie detected', 0) ELSE p.error_group END,
      corrupted_by = CASE WHEN w.v = 'zombie' THEN w.running_task ELSE p.corrupted_by END,
      timer_task = CASE WHEN w.v <> 'zombie' THEN p.timer_task END,
      timer_kind = CASE WHEN w.v <> 'zombie' THEN p.timer_kind END,
      timer_at = CASE WHEN w.v <> 'zombie' THEN p.timer_at END,
      timer_first = CASE WHEN w.v <> 'zombie' THEN p.timer_first END,
      timer_attempt = CASE WHEN w.v <> 'zombie' THEN p.timer_attempt END,
      timer_context = CASE WHEN w.v <> 'zombie' THEN p.timer_context END,
      timer_ident = CASE WHEN w.v <> 'zombie' THEN p.timer_ident END,
      job_id = CASE WHEN w.v = 'step' OR w.v = 'rest' AND w.timer_at IS NOT NULL THEN p.job_id END
    FROM work w WHERE p.key = ANY (ARRAY[w.key])
    RETURNING p.key
  ), dead_calls AS (
    UPDATE {schema}.dl_process_tasks t SET
      status = CASE WHEN t.task_id = w.running_task THEN 'error' ELSE 'cancelled' END,
      error = CASE WHEN t.task_id = w.running_task THEN 'zombie detected' ELSE 'the process failed: zombie detected' END,
      started_at = CASE WHEN t.task_id = w.running_task THEN w.running_at END,
      finished_at = statement_timestamp()
    FROM work w CROSS JOIN LATERAL (
      SELECT o.task_id FROM {schema}.dl_process_tasks o
      WHERE o.key BETWEEN w.key AND w.key AND o.status = 'waiting'
        AND (o.task_id = w.running_task OR o.expires_at IS NULL OR o.expires_at > statement_timestamp())
      ORDER BY o.key, o.task_id
    ) AS open
    WHERE w.v = 'zombie' AND t.task_id = ANY (ARRAY[open.task_id])
    RETURNING t.task_id, t.key, t.watched
  ), dead_timers AS (
    INSERT INTO {schema}.dl_process_tasks (task_id, key, type, kind, status, context, error, attempt, first_task, created_at, scheduled_at,
                                           started_at, finished_at, ident)
    SELECT w.timer_task, w.key, w.type, w.timer_kind, CASE WHEN w.timer_task = w.running_task THEN 'error' ELSE 'cancelled' END,
           w.timer_context, CASE WHEN w.timer_task = w.running_task THEN 'zombie detected' END, w.timer_attempt, w.timer_first,
           w.timer_at, w.timer_at, CASE WHEN w.timer_task = w.running_task THEN w.running_at END, statement_timestamp(), w.timer_ident
    FROM work w WHERE w.v = 'zombie' AND w.timer_task IS NOT NULL
    RETURNING task_id
  ), rested AS (
    UPDATE {schema}.dl_jobs j SET
      status = 'queued', available_at = CASE WHEN w.timer_at > statement_timestamp() THEN w.timer_at ELSE now() END,
      waits_for = CASE WHEN w.timer_at > statement_timestamp() THEN 'time' END,
      attempt = 0, lease_expires_at = NULL, claimed_by = NULL, cancel_requested = false
    FROM work w
    WHERE w.v = 'rest' AND w.timer_at IS NOT NULL AND j.job_id = ANY (ARRAY[w.job_id]) AND (j.token = w.token) IS TRUE
    RETURNING j.job_id
  ), ended AS (
    DELETE FROM {schema}.dl_jobs j USING work w
    WHERE (w.v = 'zombie' OR w.v = 'rest' AND w.timer_at IS NULL) AND j.job_id = ANY (ARRAY[w.job_id]) AND (j.token = w.token) IS TRUE
    RETURNING j.job_id
  ), answered AS (
    SELECT e.key, array_agg(e.task_id) AS tasks, bool_or(e.watched) AS watched
    FROM (SELECT * FROM expired UNION ALL SELECT * FROM dead_calls) AS e GROUP BY e.key
  ), notified AS MATERIALIZED (
    SELECT count(pg_notify('dl_answered', t.task_id::text)) FROM answered a CROSS JOIN LATERAL unnest(a.tasks) AS t (task_id) WHERE a.watched
  )
  SELECT a.key,
         CASE WHEN NOT a.key = ANY (v_locked) THEN CASE WHEN EXISTS (SELECT FROM {schema}.dl_processes p WHERE p.key = ANY (ARRAY[a.key]))
                                                        THEN 'locked' ELSE 'void' END
              ELSE coalesce(w.v, 'void') END,
         w.type, w.process_id, w.version, w.status, w.aux_state::text, w.metadata::text, w.last_event_id, w.corrupted_by,
         w.work_id, w.work_kind, w.call_method, w.call_args::text,
         CASE WHEN w.call_id IS NOT NULL THEN w.call_context ELSE w.timer_context END::text,
         CASE WHEN w.call_id IS NULL THEN w.timer_attempt ELSE 0 END,
         CASE WHEN w.call_id IS NULL THEN w.timer_first END, w.work_ident, coalesce(d.tasks, '{}')
  FROM asked a
  LEFT JOIN work w ON w.key = a.key
  LEFT JOIN answered d ON d.key = a.key
  -- A CTE that is not read may not be executed.
  WHERE (SELECT count FROM notified) >= 0;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_begin_steps(bigint[], uuid[], bigint[], int[]) FROM PUBLIC;

-- Writes the outcomes of steps, and gives each process its next task, if there is one and p_go_on allows this run to
-- take it.
--   p_outcomes    done; refused: its caller gets the error, nothing else changes; retry: the timer's task is retried at
--                 p_at; failed: without a retry; returned: the step was stopped by a drain, and runs again in another
--                 process
--   p_responses   the caller's response as JSON; p_errors: the error if it was refused or failed
--   p_states      the new state, NULL: unchanged; p_metadata: likewise; p_events: a list
--   p_versions    version of the new state, NULL: unchanged
--   p_messages    to other processes, a list for each step; NULL: none has any
--   p_next        keep: the timer stays; timeout, remove: a timer in p_after_s seconds, or at p_at; suspend: no timer;
--                 gone: the process is removed
-- One row for each step, with its verdict:
--   next    the other columns have the task that is marked now
--   rest    nothing is left to do now: the job waits for the timer, or is deleted, or is ready for another run
--   gone    the process is removed, and its job is deleted
--   locked  another session has locked a row: try again soon
--   void    the step or the job belongs to another run: nothing was written
-- told has the tasks of other callers that were answered with it: waiting calls that were cancelled or have expired.
CREATE OR REPLACE FUNCTION {schema}.dl_process_commit_steps(
  p_keys bigint[], p_jobs uuid[], p_tokens bigint[], p_tasks bigint[], p_outcomes text[], p_responses text[], p_errors text[],
  p_states text[], p_metadata text[], p_events text[], p_next text[], p_after_s float8[], p_at timestamptz[],
  p_contexts text[], p_go_on boolean[], p_versions int[], p_messages text[])
RETURNS TABLE (key bigint, verdict text, task_id bigint, kind text, method text, args text, context text, attempt int,
               first_task bigint, ident uuid, status text, last_event_id bigint, corrupted_by bigint, told bigint[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_hashjoin = on SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off
AS $$
#variable_conflict use_column
DECLARE
  v_locked bigint[];
  v_fenced uuid[];
  v_stopped uuid[];
  v_sinks boolean;
BEGIN
  SELECT coalesce(array_agg(l.key), '{}'), EXISTS (SELECT FROM {schema}.dl_process_sinks) INTO v_locked, v_sinks FROM (
    SELECT p.key FROM {schema}.dl_processes p WHERE p.key = ANY (p_keys) ORDER BY p.key FOR NO KEY UPDATE SKIP LOCKED) AS l;
  -- A stopped run does not continue: the request was for the step that ends now.
  SELECT coalesce(array_agg(l.job_id) FILTER (WHERE l.status = 'running'), '{}'), array_agg(l.job_id) FILTER (WHERE l.cancel_requested)
  INTO v_fenced, v_stopped FROM (
    SELECT j.job_id, j.cancel_requested, j.status FROM unnest(p_jobs, p_tokens) AS a (job_id, token)
    JOIN {schema}.dl_jobs j ON j.job_id = ANY (ARRAY[a.job_id])
    WHERE (j.token = a.token) IS TRUE
    FOR NO KEY UPDATE OF j SKIP LOCKED) AS l;
  IF v_sinks OR p_messages IS NOT NULL THEN
    PERFORM {schema}.dl_process_send(p_keys, p_jobs, p_tokens, p_tasks, p_outcomes, p_errors, p_events, p_next, p_messages,
                                     v_locked, v_fenced);
  END IF;

  RETURN QUERY
  WITH asked AS MATERIALIZED (
    SELECT * FROM unnest(p_keys, p_jobs, p_tokens, p_tasks, p_outcomes, p_responses, p_errors, p_states, p_metadata, p_events,
                         p_next, p_after_s, p_at, p_contexts, p_go_on, p_versions)
      AS a (key, job_id, token, task, outcome, response, error, state, metadata, events, next, after_s, at, context, go_on, version)
  ), step AS MATERIALIZED (
    SELECT a.*, p.type, p.version AS wrote, p.status AS was, p.corrupted_by AS corrupt, p.running_kind, p.running_at, p.last_event_id AS last,
           p.timer_task, p.timer_kind, p.timer_at, p.timer_attempt, p.timer_first, p.timer_context, p.timer_ident, p.running_ident,
           -- If the first step fails or is refused, no process is left that could continue.
           CASE WHEN a.outcome = 'failed' AND p.running_kind <> 'repair' THEN 'error'
                WHEN a.outcome = 'done' AND p.running_kind IN ('init', 'repair') THEN 'running'
                WHEN a.outcome = 'done' AND p.status = 'error' THEN 'running'
                ELSE p.status END AS becomes,
           a.next = 'gone' AND a.outcome = 'done' OR a.outcome = 'refused' AND p.running_kind = 'init'
             OR a.outcome = 'done' AND p.running_kind = 'remove' AS goes,
           jsonb_array_length(coalesce(a.events, '[]')::jsonb) AS news,
           coalesce(p.running_task = p.timer_task, false) AS of_timer,
           CASE WHEN a.outcome = 'done' THEN coalesce(a.version, p.version) ELSE p.version END AS writes,
           coalesce(a.at, statement_timestamp() + make_interval(secs => a.after_s)) AS next_at,
           corrupting.kind AS corrupting_kind, corrupting.context AS corrupting_context, corrupting.ident AS corrupting_ident
    FROM asked a
    JOIN {schema}.dl_processes p ON p.key = ANY (ARRAY[a.key])
    LEFT JOIN LATERAL (
      SELECT t.kind, t.context, t.ident FROM {schema}.dl_process_tasks t
      WHERE p.running_kind = 'repair' AND t.task_id = ANY (ARRAY[p.corrupted_by]) AND t.kind IN ('timeout', 'remove') LIMIT 1
    ) AS corrupting ON true
    WHERE a.key = ANY (v_locked) AND a.job_id = ANY (v_fenced)
      AND (p.running_task = a.task AND p.running_token = a.token) IS TRUE AND p.removed_at IS NULL
  ), timed AS MATERIALIZED (
    -- The new state of the timer: a new ID if one is set.
    SELECT s.*,
           CASE WHEN goes OR becomes = 'error' AND outcome = 'failed' THEN 'none'
                WHEN outcome = 'retry' THEN 'retry'
                WHEN outcome = 'done' AND next IN ('timeout', 'remove') THEN 'new'
                WHEN outcome = 'done' AND next = 'suspend' THEN 'none'
                -- The timer that has just run is over, unless the step says otherwise; a repaired process runs the
                -- failed task again.
                WHEN outcome = 'done' AND of_timer THEN 'none'
                WHEN outcome = 'done' AND running_kind = 'repair' AND corrupting_kind IS NOT NULL THEN 'again'
                ELSE 'keep' END AS timer
    FROM step s
  ), planned AS MATERIALIZED (
    SELECT t.*,
           CASE WHEN becomes = 'error' AND outcome = 'failed' AND running_kind <> 'repair' THEN CASE WHEN of_timer THEN task END
                WHEN becomes = 'error' THEN corrupt END AS corrupts,
           CASE timer WHEN 'keep' THEN timer_task WHEN 'none' THEN NULL ELSE nextval('{schema}.dl_process_task_seq') END AS n_task,
           CASE timer WHEN 'keep' THEN timer_kind WHEN 'none' THEN NULL WHEN 'retry' THEN timer_kind
                      WHEN 'again' THEN corrupting_kind ELSE next END AS n_kind,
           CASE timer WHEN 'keep' THEN timer_at WHEN 'none' THEN NULL WHEN 'again' THEN statement_timestamp() ELSE next_at END AS n_at,
           CASE timer WHEN 'keep' THEN timer_attempt WHEN 'retry' THEN timer_attempt + 1 WHEN 'none' THEN NULL ELSE 0 END AS n_attempt,
           CASE timer WHEN 'keep' THEN timer_first WHEN 'retry' THEN coalesce(timer_first, timer_task) END AS n_first,
           CASE timer WHEN 'keep' THEN timer_context WHEN 'retry' THEN timer_context WHEN 'none' THEN NULL
                      WHEN 'again' THEN corrupting_context ELSE context::jsonb END AS n_context,
           -- The ident of a new timer depends on its context and state. If this commit is lost with the database, and
           -- the step runs again, the same context and state result in the same timer, and others never in one that was
           -- known before.
           CASE timer WHEN 'keep' THEN timer_ident WHEN 'retry' THEN timer_ident WHEN 'none' THEN NULL
                      WHEN 'again' THEN {schema}.dl_process_ident(corrupting_ident, 'again')
                      ELSE {schema}.dl_process_ident(running_ident, concat_ws(E'\n', next, coalesce(context, ''), coalesce(state, ''))) END AS n_ident
    FROM timed t
  ), expired AS (
    UPDATE {schema}.dl_process_tasks t SET status = 'cancelled', error = 'expired', finished_at = statement_timestamp()
    FROM planned s CROSS JOIN LATERAL (
      SELECT w.task_id FROM {schema}.dl_process_tasks w
      WHERE w.key BETWEEN s.key AND s.key AND w.status = 'waiting' AND w.expires_at <= statement_timestamp() AND w.task_id <> s.task
      ORDER BY w.key, w.expires_at
    ) AS late
    WHERE t.task_id = ANY (ARRAY[late.task_id]) AND NOT (s.goes OR s.becomes = 'error')
    RETURNING t.task_id, t.key, t.watched
  ), cancelled AS (
    UPDATE {schema}.dl_process_tasks t SET
      status = 'cancelled', finished_at = statement_timestamp(),
      error = CASE WHEN s.goes THEN 'the process was removed' ELSE 'the process failed: ' || left(s.error, 500) END
    FROM planned s CROSS JOIN LATERAL (
      SELECT w.task_id FROM {schema}.dl_process_tasks w
      WHERE w.key BETWEEN s.key AND s.key AND w.status = 'waiting' AND w.task_id <> s.task
        AND (s.goes OR s.becomes = 'error' AND s.outcome = 'failed')
      ORDER BY w.key, w.task_id
    ) AS open
    WHERE t.task_id = ANY (ARRAY[open.task_id])
    RETURNING t.task_id, t.key, t.watched
  ), closed AS (
    UPDATE {schema}.dl_process_tasks t SET
      status = CASE WHEN s.outcome = 'failed' THEN 'error' ELSE 'finished' END, response = s.response::jsonb, error = s.error,
      started_at = s.running_at, finished_at = statement_timestamp()
    FROM planned s
    WHERE t.task_id = ANY (ARRAY[s.task]) AND NOT s.of_timer AND s.outcome <> 'returned'
    RETURNING t.task_id, t.key, t.watched
  ), closed_timers AS (
    -- The timer that has run, or the one that is replaced.
    INSERT INTO {schema}.dl_process_tasks (task_id, key, type, kind, status, context, error, attempt, first_task, created_at,
                                           scheduled_at, started_at, finished_at, ident)
    SELECT s.timer_task, s.key, s.type, s.timer_kind,
           CASE WHEN NOT s.of_timer THEN 'cancelled' WHEN s.outcome IN ('failed', 'retry') THEN 'error' ELSE 'finished' END,
           s.timer_context, CASE WHEN s.of_timer THEN s.error END, s.timer_attempt, s.timer_first, s.timer_at, s.timer_at,
           CASE WHEN s.of_timer THEN s.running_at END, statement_timestamp(), s.timer_ident
    FROM planned s
    WHERE s.timer_task IS NOT NULL AND s.timer <> 'keep' AND s.outcome <> 'returned'
    RETURNING task_id
  ), events AS (
    INSERT INTO {schema}.dl_process_events (key, event_id, task_id, payload)
    SELECT s.key, s.last + e.number, s.task, e.payload
    FROM planned s CROSS JOIN LATERAL jsonb_array_elements(s.events::jsonb) WITH ORDINALITY AS e (payload, number)
    WHERE s.news > 0 AND s.outcome = 'done'
    RETURNING event_id
  ), chosen AS MATERIALIZED (
    SELECT s.*, c.task_id AS call_id, c.kind AS call_kind, c.method AS call_method, c.args AS call_args, c.context AS call_context,
           CASE WHEN c.task_id IS NOT NULL THEN c.ident ELSE s.n_ident END AS next_ident,
           CASE WHEN s.goes THEN 'gone'
                WHEN s.outcome = 'returned' THEN 'rest'
                WHEN s.go_on AND (s.job_id = ANY (v_stopped)) IS NOT TRUE AND (c.task_id IS NOT NULL OR s.n_at <= statement_timestamp()) THEN 'next'
                ELSE 'rest' END AS v,
           CASE WHEN s.outcome = 'returned' OR c.task_id IS NOT NULL THEN statement_timestamp() ELSE s.n_at END AS wakes_at
    FROM planned s
    LEFT JOIN LATERAL (
      SELECT t.* FROM {schema}.dl_process_tasks t
      WHERE t.key BETWEEN s.key AND s.key AND t.status = 'waiting' AND t.task_id <> s.task AND s.becomes = 'running'
        AND (t.expires_at IS NULL OR t.expires_at > statement_timestamp())
      ORDER BY t.key, t.task_id LIMIT 1
    ) AS c ON NOT s.goes
  ), moved AS (
    UPDATE {schema}.dl_processes p SET
      status = s.becomes,
      previous_status = CASE WHEN s.becomes <> p.status THEN p.status ELSE p.previous_status END,
      status_changed_at = CASE WHEN s.becomes <> p.status THEN statement_timestamp() ELSE p.status_changed_at END,
      detail = CASE WHEN s.becomes = 'error' AND s.outcome = 'failed' AND s.running_kind <> 'repair' THEN s.error
                    WHEN s.becomes = 'error' THEN p.detail END,
      error_group = CASE WHEN s.becomes = 'error' AND s.outcome = 'failed' AND s.running_kind <> 'repair' THEN hashtextextended(s.type || E'\n' || {schema}.dl_error_group(s.error), 0)
                         WHEN s.becomes = 'error' THEN p.error_group END,
      corrupted_by = s.corrupts,
      version = s.writes,
      aux_state = CASE WHEN s.outcome = 'done' THEN coalesce(s.state::jsonb, p.aux_state) ELSE p.aux_state END,
      metadata = CASE WHEN s.outcome = 'done' THEN coalesce(s.metadata::jsonb, p.metadata) ELSE p.metadata END,
      last_event_id = p.last_event_id + CASE WHEN s.outcome = 'done' THEN s.news ELSE 0 END,
      timer_task = s.n_task, timer_kind = s.n_kind, timer_at = s.n_at, timer_attempt = s.n_attempt, timer_first = s.n_first,
      timer_context = s.n_context, timer_ident = s.n_ident,
      running_task = CASE WHEN s.v = 'next' THEN coalesce(s.call_id, s.n_task) END,
      running_kind = CASE WHEN s.v = 'next' THEN coalesce(s.call_kind, s.n_kind) END,
      running_token = CASE WHEN s.v = 'next' THEN s.token END,
      -- Without a running step, it is the ident of the step that was returned, which has been tried.
      running_ident = CASE WHEN s.v = 'next' THEN s.next_ident WHEN s.outcome = 'returned' THEN s.running_ident END,
      running_at = CASE WHEN s.v = 'next' THEN statement_timestamp() END,
      crashes = 0,
      job_id = CASE WHEN s.v = 'next' OR s.v = 'rest' AND s.wakes_at IS NOT NULL THEN p.job_id END,
      removed_at = CASE WHEN s.goes THEN statement_timestamp() END
    FROM chosen s WHERE p.key = ANY (ARRAY[s.key])
    RETURNING p.key
  ), rested AS (
    UPDATE {schema}.dl_jobs j SET
      status = 'queued', available_at = CASE WHEN s.wakes_at > statement_timestamp() THEN s.wakes_at ELSE now() END,
      waits_for = CASE WHEN s.wakes_at > statement_timestamp() THEN 'time' END,
      attempt = 0, lease_expires_at = NULL, claimed_by = NULL, cancel_requested = false,
      -- With another version, the job leaves its lane (dl_jobs_shape).
      task = 'process.' || s.type || '.v' || s.writes
    FROM chosen s
    WHERE s.v = 'rest' AND s.wakes_at IS NOT NULL AND j.job_id = ANY (ARRAY[s.job_id])
    RETURNING j.job_id
  ), upgraded AS (
    -- If this run dies, no worker of an older version may take its job.
    UPDATE {schema}.dl_jobs j SET task = 'process.' || s.type || '.v' || s.writes
    FROM chosen s
    WHERE s.v = 'next' AND s.writes <> s.wrote AND j.job_id = ANY (ARRAY[s.job_id])
    RETURNING j.job_id
  ), ended AS (
    DELETE FROM {schema}.dl_jobs j USING chosen s
    WHERE (s.v = 'gone' OR s.v = 'rest' AND s.wakes_at IS NULL) AND j.job_id = ANY (ARRAY[s.job_id])
    RETURNING j.job_id
  ), answered AS MATERIALIZED (
    SELECT e.key, coalesce(array_agg(e.task_id) FILTER (WHERE NOT e.own), '{}') AS tasks,
           count(pg_notify('dl_answered', e.task_id::text)) FILTER (WHERE e.watched) AS notified
    FROM (SELECT x.*, false AS own FROM expired x UNION ALL SELECT x.*, false FROM cancelled x
          UNION ALL SELECT x.*, true FROM closed x) AS e
    GROUP BY e.key
  )
  SELECT a.key,
         CASE WHEN s.key IS NOT NULL THEN s.v
              WHEN NOT a.key = ANY (v_locked) AND EXISTS (SELECT FROM {schema}.dl_processes p WHERE p.key = ANY (ARRAY[a.key])
                                                          AND p.running_token = a.token AND p.removed_at IS NULL) THEN 'locked'
              WHEN a.key = ANY (v_locked) AND NOT a.job_id = ANY (v_fenced)
                AND (SELECT j.token = a.token AND j.status = 'running' FROM {schema}.dl_jobs j WHERE j.job_id = a.job_id) THEN 'locked'
              ELSE 'void' END,
         CASE WHEN s.v = 'next' THEN coalesce(s.call_id, s.n_task) END,
         CASE WHEN s.v = 'next' THEN coalesce(s.call_kind, s.n_kind) END,
         s.call_method, s.call_args::text, CASE WHEN s.call_id IS NOT NULL THEN s.call_context ELSE s.n_context END::text,
         CASE WHEN s.call_id IS NULL THEN s.n_attempt ELSE 0 END, CASE WHEN s.call_id IS NULL THEN s.n_first END,
         CASE WHEN s.v = 'next' THEN s.next_ident END, s.becomes, s.last + CASE WHEN s.outcome = 'done' THEN s.news ELSE 0 END, s.corrupts, coalesce(d.tasks, '{}')
  FROM asked a
  LEFT JOIN chosen s ON s.key = a.key
  LEFT JOIN answered d ON d.key = a.key
  WHERE d.notified IS NULL OR d.notified >= 0;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_commit_steps(bigint[], uuid[], bigint[], bigint[], text[], text[], text[], text[], text[],
                                                        text[], text[], float8[], timestamptz[], text[], boolean[], int[], text[])
FROM PUBLIC;

-- The version of a type that a start uses: the newest that a live worker serves, otherwise the newest that one has
-- declared; 1 if there is none.
CREATE OR REPLACE FUNCTION {schema}.dl_process_version(p_type text) RETURNS int
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
AS $$
BEGIN
  RETURN coalesce(
    (SELECT s.version FROM {schema}.dl_process_types s
     WHERE s.type = p_type AND s.served_until > now() ORDER BY s.type, s.version DESC LIMIT 1),
    (SELECT max(CASE WHEN v.version ~ '^[0-9]{1,9}$' THEN v.version::int END)
     FROM (SELECT substr(t.task, length(p_type) + 11) AS version FROM {schema}.dl_tasks t
           WHERE starts_with(t.task, 'process.' || p_type || '.v')) AS v),
    1);
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_version(text) FROM PUBLIC;

-- Moves processes whose first step has not begun to the version that a start uses now, if no live worker serves their
-- own: they have no state to convert. The caller has locked them. Workers of the previous release do not write
-- dl_process_types, but report their tasks. Returns the number of moved processes.
CREATE OR REPLACE FUNCTION {schema}.dl_process_move(p_keys bigint[]) RETURNS int
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
AS $$
DECLARE
  v_process record;
  v_version int;
  v_moved int := 0;
BEGIN
  FOR v_process IN
    SELECT p.key, p.type, p.version, p.job_id, 'process.' || p.type AS queue FROM {schema}.dl_processes p
    WHERE p.key = ANY (p_keys) AND p.status = 'init' AND p.running_task IS NULL AND p.removed_at IS NULL
      AND NOT EXISTS (SELECT FROM {schema}.dl_process_types s
                      WHERE s.type = p.type AND s.version = p.version AND s.served_until > now())
  LOOP
    v_version := {schema}.dl_process_version(v_process.type);
    CONTINUE WHEN v_version = v_process.version OR EXISTS (
      SELECT FROM {schema}.dl_workers w
      WHERE w.seen_at > now() - interval '60 s' AND w.queues ? v_process.queue
        AND v_process.queue || '.v' || v_process.version = ANY (w.tasks));
    IF v_process.job_id IS NOT NULL THEN
      UPDATE {schema}.dl_jobs j SET task = v_process.queue || '.v' || v_version,
        waits_for = CASE WHEN j.waits_for <> 'limit' THEN j.waits_for END
      WHERE j.job_id = v_process.job_id AND (j.status = 'queued') IS TRUE;
      -- A run has the job and begins the step.
      CONTINUE WHEN NOT FOUND AND EXISTS (
        SELECT FROM {schema}.dl_jobs j WHERE j.job_id = v_process.job_id AND (j.status = 'running') IS TRUE);
      PERFORM pg_notify('dl_jobs', v_process.queue);
    END IF;
    UPDATE {schema}.dl_processes p SET version = v_version WHERE p.key = v_process.key;
    v_moved := v_moved + 1;
  END LOOP;
  RETURN v_moved;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_move(bigint[]) FROM PUBLIC;

-- The same for up to p_limit processes of versions that no live worker serves, except locked ones. From one version to
-- the next is one step of the index, for the first 200. A version may be known only by its processes.
CREATE OR REPLACE FUNCTION {schema}.dl_process_move_some(p_limit int) RETURNS int
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_bitmapscan = off SET jit = off
AS $$
DECLARE
  v_keys bigint[];
BEGIN
  SELECT array_agg(l.key) INTO v_keys FROM (
    SELECT p.key FROM {schema}.dl_processes p
    WHERE p.key = ANY (ARRAY(
      WITH RECURSIVE stored (type, version) AS (
        (SELECT q.type, q.version FROM {schema}.dl_processes q WHERE q.removed_at IS NULL ORDER BY q.type, q.version LIMIT 1)
        UNION ALL
        SELECT n.type, n.version FROM stored s CROSS JOIN LATERAL (
          SELECT q.type, q.version FROM {schema}.dl_processes q
          WHERE q.removed_at IS NULL AND (q.type, q.version) > (s.type, s.version) ORDER BY q.type, q.version LIMIT 1) AS n
      ), unserved AS MATERIALIZED (
        SELECT s.type, s.version FROM (SELECT * FROM stored LIMIT 200) AS s
        WHERE NOT EXISTS (SELECT FROM {schema}.dl_process_types t
                          WHERE t.type = s.type AND t.version = s.version AND t.served_until > now())
      ), movable AS MATERIALIZED (
        SELECT u.* FROM unserved u
        WHERE NOT EXISTS (SELECT FROM {schema}.dl_workers w
                          WHERE w.seen_at > now() - interval '60 s' AND w.queues ? ('process.' || u.type)
                            AND 'process.' || u.type || '.v' || u.version = ANY (w.tasks))
          AND {schema}.dl_process_version(u.type) <> u.version
      )
      SELECT i.key FROM movable m
      CROSS JOIN LATERAL (
        SELECT q.key FROM {schema}.dl_processes q
        WHERE q.type = m.type AND q.version = m.version AND q.status = 'init' AND q.removed_at IS NULL
        ORDER BY q.type, q.version, q.status, q.key LIMIT p_limit) AS i
      LIMIT p_limit))
    ORDER BY p.key FOR NO KEY UPDATE SKIP LOCKED) AS l;
  RETURN {schema}.dl_process_move(v_keys);
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_move_some(int) FROM PUBLIC;

-- Ensures that a process has a wake-up job that runs at p_at: its existing one is made ready or moved, or p_job is
-- added. The caller has locked the process's row. A job that another session has ended or deleted is replaced.
CREATE OR REPLACE FUNCTION {schema}.dl_process_wake(p_key bigint, p_job uuid, p_at timestamptz, p_lease_s int) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
AS $$
DECLARE
  v_process {schema}.dl_processes;
  v_status text;
BEGIN
  SELECT * INTO v_process FROM {schema}.dl_processes p WHERE p.key = p_key;
  IF v_process.status = 'init' AND {schema}.dl_process_move(ARRAY[p_key]) > 0 THEN
    SELECT * INTO v_process FROM {schema}.dl_processes p WHERE p.key = p_key;
  END IF;
  IF v_process.job_id IS NOT NULL THEN
    -- A job that is due, and has not been made ready yet, is ready now.
    UPDATE {schema}.dl_jobs j SET available_at = least(p_at, j.available_at), waits_for = CASE WHEN p_at > now() THEN 'time' END
    WHERE j.job_id = v_process.job_id
      AND (j.status = 'queued' AND j.waits_for = 'time' AND (j.available_at > p_at OR p_at <= now())) IS TRUE;
    SELECT j.status INTO v_status FROM {schema}.dl_jobs j WHERE j.job_id = v_process.job_id;
    IF v_status IN ('queued', 'running') THEN
      RETURN;
    ELSIF v_status = 'canceled' AND v_process.running_task IS NOT NULL THEN
      -- Its worker was asked to stop the step, and was lost before it did: that step is not run again.
      UPDATE {schema}.dl_processes p SET crashes = 1000000 WHERE p.key = p_key;
    END IF;
  END IF;
  INSERT INTO {schema}.dl_jobs (job_id, queue, task, args, lock_key, keyed, available_at, max_attempts, lease_ttl_sec)
  VALUES (p_job, 'process.' || v_process.type, 'process.' || v_process.type || '.v' || v_process.version,
          jsonb_build_object('key', p_key, 'type', v_process.type, 'process_id', v_process.process_id),
          p_job::text, false, p_at, 1000000, p_lease_s);
  UPDATE {schema}.dl_processes p SET job_id = p_job WHERE p.key = p_key;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_wake(bigint, uuid, timestamptz, int) FROM PUBLIC;


-- Sends a request to a process, for whose lock it does not wait long: p_kind is init, call or repair. With p_start, a
-- call creates a missing process; its init has these args. One row, with its verdict:
--   added     the task waits, or runs soon
--   again     the key is known, and the request was the same: the task of the first request
--   conflict  the key is known for another request
--   exists    init: a process has this ID, with this `status`        missing   there is none
--   status    the process's status, which is in `status`, does not allow it
--   busy      repair: a task runs or waits already
-- p_ident is that of the task, NULL: a random one. It is returned, since a task's number may belong to another one
-- after a restore.
CREATE OR REPLACE FUNCTION {schema}.dl_process_request(
  p_type text, p_id text, p_kind text, p_method text, p_args jsonb, p_context jsonb, p_key text, p_hash bytea, p_expires_at timestamptz,
  p_watched boolean, p_metadata jsonb, p_version int, p_start jsonb, p_job uuid, p_lease_s int, p_ident uuid,
  OUT verdict text, OUT status text, OUT task_id bigint, OUT ident uuid)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off SET lock_timeout = '2s'
AS $$
#variable_conflict use_column
DECLARE
  v_process {schema}.dl_processes;
  v_known record;
  v_made boolean := false;
BEGIN
  IF p_key IS NOT NULL THEN
    SELECT t.task_id, t.request_hash, t.ident INTO v_known FROM {schema}.dl_process_tasks t WHERE t.type = p_type AND t.idempotency_key = p_key;
    IF FOUND THEN
      -- With a synchronous standby: the commit of this answer waits for the standby, and so for all earlier commits.
      PERFORM pg_logical_emit_message(true, 'dataloader', '') WHERE current_setting('synchronous_standby_names') <> '';
      verdict := CASE WHEN v_known.request_hash = p_hash THEN 'again' ELSE 'conflict' END;
      task_id := v_known.task_id;
      ident := v_known.ident;
      RETURN;
    END IF;
  END IF;
  LOOP
    SELECT * INTO v_process FROM {schema}.dl_processes p
    WHERE p.type = p_type AND p.process_id = p_id AND p.removed_at IS NULL FOR NO KEY UPDATE;
    IF FOUND THEN
      verdict := CASE WHEN p_kind = 'init' THEN 'exists' END;
      status := CASE WHEN p_kind = 'init' THEN v_process.status END;
      EXIT;
    END IF;
    EXIT WHEN p_kind <> 'init' AND p_start IS NULL;
    INSERT INTO {schema}.dl_processes (type, process_id, version, metadata)
    VALUES (p_type, p_id, coalesce(p_version, {schema}.dl_process_version(p_type)), coalesce(p_metadata, '{}'))
    ON CONFLICT (type, process_id) WHERE removed_at IS NULL DO NOTHING
    RETURNING * INTO v_process;
    v_made := FOUND;
    EXIT WHEN v_made;
    -- Another session has created it meanwhile: it exists now, unless it is gone already.
  END LOOP;
  IF v_made AND p_kind <> 'init' THEN
    INSERT INTO {schema}.dl_process_tasks (key, type, kind, args, ident)
    VALUES (v_process.key, p_type, 'init', p_start,
            {schema}.dl_process_ident(p_ident, 'start'));
  END IF;
  IF v_process.key IS NULL THEN
    verdict := coalesce(verdict, 'missing');
  ELSIF p_kind = 'call' AND NOT (v_process.status = 'running' OR v_process.status = 'init' AND p_start IS NOT NULL)
     OR p_kind = 'repair' AND v_process.status <> 'error' THEN
    verdict := 'status';
    status := v_process.status;
  ELSIF p_kind = 'repair' AND (v_process.running_task IS NOT NULL OR v_process.timer_task IS NOT NULL
      OR EXISTS (SELECT FROM {schema}.dl_process_tasks t WHERE t.key = v_process.key AND t.status = 'waiting')) THEN
    verdict := 'busy';
  END IF;
  IF verdict IS NULL THEN
    INSERT INTO {schema}.dl_process_tasks (key, type, kind, method, args, context, idempotency_key, request_hash, expires_at, watched,
                                           ident)
    VALUES (v_process.key, p_type, p_kind, p_method, p_args, p_context, p_key, p_hash, p_expires_at, p_watched,
            coalesce(p_ident, gen_random_uuid()))
    ON CONFLICT (type, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
    RETURNING dl_process_tasks.task_id, dl_process_tasks.ident INTO task_id, ident;
    IF FOUND THEN
      verdict := 'added';
      PERFORM {schema}.dl_process_wake(v_process.key, p_job, now(), p_lease_s);
      RETURN;
    END IF;
    IF v_made THEN  -- for a request that belongs to another one
      DELETE FROM {schema}.dl_process_tasks t WHERE t.key = v_process.key;
      DELETE FROM {schema}.dl_processes p WHERE p.key = v_process.key;
    END IF;
  ELSIF p_key IS NULL THEN
    RETURN;
  END IF;
  -- Another session has sent the same key meanwhile: its task is visible in a new snapshot.
  SELECT t.task_id, t.request_hash, t.ident INTO v_known FROM {schema}.dl_process_tasks t WHERE t.type = p_type AND t.idempotency_key = p_key;
  IF FOUND THEN
    verdict := CASE WHEN v_known.request_hash = p_hash THEN 'again' ELSE 'conflict' END;
    task_id := v_known.task_id;
    ident := v_known.ident;
    status := NULL;
  END IF;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_request(text, text, text, text, jsonb, jsonb, text, bytea, timestamptz, boolean, jsonb, int,
                                                   jsonb, uuid, int, uuid) FROM PUBLIC;

-- Operations on a process by operators. p_act: resume (of a process in error: the failed task is retried, or it just
-- continues), remove, stop (of a running step). One row, with its verdict: done, missing, status, busy. `told` has the
-- tasks that were answered with it.
CREATE OR REPLACE FUNCTION {schema}.dl_process_act(p_type text, p_id text, p_act text, p_job uuid, p_lease_s int,
                                                   OUT verdict text, OUT status text, OUT told bigint[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off SET lock_timeout = '2s'
AS $$
#variable_conflict use_column
DECLARE
  v_process {schema}.dl_processes;
  v_corrupting {schema}.dl_process_tasks;
BEGIN
  told := '{}';
  SELECT * INTO v_process FROM {schema}.dl_processes p
  WHERE p.type = p_type AND p.process_id = p_id AND p.removed_at IS NULL FOR NO KEY UPDATE;
  IF NOT FOUND THEN
    verdict := 'missing';
    RETURN;
  END IF;
  status := v_process.status;
  verdict := 'done';
  IF p_act = 'remove' THEN
    WITH cancelled AS (
      UPDATE {schema}.dl_process_tasks t SET status = 'cancelled', error = 'the process was removed', finished_at = statement_timestamp()
      WHERE t.key = v_process.key AND t.status = 'waiting'
      RETURNING t.task_id)
    SELECT coalesce(array_agg(c.task_id), '{}') INTO told FROM cancelled AS c;
    PERFORM pg_notify('dl_answered', t.task_id::text) FROM unnest(told) AS t (task_id);
    IF v_process.status <> 'init' THEN
      PERFORM {schema}.dl_process_tell(ARRAY[v_process.key], 'removed', NULL);
    END IF;
    UPDATE {schema}.dl_processes p SET removed_at = statement_timestamp(), job_id = NULL WHERE p.key = v_process.key;
    DELETE FROM {schema}.dl_jobs j WHERE j.job_id = v_process.job_id AND (j.status = 'queued') IS TRUE;
    IF NOT FOUND THEN
      UPDATE {schema}.dl_jobs j SET cancel_requested = true WHERE j.job_id = v_process.job_id AND (j.status = 'running') IS TRUE;
    END IF;
  ELSIF p_act = 'stop' THEN
    UPDATE {schema}.dl_jobs j SET cancel_requested = true
    WHERE v_process.running_task IS NOT NULL AND j.job_id = v_process.job_id AND (j.token = v_process.running_token AND j.status = 'running') IS TRUE;
    IF NOT FOUND THEN
      verdict := 'status';
    END IF;
  ELSIF v_process.status <> 'error' THEN
    verdict := 'status';
  ELSIF v_process.running_task IS NOT NULL OR v_process.timer_task IS NOT NULL
      OR EXISTS (SELECT FROM {schema}.dl_process_tasks t WHERE t.key = v_process.key AND t.status = 'waiting') THEN
    verdict := 'busy';
  ELSE
    SELECT * INTO v_corrupting FROM {schema}.dl_process_tasks t
    WHERE t.task_id = v_process.corrupted_by AND t.kind IN ('timeout', 'remove');
    IF FOUND THEN
      UPDATE {schema}.dl_processes p SET timer_task = nextval('{schema}.dl_process_task_seq'), timer_kind = v_corrupting.kind,
        timer_at = statement_timestamp(), timer_attempt = 0, timer_first = NULL, timer_context = v_corrupting.context,
        timer_ident = {schema}.dl_process_ident(v_corrupting.ident, 'again')
      WHERE p.key = v_process.key;
      PERFORM {schema}.dl_process_wake(v_process.key, p_job, now(), p_lease_s);
    ELSE
      UPDATE {schema}.dl_processes p SET status = 'running', previous_status = 'error', status_changed_at = statement_timestamp(),
        detail = NULL, error_group = NULL, corrupted_by = NULL
      WHERE p.key = v_process.key;
      PERFORM {schema}.dl_process_tell(ARRAY[v_process.key], 'repaired', NULL);
    END IF;
  END IF;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_act(text, text, text, uuid, int) FROM PUBLIC;

-- Gives processes that have something to do a wake-up job if other sessions have ended or deleted theirs; returns the
-- number of those without one.
CREATE OR REPLACE FUNCTION {schema}.dl_process_mend(p_keys bigint[], p_lease_s int) RETURNS int
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
AS $$
DECLARE
  v_keys bigint[];
  v_process record;
  v_mended int := 0;
BEGIN
  SELECT array_agg(l.key) INTO v_keys FROM (
    SELECT p.key FROM {schema}.dl_processes p WHERE p.key = ANY (p_keys) AND p.removed_at IS NULL
    ORDER BY p.key FOR NO KEY UPDATE SKIP LOCKED) AS l;
  FOR v_process IN
    SELECT p.key, p.timer_at,
           p.running_task IS NOT NULL
             OR EXISTS (SELECT FROM {schema}.dl_process_tasks t WHERE t.key = p.key AND t.status = 'waiting') AS now
    FROM {schema}.dl_processes p
    WHERE p.key = ANY (v_keys)
      AND NOT EXISTS (SELECT FROM {schema}.dl_jobs j WHERE j.job_id = p.job_id AND (j.status IN ('queued', 'running')) IS TRUE)
  LOOP
    IF v_process.now OR v_process.timer_at IS NOT NULL THEN
      PERFORM {schema}.dl_process_wake(v_process.key, gen_random_uuid(),
                                       CASE WHEN v_process.now THEN now() ELSE v_process.timer_at END, p_lease_s);
      v_mended := v_mended + 1;
    END IF;
  END LOOP;
  RETURN v_mended;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_mend(bigint[], int) FROM PUBLIC;
