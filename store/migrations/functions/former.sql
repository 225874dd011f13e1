-- What programs of the release before call, in terms of what took its place. It goes with a later set.

-- dl_units_left knew no budgets by day. Its callers pass the supplier's own budgets, or one of them.
CREATE OR REPLACE FUNCTION {schema}.dl_units_left(
  p_source {schema}.dl_sources, p_units int[], p_spans_s float8[], p_cost int, p_now timestamptz, OUT units bigint, OUT wait_s float8
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  SELECT b.units, b.wait_s INTO units, wait_s
  FROM {schema}.dl_budgets_left(p_source, p_units, p_spans_s, p_source.zones, p_cost, p_now) AS b;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_units_left({schema}.dl_sources, int[], float8[], int, timestamptz) FROM PUBLIC;

-- dl_claim_runs parked jobs of unknown tasks. It skips them now, too, so that programs of the release before delay no job either.
CREATE OR REPLACE FUNCTION {schema}.dl_claim_runs(
  p_queue text, p_limit int, p_slots int, p_worker text, p_tasks text[], p_held int[], p_backoff_s float8, p_freed int[],
  p_after uuid, p_limited text[], p_lanes text[])
RETURNS TABLE (verdict text, lock_hash int, job_id uuid, token bigint, task text, args text, lock_key text,
               partition_key text, attempt int, max_attempts int, lease_s int, waited_s float8, more jsonb)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN QUERY
  SELECT * FROM {schema}.dl_claim_known(p_queue, p_limit, p_slots, p_worker, p_tasks, p_held, p_backoff_s, p_freed, p_after,
                                        p_limited, p_lanes) AS c
  WHERE c.verdict <> 'blocked';
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_claim_runs(text, int, int, text, text[], int[], float8, int[], uuid, text[], text[]) FROM PUBLIC;

-- dl_claim_jobs knew no lanes, and told nothing that only some jobs have.
CREATE OR REPLACE FUNCTION {schema}.dl_claim_jobs(
  p_queue text, p_limit int, p_slots int, p_worker text, p_tasks text[], p_held int[], p_backoff_s float8, p_freed int[],
  p_after uuid)
RETURNS TABLE (verdict text, lock_hash int, job_id uuid, token bigint, task text, args text, lock_key text,
               partition_key text, attempt int, max_attempts int, lease_s int, waited_s float8)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN QUERY
  SELECT c.verdict, c.lock_hash, c.job_id, c.token, c.task, c.args, c.lock_key, c.partition_key, c.attempt, c.max_attempts,
         c.lease_s, c.waited_s
  FROM {schema}.dl_claim_runs(p_queue, p_limit, p_slots, p_worker, p_tasks, p_held, p_backoff_s, p_freed, p_after,
                              '{}', '{}') AS c;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_claim_jobs(text, int, int, text, text[], int[], float8, int[], uuid) FROM PUBLIC;

-- dl_claim knew no jobs without a key: to its callers such a job has its id as its key, which they hold a lock for and free at
-- the end. (Nobody else needs that lock, so it does not matter if a key with the same hash has it already.)
CREATE OR REPLACE FUNCTION {schema}.dl_claim(
  p_queue text, p_limit int, p_slots int, p_worker text, p_tasks text[], p_held int[], p_backoff_s float8, p_freed int[],
  p_after uuid)
RETURNS TABLE (verdict text, lock_hash int, job_id uuid, token bigint, task text, args text, lock_key text,
               partition_key text, attempt int, max_attempts int, lease_s int, waited_s float8)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  FOR verdict, lock_hash, job_id, token, task, args, lock_key, partition_key, attempt, max_attempts, lease_s, waited_s IN
    SELECT * FROM {schema}.dl_claim_jobs(p_queue, p_limit, p_slots, p_worker, p_tasks, p_held, p_backoff_s, p_freed, p_after)
  LOOP
    IF lock_hash IS NULL AND verdict NOT IN ('later', 'last', 'locked') THEN
      lock_hash := hashtext(job_id::text);
      IF verdict = 'run' THEN
        lock_key := job_id::text;
        PERFORM pg_try_advisory_lock(lock_hash);
      END IF;
    END IF;
    RETURN NEXT;
  END LOOP;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_claim(text, int, int, text, text[], int[], float8, int[], uuid) FROM PUBLIC;

-- dl_process_begin, dl_process_commit, dl_process_ask and dl_process_ask_many knew no idents. Their callers know a step by its task's number,
-- in every try of it: so that a newer program that runs the step again keeps that key, it has no ident from here on.
CREATE OR REPLACE FUNCTION {schema}.dl_process_forget_ident(p_key bigint, p_task bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
BEGIN
  UPDATE {schema}.dl_processes p
  SET running_ident = NULL, timer_ident = CASE WHEN p.timer_task IS DISTINCT FROM p_task THEN p.timer_ident END
  WHERE p.key = p_key AND p.running_task = p_task;
  UPDATE {schema}.dl_process_tasks t SET ident = NULL WHERE t.task_id = p_task;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_forget_ident(bigint, bigint) FROM PUBLIC;

-- Which of these processes are left to programs of this release: one of those has tried the next step, so that the outside knows it by its
-- ident, and a live worker of this release serves the process's version. Programs of the release before do not write dl_process_types.
CREATE OR REPLACE FUNCTION {schema}.dl_process_tried_by_ident(p_keys bigint[]) RETURNS bigint[] LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
BEGIN
  RETURN ARRAY(
    SELECT p.key FROM {schema}.dl_processes p
    WHERE p.key = ANY (p_keys)
      AND (p.running_ident IS NOT NULL
           OR p.timer_ident IS NOT NULL AND p.timer_attempt > 0 AND p.timer_at <= statement_timestamp())
      AND EXISTS (SELECT FROM {schema}.dl_process_types s
                  WHERE s.type = p.type AND s.version = p.version AND s.served_until > now()));
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_tried_by_ident(bigint[]) FROM PUBLIC;

CREATE OR REPLACE FUNCTION {schema}.dl_process_begin(p_keys bigint[], p_jobs uuid[], p_tokens bigint[], p_crashes int[])
RETURNS TABLE (key bigint, verdict text, type text, process_id text, version int, status text, aux_state text, metadata text,
               last_event_id bigint, corrupted_by bigint, task_id bigint, kind text, method text, args text, context text,
               attempt int, first_task bigint, told bigint[])
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_ident uuid;
  v_left bigint[];
BEGIN
  -- The job of a process that is left to another worker goes back, a second later, until such a worker claims it.
  WITH released AS (
    UPDATE {schema}.dl_jobs j SET status = 'queued', available_at = now() + interval '1 s', waits_for = 'time', attempt = 0,
      lease_expires_at = NULL, claimed_by = NULL, cancel_requested = false
    FROM unnest(p_keys, p_jobs, p_tokens) AS a (key, job_id, token)
    WHERE a.key = ANY ({schema}.dl_process_tried_by_ident(p_keys))
      AND j.job_id = ANY (ARRAY[a.job_id]) AND (j.token = a.token AND j.status = 'running') IS TRUE
    RETURNING a.key)
  SELECT coalesce(array_agg(r.key), '{}') INTO v_left FROM released r;
  FOR key IN SELECT unnest(v_left) LOOP
    verdict := 'rest';
    told := '{}';
    RETURN NEXT;
  END LOOP;
  FOR key, verdict, type, process_id, version, status, aux_state, metadata, last_event_id, corrupted_by, task_id, kind, method, args,
      context, attempt, first_task, v_ident, told IN
    SELECT s.* FROM (
      SELECT array_agg(a.key) AS keys, array_agg(a.job_id) AS jobs, array_agg(a.token) AS tokens, array_agg(a.crashes) AS crashes
      FROM unnest(p_keys, p_jobs, p_tokens, p_crashes) AS a (key, job_id, token, crashes) WHERE a.key <> ALL (v_left)) AS o
    CROSS JOIN LATERAL {schema}.dl_process_begin_steps(o.keys, o.jobs, o.tokens, o.crashes) AS s
  LOOP
    IF task_id IS NOT NULL THEN
      PERFORM {schema}.dl_process_forget_ident(key, task_id);
    END IF;
    RETURN NEXT;
  END LOOP;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_begin(bigint[], uuid[], bigint[], int[]) FROM PUBLIC;

CREATE OR REPLACE FUNCTION {schema}.dl_process_commit(
  p_keys bigint[], p_jobs uuid[], p_tokens bigint[], p_tasks bigint[], p_outcomes text[], p_responses text[], p_errors text[],
  p_states text[], p_metadata text[], p_events text[], p_next text[], p_after_s float8[], p_at timestamptz[],
  p_contexts text[], p_go_on boolean[], p_versions int[], p_messages text[])
RETURNS TABLE (key bigint, verdict text, task_id bigint, kind text, method text, args text, context text, attempt int,
               first_task bigint, status text, last_event_id bigint, corrupted_by bigint, told bigint[])
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_ident uuid;
  v_left bigint[] := {schema}.dl_process_tried_by_ident(p_keys);
BEGIN
  FOR key, verdict, task_id, kind, method, args, context, attempt, first_task, v_ident, status, last_event_id, corrupted_by, told IN
    SELECT * FROM {schema}.dl_process_commit_steps(p_keys, p_jobs, p_tokens, p_tasks, p_outcomes, p_responses, p_errors, p_states,
      p_metadata, p_events, p_next, p_after_s, p_at, p_contexts,
      ARRAY(SELECT a.go_on AND a.key <> ALL (v_left) FROM unnest(p_keys, p_go_on) WITH ORDINALITY AS a (key, go_on, number)
            ORDER BY a.number), p_versions, p_messages)
  LOOP
    IF task_id IS NOT NULL THEN
      PERFORM {schema}.dl_process_forget_ident(key, task_id);
    END IF;
    RETURN NEXT;
  END LOOP;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_commit(bigint[], uuid[], bigint[], bigint[], text[], text[], text[], text[], text[],
                                                  text[], text[], float8[], timestamptz[], text[], boolean[], int[], text[]) FROM PUBLIC;

CREATE OR REPLACE FUNCTION {schema}.dl_process_ask(
  p_type text, p_id text, p_kind text, p_method text, p_args jsonb, p_context jsonb, p_key text, p_hash bytea, p_expires_at timestamptz,
  p_watched boolean, p_metadata jsonb, p_version int, p_start jsonb, p_job uuid, p_lease_s int,
  OUT verdict text, OUT status text, OUT task_id bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  SELECT r.verdict, r.status, r.task_id INTO verdict, status, task_id
  FROM {schema}.dl_process_request(p_type, p_id, p_kind, p_method, p_args, p_context, p_key, p_hash, p_expires_at, p_watched, p_metadata,
                                   p_version, p_start, p_job, p_lease_s, NULL) AS r;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_ask(text, text, text, text, jsonb, jsonb, text, bytea, timestamptz, boolean, jsonb, int, jsonb,
                                               uuid, int) FROM PUBLIC;

CREATE OR REPLACE FUNCTION {schema}.dl_process_ask_many(
  p_types text[], p_ids text[], p_kinds text[], p_methods text[], p_args text[], p_contexts text[], p_keys text[], p_hashes bytea[],
  p_expires_at timestamptz[], p_watched boolean[], p_metadata text[], p_versions int[], p_may_start boolean[], p_jobs uuid[], p_lease_s int,
  p_wait boolean)
RETURNS TABLE (number bigint, task_id bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN QUERY
  SELECT r.number, r.task_id
  FROM {schema}.dl_process_request_many(p_types, p_ids, p_kinds, p_methods, p_args, p_contexts, p_keys, p_hashes, p_expires_at, p_watched,
                                        p_metadata, p_versions, p_may_start, p_jobs, p_lease_s, p_wait) AS r;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_ask_many(text[], text[], text[], text[], text[], text[], text[], bytea[], timestamptz[],
                                                    boolean[], text[], int[], boolean[], uuid[], int, boolean) FROM PUBLIC;

-- dl_process_take_back knew a call by its number alone.
CREATE OR REPLACE FUNCTION {schema}.dl_process_take_back(p_tasks bigint[], p_expired boolean) RETURNS bigint[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
BEGIN
  RETURN {schema}.dl_process_withdraw(
    p_tasks, ARRAY(SELECT (SELECT t.ident FROM {schema}.dl_process_tasks t WHERE t.task_id = a.task_id)
                   FROM unnest(p_tasks) WITH ORDINALITY AS a (task_id, number) ORDER BY a.number), p_expired);
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_take_back(bigint[], boolean) FROM PUBLIC;

-- dl_process_settle knew a row that was delivered by its number alone.
CREATE OR REPLACE FUNCTION {schema}.dl_process_settle(
  p_sink text, p_partition int, p_job uuid, p_token bigint, p_done bigint[], p_mended bigint[], p_failed bigint[], p_errors text[],
  p_behind bigint[], p_tries int, p_base_s float8, p_cap_s float8) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
BEGIN
  RETURN {schema}.dl_process_settle_rows(
    p_sink, p_partition, p_job, p_token, p_done,
    ARRAY(SELECT (SELECT o.ident FROM {schema}.dl_process_outbox o WHERE o.id = a.id)
          FROM unnest(p_done) WITH ORDINALITY AS a (id, number) ORDER BY a.number),
    p_mended, p_failed, p_errors, p_behind, p_tries, p_base_s, p_cap_s);
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_settle(text, int, uuid, bigint, bigint[], bigint[], bigint[], text[], bigint[], int, float8,
                                                  float8) FROM PUBLIC;
