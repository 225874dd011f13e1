-- Operations on keys: release, check, make the next job ready. With the caller's rights and with pinned plans, as the
-- claim.

-- Whether a lease that has ended by the clock still counts: it was renewed before the clock jumped ahead (dl_history),
-- and its length has not passed since. Its worker, if it is disconnected from the database, goes by its own clock. A
-- jump in the future is from a clock that has been corrected: it does not count any more, since otherwise no lease
-- would end until then. (Within ten seconds, it may be a jump that was recorded after now().)
CREATE OR REPLACE FUNCTION {schema}.dl_lease_counts(p_renewed_at timestamptz, p_ttl_sec int) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN EXISTS (SELECT FROM {schema}.dl_history h
                 WHERE h.clock_jumped_at > p_renewed_at AND h.clock_jumped_at + make_interval(secs => p_ttl_sec) > now()
                   AND h.clock_jumped_at < now() + interval '10 s');
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_lease_counts(timestamptz, int) FROM PUBLIC;

-- Makes the best parked job of each key ready; returns their number.
-- It waits some milliseconds in total for a locked row: a session that begins to watch a job locks it for one, and if
-- it is the only job of its key, it would not be woken before the sweep. It does not use a lock wait: a row locked in a
-- psql session must not delay the claims.
CREATE OR REPLACE FUNCTION {schema}.dl_ready_next(p_hashes int[]) RETURNS int
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off
SET enable_sort = off SET jit = off
AS $$
DECLARE
  v_left int[] := p_hashes;
  v_now int;
  v_count int := 0;
BEGIN
  FOR attempt IN 1 .. 5 LOOP
    WITH waiting AS MATERIALIZED (
      SELECT k.h
      FROM (SELECT DISTINCT u.h FROM unnest(v_left) AS u (h)) AS k
      CROSS JOIN LATERAL (
        SELECT FROM {schema}.dl_jobs j
        WHERE j.status = 'queued' AND j.waits_for = 'lock' AND hashtext(j.lock_key) = k.h
        ORDER BY j.priority, j.created_at, j.job_id
        LIMIT 1
      ) AS one
    ), best AS MATERIALIZED (
      SELECT w.h, p.job_id
      FROM waiting w
      CROSS JOIN LATERAL (
        SELECT j.job_id FROM {schema}.dl_jobs j
        WHERE j.status = 'queued' AND j.waits_for = 'lock' AND hashtext(j.lock_key) = w.h
        ORDER BY j.priority, j.created_at, j.job_id
        LIMIT 1
        FOR NO KEY UPDATE SKIP LOCKED
      ) AS p
    ), readied AS (
      UPDATE {schema}.dl_jobs j SET waits_for = NULL, available_at = least(j.available_at, now())
      FROM best b WHERE j.job_id = ANY (ARRAY[b.job_id])
      RETURNING b.h
    )
    SELECT ARRAY(SELECT w.h FROM waiting w WHERE w.h <> ALL (ARRAY(SELECT r.h FROM readied r))),
           (SELECT count(*) FROM readied)
    INTO v_left, v_now;
    v_count := v_count + v_now;
    EXIT WHEN cardinality(v_left) = 0 OR attempt = 5;
    PERFORM pg_sleep(0.001 * 2 ^ attempt);
  END LOOP;
  RETURN v_count;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_ready_next(int[]) FROM PUBLIC;

-- The end of a run, after the commit of its outcome: frees the keys on the session that holds them, and then, in a new
-- snapshot, wakes the next job of each key. In this order, neither a finish nor a park can miss the other.
CREATE OR REPLACE FUNCTION {schema}.dl_release(p_hashes int[]) RETURNS int
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM pg_advisory_unlock(u.h) FROM unnest(p_hashes) AS u (h);
  RETURN {schema}.dl_ready_next(p_hashes);
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_release(int[]) FROM PUBLIC;

