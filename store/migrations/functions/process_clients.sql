-- What clients of durable processes do besides asking: they take calls back, and import processes.

-- Takes calls back that have not begun: those that were withdrawn, or, if p_expired, those whose time is over, of processes that
-- nobody has locked. Gives back which.
CREATE OR REPLACE FUNCTION {schema}.dl_process_take_back(p_tasks bigint[], p_expired boolean) RETURNS bigint[]
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
  -- A new snapshot: what has begun meanwhile is marked.
  WITH taken AS (
    UPDATE {schema}.dl_process_tasks t SET
      status = 'cancelled', error = CASE WHEN p_expired THEN 'expired' ELSE 'withdrawn' END, finished_at = statement_timestamp()
    FROM {schema}.dl_processes p
    WHERE t.task_id = ANY (p_tasks) AND t.status = 'waiting' AND t.kind = 'call' AND t.key = ANY (v_locked)
      AND (NOT p_expired OR t.expires_at <= statement_timestamp())
      AND p.key = t.key AND p.running_task IS DISTINCT FROM t.task_id
    RETURNING t.task_id)
  SELECT coalesce(array_agg(t.task_id), '{}') INTO v_taken FROM taken AS t;
  PERFORM pg_notify('dl_answered', t.task_id::text) FROM unnest(v_taken) AS t (task_id);
  RETURN v_taken;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_take_back(bigint[], boolean) FROM PUBLIC;

-- Stores a process that another system has begun: its events, a finished init, and if p_kind is timeout or remove its timer, at p_at
-- or in p_after_s seconds. False: there is a process of this id.
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
      timer_attempt = 0, timer_context = p_context
    WHERE p.key = v_key;
    PERFORM {schema}.dl_process_wake(v_key, p_job, v_at, p_lease_s);
  END IF;
  RETURN true;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_put(text, text, int, jsonb, jsonb, jsonb, text, timestamptz, float8, jsonb, uuid, int) FROM PUBLIC;
