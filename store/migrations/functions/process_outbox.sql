-- Deliveries of durable processes. A row of the outbox is written together with the change; afterwards, in a new
-- snapshot, its partition gets a job that delivers it. Lock order: process rows, then the outbox; a partition's row,
-- then dl_jobs. A delivering run locks no process while it has locked its partition's row.

-- The ident of a result of a step with the ident p_of: the same for the same content, another one for other content.
-- Random if the step has none, because a program of an earlier release has begun it. The function body is parsed when
-- the function is created, so that it can be inlined.
CREATE OR REPLACE FUNCTION {schema}.dl_process_ident(p_of uuid, p_content text) RETURNS uuid LANGUAGE sql VOLATILE
RETURN coalesce(encode(substr(sha256(uuid_send(p_of) || convert_to(p_content, 'UTF8')), 1, 16), 'hex')::uuid, gen_random_uuid());
REVOKE ALL ON FUNCTION {schema}.dl_process_ident(uuid, text) FROM PUBLIC;

-- Writes deliveries to the sinks about a change of these processes, whose rows the caller has locked.
CREATE OR REPLACE FUNCTION {schema}.dl_process_tell(p_keys bigint[], p_kind text, p_reason text) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
AS $$
BEGIN
  -- An operator's change has a random ident; the end of a step has one that is derived from the step's.
  INSERT INTO {schema}.dl_process_outbox (sink, partition, key, task_id, kind, body, ident)
  SELECT k.sink, hashtext(p.type || '/' || p.process_id) & 15, p.key, p.running_task, p_kind, to_jsonb(p_reason),
         CASE p_kind WHEN 'failed' THEN {schema}.dl_process_ident(p.running_ident, concat_ws(E'\n', p_kind, p_reason)) ELSE gen_random_uuid() END
  FROM {schema}.dl_processes p
  JOIN {schema}.dl_process_sinks k
    ON k.until > statement_timestamp() AND p_kind = ANY (k.kinds) AND (k.types IS NULL OR p.type = ANY (k.types))
  WHERE p.key = ANY (p_keys);
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_tell(bigint[], text, text) FROM PUBLIC;

-- Writes the deliveries of steps, just before dl_process_commit_steps writes the steps; it has the same arguments and
-- locks: p_locked are the processes and p_fenced the jobs that it has locked. The ident of a row is a hash of the
-- step's ident and the content. So if the step runs again because its commit was lost with the database, the same
-- content, and nothing else, is delivered with the same key.
CREATE OR REPLACE FUNCTION {schema}.dl_process_send(
  p_keys bigint[], p_jobs uuid[], p_tokens bigint[], p_tasks bigint[], p_outcomes text[], p_errors text[], p_events text[],
  p_next text[], p_messages text[], p_locked bigint[], p_fenced uuid[]) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off