-- The keys that are free, until the end of the transaction. For any session except one that holds advisory locks, which
-- are re-entrant within it.
-- The lock is tried in shared mode: it detects a holder, and two checks of one key do not block each other. (In
-- exclusive mode, both could miss a job that was parked during a check.)
CREATE OR REPLACE FUNCTION {schema}.dl_free_keys(p_hashes int[]) RETURNS int[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off
SET enable_sort = off SET jit = off
AS $$
DECLARE
  v_free int[];
  v_live int[];
BEGIN
  WITH tried AS MATERIALIZED (
    SELECT k.h, pg_try_advisory_xact_lock_shared(k.h) AS got FROM (SELECT DISTINCT u.h FROM unnest(p_hashes) AS u (h)) AS k
  )
  SELECT array_agg(h) FILTER (WHERE got) INTO v_free FROM tried;
  SELECT array_agg(k.h) INTO v_live
  FROM unnest(v_free) AS k (h)
  CROSS JOIN LATERAL (
    SELECT FROM {schema}.dl_jobs r
    WHERE r.status = 'running' AND r.keyed AND hashtext(r.lock_key) BETWEEN k.h AND k.h AND (r.lease_expires_at > now() OR {schema}.dl_lease_counts(r.heartbeat_at, r.lease_ttl_sec)) IS TRUE
    ORDER BY hashtext(r.lock_key), r.job_id LIMIT 1
  ) AS live;
  RETURN ARRAY(SELECT u.h FROM unnest(v_free) AS u (h) WHERE u.h <> ALL (coalesce(v_live, '{}')));
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_free_keys(int[]) FROM PUBLIC;

-- After the commit of a park, and after a reaped or canceled job: wakes the next job of the keys that are free. Keys
-- without waiting jobs are left out, because the check would park a job that is claimed meanwhile. (A park with a later
-- commit is followed by its own check.)
CREATE OR REPLACE FUNCTION {schema}.dl_unpark(p_hashes int[]) RETURNS int
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off
SET enable_sort = off SET jit = off
AS $$
DECLARE
  v_awaited int[];
BEGIN
  SELECT array_agg(k.h) INTO v_awaited
  FROM unnest(p_hashes) AS k (h)
  CROSS JOIN LATERAL (
    SELECT FROM {schema}.dl_jobs j
    WHERE j.status = 'queued' AND j.waits_for = 'lock' AND hashtext(j.lock_key) = k.h
    ORDER BY j.priority, j.created_at, j.job_id
    LIMIT 1
  ) AS waiting;
  RETURN CASE WHEN v_awaited IS NULL THEN 0 ELSE {schema}.dl_ready_next({schema}.dl_free_keys(v_awaited)) END;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_unpark(int[]) FROM PUBLIC;

-- The same in the stager's sweep, which also checks whether a key's best job is in a queue that is paused or has no
-- worker (no sign of life for a minute: ALIVE_WITHIN_S in store/queue/worker_rows.py). Such a job, once ready, stays in
-- its queue, so that no end of a run would wake the next one. Therefore such jobs are made ready together, at most
-- p_limit of a key and four times as many in total; no claim parks them again. The keys are in random order, so that
-- one with many jobs does not delay the others. (Queues of services that are not in dl_workers count as queues without
-- a worker.)
CREATE OR REPLACE FUNCTION {schema}.dl_sweep_parked(p_hashes int[], p_limit int) RETURNS int
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off
SET enable_sort = off SET jit = off
AS $$
DECLARE
  v_free int[] := {schema}.dl_free_keys(p_hashes);
  v_served text[];
  v_count int := 0;
BEGIN
  SELECT array_agg(DISTINCT s.queue) INTO v_served
  FROM {schema}.dl_workers w
  CROSS JOIN LATERAL jsonb_object_keys(w.queues) AS s (queue)
  WHERE w.seen_at > now() - interval '60 s'
    AND NOT EXISTS (SELECT FROM {schema}.dl_queues q WHERE q.queue = s.queue AND q.paused);
  IF v_served IS NOT NULL THEN
    WITH blocked AS MATERIALIZED (
      SELECT k.h
      FROM unnest(v_free) AS k (h)
      CROSS JOIN LATERAL (
        SELECT j.queue FROM {schema}.dl_jobs j
        WHERE j.status = 'queued' AND j.waits_for = 'lock' AND hashtext(j.lock_key) = k.h
        ORDER BY j.priority, j.created_at, j.job_id
        LIMIT 1
      ) AS best
      WHERE best.queue <> ALL (v_served)
      ORDER BY random()
    ), stranded AS MATERIALIZED (
      SELECT p.job_id
      FROM blocked b
      CROSS JOIN LATERAL (
        SELECT j.job_id FROM {schema}.dl_jobs j
        WHERE j.status = 'queued' AND j.waits_for = 'lock' AND hashtext(j.lock_key) = b.h AND j.queue <> ALL (v_served)
        ORDER BY j.priority, j.created_at, j.job_id
        LIMIT p_limit
        FOR NO KEY UPDATE SKIP LOCKED
      ) AS p
      LIMIT 4 * p_limit
    )
    UPDATE {schema}.dl_jobs j SET waits_for = NULL, available_at = least(j.available_at, now())
    FROM stranded s WHERE j.job_id = ANY (ARRAY[s.job_id]);
    GET DIAGNOSTICS v_count = ROW_COUNT;
  END IF;
  RETURN v_count + {schema}.dl_ready_next(v_free);
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_sweep_parked(int[], int) FROM PUBLIC;

-- The keys with parked jobs, from p_after on, at most p_limit: one index probe for each key, whatever the number of its
-- jobs.
CREATE OR REPLACE FUNCTION {schema}.dl_parked_keys(p_after bigint, p_limit int) RETURNS SETOF int
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
AS $$
  WITH RECURSIVE keys (h, n) AS (
    (SELECT hashtext(j.lock_key), 1 FROM {schema}.dl_jobs j
     WHERE j.status = 'queued' AND j.waits_for = 'lock' AND hashtext(j.lock_key) > p_after
     ORDER BY hashtext(j.lock_key) LIMIT 1)
    UNION ALL
    SELECT (SELECT hashtext(j.lock_key) FROM {schema}.dl_jobs j
            WHERE j.status = 'queued' AND j.waits_for = 'lock' AND hashtext(j.lock_key) > k.h
            ORDER BY hashtext(j.lock_key) LIMIT 1), k.n + 1
    FROM keys k WHERE k.h IS NOT NULL AND k.n < p_limit
  )
  SELECT h FROM keys WHERE h IS NOT NULL
$$;
REVOKE ALL ON FUNCTION {schema}.dl_parked_keys(bigint, int) FROM PUBLIC;
