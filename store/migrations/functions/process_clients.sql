-- Operations of clients of durable processes besides a single request: many requests, withdrawals, and imports.

-- Sends many requests, each a call of an existing process or the start of a missing one. Returns one row for each that
-- was added, with its number in the lists, and one without a task for each call of a process that another session has
-- locked, unless p_wait says to wait for it. A request without a row has another answer, and must be sent singly
-- (dl_process_request). p_may_start: a call may go to a process whose start has not finished. p_jobs: the IDs of
-- wake-up jobs.
CREATE OR REPLACE FUNCTION {schema}.dl_process_request_many(
  p_types text[], p_ids text[], p_kinds text[], p_methods text[], p_args text[], p_contexts text[], p_keys text[], p_hashes bytea[],
  p_expires_at timestamptz[], p_watched boolean[], p_metadata text[], p_versions int[], p_may_start boolean[], p_jobs uuid[], p_lease_s int,
  p_wait boolean)
RETURNS TABLE (number bigint, task_id bigint, ident uuid)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_hashjoin = on SET enable_mergejoin = off
SET enable_bitmapscan = off SET jit = off SET lock_timeout = '2s'
AS $$
#variable_conflict use_column
DECLARE
  v_of bigint[];
  v_called bigint[];
  v_locked bigint[];
  v_made bigint[] := '{}';
  v_tasks bigint[];
  v_numbers bigint[];
  v_added bigint[];
  v_idents uuid[];
  v_keys bigint[];
  v_jobs uuid[];
  v_not_begun bigint[];
