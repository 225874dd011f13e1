-- Tasks whose jobs are unique (dl_tasks.uniqueness): one job of a key waits at a time and represents all requests.

-- The key of a job: the task with all its args, with some fields, or with a template's text. Stored JSON has one form,
-- except for numbers, of which 1.0 and 1 are the same. All args whose key would have more than 512 characters are
-- hashed.
CREATE OR REPLACE FUNCTION {schema}.dl_unique_key(p_uniqueness jsonb, p_task text, p_args jsonb) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_spec jsonb := p_uniqueness -> 'key';
  v_key text;
BEGIN
  IF jsonb_typeof(v_spec) = 'array' THEN
    RETURN {schema}.dl_key('unique', v_spec, p_task, p_args);
  ELSIF jsonb_typeof(v_spec) = 'string' THEN
    v_key := p_task || ':' || {schema}.dl_key('unique', v_spec, p_task, p_args);
    PERFORM {schema}.dl_check_name('unique', v_key, 512);
    RETURN v_key;
  END IF;
  v_key := regexp_replace(p_args::text, E'("(?:[^"\\\\]|\\\\.)*")|([0-9])\\.0+(?![0-9])|(\\.[0-9]*[1-9])0+(?![0-9])', E'\\1\\2\\3', 'g');
  IF length(p_task) + length(v_key) > 511 OR v_key ~ E'[\\x7f-\\x9f\\u2028\\u2029]' THEN
    v_key := 'sha256:' || encode(sha256(convert_to(v_key, 'UTF8')), 'hex');
  END IF;
  RETURN p_task || ':' || v_key;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_unique_key(jsonb, text, jsonb) FROM PUBLIC;