AS $$
BEGIN
  INSERT INTO {schema}.dl_process_outbox (sink, partition, key, task_id, event_id, kind, body, ident)
  WITH step AS MATERIALIZED (
    SELECT a.*, p.type, p.running_ident, hashtext(p.type || '/' || p.process_id) & 15 AS partition, p.status AS was, p.running_kind, p.last_event_id,
           a.outcome = 'done' AND (a.next = 'gone' OR p.running_kind = 'remove') AS goes
    FROM unnest(p_keys, p_jobs, p_tokens, p_tasks, p_outcomes, p_errors, p_events, p_next, p_messages)
      AS a (key, job_id, token, task, outcome, error, events, next, messages)
    JOIN {schema}.dl_processes p ON p.key = ANY (ARRAY[a.key])
    WHERE a.key = ANY (p_locked) AND a.job_id = ANY (p_fenced)
      AND p.running_task = a.task AND p.running_token = a.token AND p.removed_at IS NULL
  ), told AS (
    SELECT s.*, 1 AS part, 0::bigint AS number, 'created' AS kind, NULL::jsonb AS body, NULL::jsonb AS payload FROM step s
    WHERE s.outcome = 'done' AND s.running_kind = 'init'
    UNION ALL
    SELECT s.*, 1, 0, 'repaired', NULL, NULL FROM step s WHERE s.outcome = 'done' AND s.was = 'error' AND NOT s.goes
    UNION ALL
    SELECT s.*, 2, e.number, 'event', NULL, e.payload
    FROM step s CROSS JOIN LATERAL jsonb_array_elements(s.events::jsonb) WITH ORDINALITY AS e (payload, number)
    WHERE s.outcome = 'done'
    UNION ALL
    SELECT s.*, 4, 0, 'failed', to_jsonb(s.error), NULL FROM step s WHERE s.outcome = 'failed' AND s.running_kind <> 'repair'
    UNION ALL
    SELECT s.*, 4, 0, 'removed', NULL, NULL FROM step s WHERE s.goes
  ), rows AS (
    SELECT k.sink, t.partition, t.key, t.task, CASE t.kind WHEN 'event' THEN t.last_event_id + t.number END AS event_id, t.kind, t.body,
           t.part, t.number, t.running_ident, coalesce(t.payload, t.body)::text AS content
    FROM told t
    JOIN {schema}.dl_process_sinks k
      ON k.until > statement_timestamp() AND t.kind = ANY (k.kinds) AND (k.types IS NULL OR t.type = ANY (k.types))
    UNION ALL
    SELECT 'messages', s.partition, s.key, s.task, NULL, m.message ->> 'kind', m.message, 3, m.number, s.running_ident,
           m.message::text
    FROM step s CROSS JOIN LATERAL jsonb_array_elements(s.messages::jsonb) WITH ORDINALITY AS m (message, number)
    WHERE s.outcome = 'done'
  )
  SELECT r.sink, r.partition, r.key, r.task, r.event_id, r.kind, r.body,
         {schema}.dl_process_ident(r.running_ident, concat_ws(E'\n', r.part, r.kind, coalesce(r.event_id, r.number), r.content))
  FROM rows r ORDER BY r.key, r.part, r.number;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_send(bigint[], uuid[], bigint[], bigint[], text[], text[], text[], text[], text[],
                                                bigint[], uuid[]) FROM PUBLIC;

-- Adds the job that delivers the rows of a partition, whose row the caller has locked.
CREATE OR REPLACE FUNCTION {schema}.dl_process_add_delivery(p_sink text, p_partition int, p_lease_s int) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
AS $$
DECLARE
  v_job uuid := gen_random_uuid();
BEGIN
  INSERT INTO {schema}.dl_jobs (job_id, queue, task, args, lock_key, keyed, max_attempts, lease_ttl_sec)
  VALUES (v_job, 'deliveries', 'process.sink/' || p_sink,
          jsonb_build_object('sink', p_sink, 'partition', p_partition), v_job::text, false, 1000000, p_lease_s);
  UPDATE {schema}.dl_process_partitions p SET job_id = v_job WHERE p.sink = p_sink AND p.partition = p_partition;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_add_delivery(text, int, int) FROM PUBLIC;

-- Ensures that each partition with something to deliver now has a job for it; returns the number of partitions with
-- rows. A partition whose job runs needs nothing: that job checks again after its last write.
CREATE OR REPLACE FUNCTION {schema}.dl_process_post(p_lease_s int) RETURNS int
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
AS $$
DECLARE
  v_found int := 0;
  v_part record;
  v_status text;
  v_waits text;
  v_job uuid;