BEGIN
  v_of := ARRAY(SELECT (SELECT p.key FROM {schema}.dl_processes p WHERE p.type = a.type AND p.process_id = a.id AND p.removed_at IS NULL)
                FROM unnest(p_types, p_ids) WITH ORDINALITY AS a (type, id, number) ORDER BY a.number);
  v_called := ARRAY(SELECT a.key FROM unnest(v_of, p_kinds) AS a (key, kind) WHERE a.kind = 'call' AND a.key IS NOT NULL);
  IF p_wait THEN
    SELECT coalesce(array_agg(l.key), '{}') INTO v_locked FROM (
      SELECT p.key FROM {schema}.dl_processes p WHERE p.key = ANY (v_called) ORDER BY p.key FOR NO KEY UPDATE) AS l;
  ELSE
    SELECT coalesce(array_agg(l.key), '{}') INTO v_locked FROM (
      SELECT p.key FROM {schema}.dl_processes p WHERE p.key = ANY (v_called) ORDER BY p.key FOR NO KEY UPDATE SKIP LOCKED) AS l;
  END IF;
  IF 'init' = ANY (p_kinds) THEN
    WITH asked AS MATERIALIZED (
      SELECT DISTINCT ON (a.type, a.id) a.* FROM unnest(v_of, p_types, p_ids, p_kinds, p_metadata, p_versions, p_jobs)
        WITH ORDINALITY AS a (key, type, id, kind, metadata, version, job, number)
      WHERE a.kind = 'init' AND a.key IS NULL ORDER BY a.type, a.id, a.number
    ), versions AS MATERIALIZED (
      SELECT t.type, {schema}.dl_process_version(t.type) AS version FROM (SELECT DISTINCT a.type FROM asked a WHERE a.version IS NULL) AS t
    ), made AS (
      INSERT INTO {schema}.dl_processes (type, process_id, version, metadata, job_id)
      SELECT a.type, a.id, coalesce(a.version, v.version), coalesce(a.metadata::jsonb, '{}'), a.job
      FROM asked a LEFT JOIN versions v ON v.type = a.type AND a.version IS NULL
      ORDER BY a.type, a.id
      ON CONFLICT (type, process_id) WHERE removed_at IS NULL DO NOTHING
      RETURNING key, type, process_id)
    SELECT coalesce(array_agg(m.key), '{}'), coalesce(array_agg(a.number), '{}') INTO v_made, v_numbers
    FROM made m JOIN asked a ON a.type = m.type AND a.id = m.process_id;
    FOR v_place IN 1 .. cardinality(v_made) LOOP
      v_of[v_numbers[v_place]] := v_made[v_place];
    END LOOP;
  END IF;
  -- Numbered under the locks, so that the later task of a process has the higher number.
  v_tasks := ARRAY(SELECT nextval('{schema}.dl_process_task_seq') FROM generate_series(1, cardinality(p_ids)));
  WITH asked AS MATERIALIZED (
    SELECT * FROM unnest(v_tasks, v_of, p_types, p_kinds, p_methods, p_args, p_contexts, p_keys, p_hashes, p_expires_at, p_watched,
                         p_may_start, p_jobs) WITH ORDINALITY
      AS a (task_id, key, type, kind, method, args, context, idempotency_key, hash, expires_at, watched, may_start, job, number)
  ), fits AS MATERIALIZED (
    SELECT a.*, a.kind = 'call' AND p.status = 'init' AS not_begun FROM asked a JOIN {schema}.dl_processes p ON p.key = ANY (ARRAY[a.key])
    WHERE p.removed_at IS NULL AND CASE a.kind WHEN 'init' THEN p.key = ANY (v_made)
      WHEN 'call' THEN p.key = ANY (v_locked) AND (p.status = 'running' OR p.status = 'init' AND a.may_start) END
  ), added AS (
    INSERT INTO {schema}.dl_process_tasks (task_id, key, type, kind, method, args, context, idempotency_key, request_hash, expires_at, watched)
    SELECT f.task_id, f.key, f.type, f.kind, f.method, f.args::jsonb, f.context::jsonb, f.idempotency_key, f.hash, f.expires_at, f.watched
    FROM fits f ORDER BY f.type, f.idempotency_key, f.number
    ON CONFLICT (type, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
    RETURNING task_id, ident)
  SELECT array_agg(f.number), array_agg(f.task_id), array_agg(t.ident), coalesce(array_agg(f.key), '{}'), array_agg(f.job),
         array_agg(DISTINCT f.key) FILTER (WHERE f.not_begun)
  INTO v_numbers, v_added, v_idents, v_keys, v_jobs, v_not_begun
  FROM added t JOIN fits f ON f.task_id = t.task_id;
  -- For a request whose key belongs to another one.
  DELETE FROM {schema}.dl_processes p WHERE p.key = ANY (v_made) AND NOT p.key = ANY (v_keys);

  -- Like dl_process_wake for a single process.
  IF v_not_begun IS NOT NULL THEN
    PERFORM {schema}.dl_process_move(v_not_begun);
  END IF;
  UPDATE {schema}.dl_jobs j SET available_at = least(now(), j.available_at), waits_for = NULL
  FROM unnest(v_keys) AS w (key) JOIN {schema}.dl_processes p ON p.key = ANY (ARRAY[w.key])
  WHERE j.job_id = ANY (ARRAY[p.job_id]) AND (j.status = 'queued' AND j.waits_for = 'time') IS TRUE;
  WITH bare AS MATERIALIZED (
    SELECT w.key, w.job, p.type, p.process_id, p.version, p.job_id AS before, p.crashes,
           (j.status = 'canceled' AND p.running_task IS NOT NULL) IS TRUE AS stopped
    FROM (SELECT DISTINCT ON (u.key) u.* FROM unnest(v_keys, v_jobs) AS u (key, job) ORDER BY u.key, u.job) AS w
    JOIN {schema}.dl_processes p ON p.key = ANY (ARRAY[w.key])
    CROSS JOIN LATERAL (SELECT (SELECT o.status FROM {schema}.dl_jobs o WHERE o.job_id = p.job_id) AS status OFFSET 0) AS j
    WHERE (j.status IN ('queued', 'running')) IS NOT TRUE
  ), jobs AS (
    INSERT INTO {schema}.dl_jobs (job_id, queue, task, args, lock_key, keyed, available_at, max_attempts, lease_ttl_sec)
    SELECT b.job, 'process.' || b.type, 'process.' || b.type || '.v' || b.version,
           jsonb_build_object('key', b.key, 'type', b.type, 'process_id', b.process_id), b.job::text, false, now(), 1000000, p_lease_s
    FROM bare b ORDER BY b.key)
  UPDATE {schema}.dl_processes p SET job_id = b.job, crashes = CASE WHEN b.stopped THEN 1000000 ELSE p.crashes END
  FROM bare b WHERE p.key = ANY (ARRAY[b.key]) AND b.before IS DISTINCT FROM b.job;
  RETURN QUERY SELECT * FROM unnest(v_numbers, v_added, v_idents);
  RETURN QUERY SELECT a.number, NULL::bigint, NULL::uuid FROM unnest(v_of, p_kinds) WITH ORDINALITY AS a (key, kind, number)
    WHERE a.kind = 'call' AND a.key IS NOT NULL AND NOT a.key = ANY (v_locked);
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_request_many(text[], text[], text[], text[], text[], text[], text[], bytea[], timestamptz[],
                                                        boolean[], text[], int[], boolean[], uuid[], int, boolean) FROM PUBLIC;

-- Withdraws calls that have not begun: those that were withdrawn or, if p_expired, those that have expired, of
-- processes that are not locked. Returns the numbers of the withdrawn ones. p_idents: the ident of each task. After a
-- restore, its number may be that of another client's call, which stays.
CREATE OR REPLACE FUNCTION {schema}.dl_process_withdraw(p_tasks bigint[], p_idents uuid[], p_expired boolean) RETURNS bigint[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off SET lock_timeout = '2s'
AS $$
DECLARE
  v_keys bigint[];
  v_locked bigint[];
  v_taken bigint[];
BEGIN
  SELECT array_agg(DISTINCT t.key) INTO v_keys FROM {schema}.dl_process_tasks t
  WHERE t.task_id = ANY (p_tasks) AND t.status = 'waiting' AND t.kind = 'call';
  IF p_expired THEN
    SELECT array_agg(l.key) INTO v_locked FROM (
      SELECT p.key FROM {schema}.dl_processes p WHERE p.key = ANY (v_keys) ORDER BY p.key FOR NO KEY UPDATE SKIP LOCKED) AS l;
  ELSE
    SELECT array_agg(l.key) INTO v_locked FROM (
      SELECT p.key FROM {schema}.dl_processes p WHERE p.key = ANY (v_keys) ORDER BY p.key FOR NO KEY UPDATE) AS l;
  END IF;
  -- A new snapshot: a call that has begun meanwhile is marked.
  WITH taken AS (
    UPDATE {schema}.dl_process_tasks t SET
      status = 'cancelled', error = CASE WHEN p_expired THEN 'expired' ELSE 'withdrawn' END, finished_at = statement_timestamp()
    FROM {schema}.dl_processes p
    WHERE t.task_id = ANY (p_tasks) AND t.status = 'waiting' AND t.kind = 'call' AND t.key = ANY (v_locked)
      AND t.ident IS NOT DISTINCT FROM p_idents[array_position(p_tasks, t.task_id)]
      AND (NOT p_expired OR t.expires_at <= statement_timestamp())
      AND p.key = t.key AND p.running_task IS DISTINCT FROM t.task_id
    RETURNING t.task_id)
  SELECT coalesce(array_agg(t.task_id), '{}') INTO v_taken FROM taken AS t;
  PERFORM pg_notify('dl_answered', t.task_id::text) FROM unnest(v_taken) AS t (task_id);
  RETURN v_taken;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_withdraw(bigint[], uuid[], boolean) FROM PUBLIC;

-- Stores a process that another system has begun: its events, a finished init, and, if p_kind is timeout or remove, its
-- timer, at p_at or in p_after_s seconds. Returns false if a process has this ID.
CREATE OR REPLACE FUNCTION {schema}.dl_process_put(
  p_type text, p_id text, p_version int, p_state jsonb, p_metadata jsonb, p_events jsonb, p_kind text, p_at timestamptz, p_after_s float8,
  p_context jsonb, p_job uuid, p_lease_s int) RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off SET lock_timeout = '2s'
AS $$
DECLARE
  v_key bigint;
  v_task bigint;
  v_at timestamptz := coalesce(p_at, statement_timestamp() + make_interval(secs => p_after_s));
BEGIN
  INSERT INTO {schema}.dl_processes (type, process_id, version, status, previous_status, aux_state, metadata, last_event_id)
  VALUES (p_type, p_id, coalesce(p_version, {schema}.dl_process_version(p_type)), 'running', 'init', p_state, p_metadata,
          jsonb_array_length(p_events))
  ON CONFLICT (type, process_id) WHERE removed_at IS NULL DO NOTHING
  RETURNING key INTO v_key;
  IF NOT FOUND THEN
    RETURN false;
  END IF;
  INSERT INTO {schema}.dl_process_tasks (key, type, kind, status, finished_at)
  VALUES (v_key, p_type, 'init', 'finished', statement_timestamp())
  RETURNING task_id INTO v_task;
  INSERT INTO {schema}.dl_process_events (key, event_id, task_id, payload)
  SELECT v_key, e.number, v_task, e.payload FROM jsonb_array_elements(p_events) WITH ORDINALITY AS e (payload, number);
  IF p_kind IS NOT NULL THEN
    UPDATE {schema}.dl_processes p SET timer_task = nextval('{schema}.dl_process_task_seq'), timer_kind = p_kind, timer_at = v_at,
      timer_attempt = 0, timer_context = p_context, timer_ident = gen_random_uuid()
    WHERE p.key = v_key;
    PERFORM {schema}.dl_process_wake(v_key, p_job, v_at, p_lease_s);
  END IF;
  RETURN true;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_put(text, text, int, jsonb, jsonb, jsonb, text, timestamptz, float8, jsonb, uuid, int) FROM PUBLIC;