-- Adds a job of a unique task, or returns the job that represents it. With the caller's rights (a client calls
-- dl_enqueue, which has the owner's), in the caller's transaction.
--   did   added; kept: a job that waits (or, with duplicates "open", runs) represents the request; updated: it has got
--         the values of the request; older: the key's newest job is at least as new; NULL: the task's jobs are not
--         unique, or a job has the idempotency key or the ID: the caller checks again
-- The key's open job holds its place in ix_dl_jobs_unique. Either the row is inserted there, or the job with the place
-- is locked and evaluated by its current state; if it has ended meanwhile, the place is free, and everything begins
-- again. While a running job is evaluated and superseded, its entry blocks others until the newer one is committed. A
-- job that represents a request stays locked until the request is committed, so that it does not start before.
CREATE OR REPLACE FUNCTION {schema}.dl_add_unique(
  p_job_id uuid, p_queue text, p_task text, p_args jsonb, p_idempotency_key text, p_lock_key text, p_partition_key text,
  p_priority int, p_available_at timestamptz, p_max_attempts int, p_lease_ttl_sec int, p_lease_s int, p_producer text,
  p_consumer_group text, p_request_hash bytea, p_root uuid, p_version float8,
  OUT job_id uuid, OUT did text, OUT status text, OUT queue text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off
SET lock_timeout = '5s'
AS $$
#variable_conflict use_column
DECLARE
  v_task {schema}.dl_tasks;
  v_key text;
  v_lock_key text;
  v_duplicates text;
  v_version float8;
  v_superseded boolean := false;
  v_is_known boolean;
  v_open record;
  v_newest record;
BEGIN
  SELECT * INTO v_task FROM {schema}.dl_tasks t WHERE t.task = p_task;
  v_duplicates := v_task.uniqueness ->> 'duplicates';
  IF p_version IS NOT NULL AND v_duplicates IS DISTINCT FROM 'update' THEN
    PERFORM {schema}.dl_refuse('version', format(
      'is not supported by the task %s, which does not update waiting jobs (unique=…, duplicates="update")', to_json(p_task)));
  ELSIF p_version IN ('NaN', 'Infinity', '-Infinity') THEN
    PERFORM {schema}.dl_refuse('version', format('must be a finite number, not %s', p_version));
  ELSIF v_task.uniqueness IS NULL THEN
    RETURN;
  ELSIF current_setting('transaction_isolation') <> 'read committed' THEN
    -- Each read has to see the commits of others since.
    RAISE EXCEPTION USING ERRCODE = 'feature_not_supported', MESSAGE = format(
      'jobs of the unique task %s need the isolation level READ COMMITTED, not %s',
      to_json(p_task), upper(current_setting('transaction_isolation')));
  END IF;
  v_key := {schema}.dl_unique_key(v_task.uniqueness, p_task, p_args);
  v_lock_key := coalesce(p_lock_key, CASE WHEN v_task.lock_key IS NOT NULL
                                          THEN {schema}.dl_key('lock_key', v_task.lock_key, p_task, p_args) END, v_key);
  queue := coalesce(p_queue, v_task.queue,
                    {schema}.dl_refuse('queue', format('is required, because the task %s has no queue', to_json(p_task))));

  FOR attempt IN 1 .. 100 LOOP
    IF v_duplicates = 'update' THEN
      SELECT j.job_id, j.status, j.queue, j.version INTO v_newest FROM {schema}.dl_jobs j
      WHERE j.unique_key = v_key AND j.version IS NOT NULL ORDER BY j.version DESC LIMIT 1;
      IF v_newest.job_id = p_job_id THEN
        RETURN;
      ELSIF p_version <= v_newest.version THEN
        SELECT v_newest.job_id, 'older', v_newest.status, v_newest.queue INTO job_id, did, status, queue;
        RETURN;
      END IF;
      -- A request without a version is as new as the moment of its evaluation, whatever a clock was set to meanwhile.
      v_version := coalesce(p_version, greatest(extract(epoch FROM clock_timestamp())::float8, v_newest.version));
    END IF;

    INSERT INTO {schema}.dl_jobs AS j (
      job_id, queue, task, args, idempotency_key, lock_key, keyed, partition_key, priority, available_at, max_attempts,
      lease_ttl_sec, producer, consumer_group, request_hash, root_id, unique_key, version, requested_version, lane)
    SELECT p_job_id, queue, p_task, p_args, p_idempotency_key, v_lock_key, true, p_partition_key,
           coalesce(p_priority, v_task.priority, {default_priority}), coalesce(p_available_at, now()),
           coalesce(p_max_attempts, v_task.max_attempts, {default_max_attempts}), coalesce(p_lease_ttl_sec, v_task.lease_ttl_sec, p_lease_s),
           p_producer, p_consumer_group, p_request_hash,
           coalesce((SELECT p.root_id FROM {schema}.dl_jobs p WHERE p.job_id = p_root), p_root), v_key, v_version, p_version,
           CASE WHEN v_task.limited THEN p_task END
    ON CONFLICT DO NOTHING
    RETURNING j.job_id INTO job_id;
    IF job_id IS NOT NULL THEN
      IF p_version IS NOT NULL THEN
        -- In a new snapshot: a newer one may have arrived and ended since the check above.
        SELECT j.job_id, j.status, j.queue INTO v_newest FROM {schema}.dl_jobs j
        WHERE j.unique_key = v_key AND j.version >= p_version AND j.job_id <> p_job_id ORDER BY j.version DESC LIMIT 1;
        IF FOUND THEN
          DELETE FROM {schema}.dl_jobs j WHERE j.job_id = p_job_id;
          SELECT v_newest.job_id, 'older', v_newest.status, v_newest.queue INTO job_id, did, status, queue;
          RETURN;
        END IF;
      END IF;
      did := 'added';
    ELSE
      v_is_known := EXISTS (SELECT FROM {schema}.dl_jobs j WHERE j.idempotency_key = p_idempotency_key)
                    OR EXISTS (SELECT FROM {schema}.dl_jobs j WHERE j.job_id = p_job_id);
      IF v_is_known AND v_superseded THEN
        RAISE EXCEPTION USING ERRCODE = 'unique_violation', COLUMN = 'idempotency_key',
          MESSAGE = 'another job with this idempotency key or ID was added in the meantime';
      ELSIF v_is_known THEN
        RETURN;
      END IF;
      SELECT j.job_id, j.status, j.queue, j.cancel_requested, j.version INTO v_open FROM {schema}.dl_jobs j
      WHERE j.unique_key = v_key AND j.status IN ('queued', 'running') AND j.superseded_by IS NULL FOR NO KEY UPDATE;
      CONTINUE WHEN NOT FOUND;
      IF v_open.status = 'queued' AND v_open.cancel_requested THEN
        -- It will not run, so it represents no request.
        UPDATE {schema}.dl_jobs j SET status = 'canceled', waits_for = NULL, finished_at = clock_timestamp()
        WHERE j.job_id = v_open.job_id;
        INSERT INTO {schema}.dl_job_events (job_id, queue, kind, payload)
        VALUES (v_open.job_id, v_open.queue, 'canceled', '{"reason": "cancel_requested"}');
        CONTINUE;
      ELSIF v_duplicates = 'update' AND v_open.version >= v_version AND p_version IS NOT NULL THEN
        SELECT v_open.job_id, 'older', v_open.status, v_open.queue INTO job_id, did, status, queue;
        RETURN;
      ELSIF v_open.status = 'queued' AND v_duplicates = 'update' THEN
        UPDATE {schema}.dl_jobs j
        SET queue = dl_add_unique.queue, args = p_args, lock_key = v_lock_key, keyed = true, partition_key = p_partition_key,
            priority = coalesce(p_priority, v_task.priority, {default_priority}),
            available_at = CASE WHEN (v_task.uniqueness ->> 'keep_time')::boolean THEN j.available_at
                                ELSE coalesce(p_available_at, now()) END,
            waits_for = NULL, max_attempts = coalesce(p_max_attempts, v_task.max_attempts, {default_max_attempts}),
            lease_ttl_sec = coalesce(p_lease_ttl_sec, v_task.lease_ttl_sec, p_lease_s), producer = p_producer,
            consumer_group = p_consumer_group, version = greatest(v_version, j.version), requested_version = p_version, attempt = 0, crashes = 0, refunds = 0,
            error = NULL, result = NULL, started_at = NULL, heartbeat_at = NULL
        WHERE j.job_id = v_open.job_id;
        INSERT INTO {schema}.dl_job_events (job_id, queue, kind, payload)
        VALUES (v_open.job_id, queue, 'updated', jsonb_build_object('version', v_version));
        SELECT v_open.job_id, 'updated', 'queued' INTO job_id, did, status;
        RETURN;
      ELSIF v_open.status = 'queued' OR v_duplicates = 'open' AND NOT v_open.cancel_requested THEN
        SELECT v_open.job_id, 'kept', v_open.status, v_open.queue INTO job_id, did, status, queue;
        RETURN;
      END IF;
      -- Its place is free now, only for this transaction.
      UPDATE {schema}.dl_jobs j
      SET superseded_by = p_job_id,
          cancel_requested = j.cancel_requested OR (v_task.uniqueness ->> 'when_running' = 'cancel') IS TRUE
      WHERE j.job_id = v_open.job_id;
      INSERT INTO {schema}.dl_job_events (job_id, queue, kind, payload)
      VALUES (v_open.job_id, v_open.queue, 'superseded', jsonb_build_object('by', p_job_id));
      v_superseded := true;
      CONTINUE;
    END IF;
    INSERT INTO {schema}.dl_job_events (job_id, queue, kind) VALUES (p_job_id, queue, 'queued');
    status := 'queued';
    RETURN;
  END LOOP;
  RAISE EXCEPTION USING ERRCODE = 'serialization_failure',
    MESSAGE = format('jobs of the unique key %s repeatedly appeared and ended while this job was being added', to_json(v_key));
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_add_unique(uuid, text, text, jsonb, text, text, text, int, timestamptz, int, int, int, text,
                                              text, bytea, uuid, float8) FROM PUBLIC;