BEGIN
  FOR v_part IN
    WITH RECURSIVE filled AS (
      (SELECT o.sink, o.partition FROM {schema}.dl_process_outbox o WHERE NOT o.held_up
       ORDER BY o.sink, o.partition LIMIT 1)
      UNION ALL
      SELECT n.* FROM filled f CROSS JOIN LATERAL (
        SELECT u.* FROM (
          (SELECT o.sink, o.partition FROM {schema}.dl_process_outbox o
           WHERE o.sink = f.sink AND NOT o.held_up AND o.partition > f.partition ORDER BY o.partition LIMIT 1)
          UNION ALL
          (SELECT o.sink, o.partition FROM {schema}.dl_process_outbox o
           WHERE o.sink > f.sink AND NOT o.held_up ORDER BY o.sink, o.partition LIMIT 1)) AS u
        ORDER BY u.sink, u.partition LIMIT 1) AS n
    ), late AS (
      -- Each partition separately: due rows for a sink without a deliverer must not block others.
      SELECT p.sink, p.partition FROM {schema}.dl_process_partitions p
      WHERE EXISTS (SELECT FROM {schema}.dl_process_holdups h
                    WHERE h.sink = p.sink AND h.partition = p.partition AND h.next_at <= statement_timestamp())
    )
    SELECT w.sink, w.partition, p.job_id, j.status, j.waits_for FROM (SELECT * FROM filled UNION SELECT * FROM late) AS w
    LEFT JOIN {schema}.dl_process_partitions p ON p.sink = w.sink AND p.partition = w.partition
    LEFT JOIN {schema}.dl_jobs j ON j.job_id = p.job_id
    ORDER BY w.sink, w.partition
  LOOP
    v_found := v_found + 1;
    CONTINUE WHEN v_part.status = 'running' OR v_part.status = 'queued' AND v_part.waits_for IS DISTINCT FROM 'time';
    INSERT INTO {schema}.dl_process_partitions (sink, partition) VALUES (v_part.sink, v_part.partition) ON CONFLICT DO NOTHING;
    SELECT p.job_id INTO v_job FROM {schema}.dl_process_partitions p
    WHERE p.sink = v_part.sink AND p.partition = v_part.partition FOR NO KEY UPDATE;
    SELECT j.status, j.waits_for INTO v_status, v_waits FROM {schema}.dl_jobs j WHERE j.job_id = v_job;
    IF v_status = 'queued' AND v_waits = 'time' THEN
      UPDATE {schema}.dl_jobs j SET available_at = now(), waits_for = NULL
      WHERE j.job_id = v_job AND j.status = 'queued' AND j.waits_for = 'time';
    ELSIF v_status IS NULL OR v_status NOT IN ('queued', 'running') THEN
      PERFORM {schema}.dl_process_add_delivery(v_part.sink, v_part.partition, p_lease_s);
    END IF;
  END LOOP;
  RETURN v_found;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_post(int) FROM PUBLIC;

-- Writes the results of deliveries. p_done are delivered rows, and p_idents their idents, since after a restore the
-- number of such a row may belong to another one, which was not delivered. p_mended are processes that were held up and
-- continue. p_failed are processes whose first row could not be delivered, with the reason. p_behind are processes that
-- are held up and have new rows. A process is held after p_tries failures in a row. Between two attempts are p_base_s
-- seconds, doubled each time, up to p_cap_s. Returns false if the partition belongs to another run; then only the
-- delivered rows are written.
CREATE OR REPLACE FUNCTION {schema}.dl_process_settle_rows(
  p_sink text, p_partition int, p_job uuid, p_token bigint, p_done bigint[], p_idents uuid[], p_mended bigint[], p_failed bigint[], p_errors text[],
  p_behind bigint[], p_tries int, p_base_s float8, p_cap_s float8) RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
AS $$
DECLARE
  v_ours boolean := true;
BEGIN
  IF p_mended <> '{}' OR p_failed <> '{}' OR p_behind <> '{}' THEN
    PERFORM FROM {schema}.dl_process_partitions p WHERE p.sink = p_sink AND p.partition = p_partition FOR NO KEY UPDATE;
    v_ours := EXISTS (SELECT FROM {schema}.dl_jobs j WHERE j.job_id = p_job AND j.token = p_token AND j.status = 'running');
  END IF;
  DELETE FROM {schema}.dl_process_outbox o
  WHERE o.id = ANY (p_done) AND o.ident IS NOT DISTINCT FROM p_idents[array_position(p_done, o.id)];
  IF NOT v_ours THEN
    RETURN false;
  END IF;
  IF p_failed <> '{}' THEN
    INSERT INTO {schema}.dl_process_holdups AS h (sink, key, partition, tries, next_at, error)
    SELECT p_sink, f.key, p_partition, 1,
           CASE WHEN p_tries > 1 THEN statement_timestamp() + make_interval(secs => p_base_s) END, f.error
    FROM unnest(p_failed, p_errors) AS f (key, error)
    ON CONFLICT (sink, key) DO UPDATE SET
      tries = h.tries + 1, error = excluded.error,
      next_at = CASE WHEN h.tries + 1 < p_tries
                     THEN statement_timestamp() + make_interval(secs => least(p_cap_s, p_base_s * 2 ^ least(h.tries, 30))) END;
  END IF;
  IF p_failed <> '{}' OR p_behind <> '{}' THEN
    UPDATE {schema}.dl_process_outbox o SET held_up = true
    FROM {schema}.dl_process_holdups h
    WHERE h.sink = p_sink AND h.key = ANY (p_failed || p_behind) AND o.key = h.key AND o.sink = p_sink AND NOT o.held_up;
  END IF;
  IF p_mended <> '{}' THEN
    DELETE FROM {schema}.dl_process_holdups h WHERE h.sink = p_sink AND h.key = ANY (p_mended);
    UPDATE {schema}.dl_process_outbox o SET held_up = false WHERE o.key = ANY (p_mended) AND o.sink = p_sink AND o.held_up;
  END IF;
  RETURN true;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_settle_rows(text, int, uuid, bigint, bigint[], uuid[], bigint[], bigint[], text[], bigint[],
                                                       int, float8, float8) FROM PUBLIC;

-- The last write of a job that delivers: it ends, or waits for the next attempt. p_yield: it makes room for other
-- partitions.
--   more  there is something to deliver        rest  it has ended, or waits        void  the partition belongs to
--         another run
CREATE OR REPLACE FUNCTION {schema}.dl_process_rest(
  p_sink text, p_partition int, p_job uuid, p_token bigint, p_yield boolean, p_lease_s int) RETURNS text
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
AS $$
DECLARE
  v_next timestamptz;
  v_more boolean;
BEGIN
  PERFORM FROM {schema}.dl_process_partitions p WHERE p.sink = p_sink AND p.partition = p_partition FOR NO KEY UPDATE;
  PERFORM FROM {schema}.dl_jobs j WHERE j.job_id = p_job AND j.token = p_token AND j.status = 'running' FOR NO KEY UPDATE;
  IF NOT FOUND THEN
    RETURN 'void';
  END IF;
  -- A message is deleted by the statement that delivers it: its hold-up may remain if its run was killed.
  DELETE FROM {schema}.dl_process_holdups h
  WHERE h.sink = p_sink AND h.partition = p_partition AND h.next_at <= statement_timestamp()
    AND NOT EXISTS (SELECT FROM {schema}.dl_process_outbox o WHERE o.key = h.key AND o.sink = h.sink);
  SELECT min(h.next_at) INTO v_next FROM {schema}.dl_process_holdups h WHERE h.sink = p_sink AND h.partition = p_partition;
  v_more := coalesce(v_next <= statement_timestamp(), false) OR EXISTS (
    SELECT FROM {schema}.dl_process_outbox o WHERE o.sink = p_sink AND NOT o.held_up AND o.partition = p_partition);
  IF v_more AND NOT p_yield THEN
    RETURN 'more';
  END IF;
  IF v_more OR v_next IS NULL THEN
    DELETE FROM {schema}.dl_jobs j WHERE j.job_id = p_job;
    UPDATE {schema}.dl_process_partitions p SET job_id = NULL WHERE p.sink = p_sink AND p.partition = p_partition;
    IF v_more THEN  -- a new job comes after those of other partitions
      PERFORM {schema}.dl_process_add_delivery(p_sink, p_partition, p_lease_s);
    END IF;
  ELSE
    UPDATE {schema}.dl_jobs j SET status = 'queued', available_at = v_next, waits_for = 'time', attempt = 0,
      lease_expires_at = NULL, claimed_by = NULL, cancel_requested = false
    WHERE j.job_id = p_job;
  END IF;
  RETURN 'rest';
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_process_rest(text, int, uuid, bigint, boolean, int) FROM PUBLIC;
