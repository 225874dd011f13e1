-- The claim: a statement that needs two snapshots and one round trip, with advisory locks between them.
-- It runs with the caller's rights. The plans are pinned: nothing may be scanned or sorted, so only the index that has
-- the required order remains, whatever the statistics say. (A plan made while the queue was empty scanned the
-- document's claim index for each key; with a parameter as LIMIT, a generic plan became a hash join over the table.)
-- For the same reason, lookups of one row have an ORDER BY, BETWEEN is used instead of =, and joins by ID are written
-- as = ANY (ARRAY[…]): for a table without a page all scans have the same cost, and these leave only one choice.

-- A token is 53 random bits (exact in JSON), never 0. It does not depend on the state of the database, so a restored
-- database, or a promoted standby, cannot issue a token again. Tokens have no order.

-- Reads up to p_limit ready jobs of a queue and claims up to p_slots of them for p_worker, on the session that holds
-- the worker's advisory locks. A p_limit above p_slots parks many waiting jobs of one key together.
-- A job without a key (keyed is false) takes no lock: the row's own lock makes it ours alone, also against other
-- claims. Its lock_hash and lock_key are NULL.
-- First it frees the keys of ended jobs, p_freed, like dl_release, so that one round trip does both.
-- Ready jobs whose task is not in p_tasks are skipped: they are neither locked nor written, so jobs that one program
-- does not know are never delayed by it. A job with cancel_requested ends, whatever its task is.
-- It reads from the job p_after on, the last one that an earlier claim has read, or from the first. While a session
-- holds an old snapshot, the entries of jobs that were claimed since stay in the index, and each claim would read all
-- of them.
-- One row for each candidate, with its verdict:
--   run       it is ours now. The other columns are filled, except args of more than 16 MiB (MAX_ARGS_BYTES in
--             jobs/model.py), which another service has written and which no worker should have to hold. Args that the
--             row has compressed to less than 64 kB are never longer. JSON of more than 64 MiB in PostgreSQL's own form
--             always is (a digit in a list takes 3 bytes as text and 12 in that form), and is not converted to text.
--             `more` has the values that only some jobs have; NULL for all others
--   busy      its key is held by another session: parked; the caller checks lock_hash again after the commit
--   held      its key is held by this worker, or went to an earlier candidate: parked, and our own release wakes it
--   canceled  it had cancel_requested and has ended
--   limit     its task has limits, which were not known when the job was added: moved into the lane of the task
--   over      in a lane: the rest of its supplier's rate limits went to jobs of other lanes; unchanged
--   later     (one row for all of them) it could run, but p_slots were taken, or args before it are large (see
--             `large`); unchanged
-- One more row, if jobs were left for later because the args of jobs before them have more than 1 MiB, as compressed in
-- their rows. A row of 3 MB may be 260 MB of JSON, so a claim reads few of them; the first candidate is claimed with
-- any args:
--   large     more jobs can run: make the next claim immediately, and do not read more candidates for it
-- One more row for the last candidate, if none was left for later:
--   last      the next claim may continue behind it
-- One more row, if fewer than p_limit were found, and ready jobs are left that another session has locked at the
-- moment:
--   locked    make another claim soon; the release of a lock sends no notification
-- One more row, if the scan from the first ready job has read more than 10,000 jobs (about 5 ms):
--   blocked   jobs of unknown tasks are in front: actors/block_filer.py moves them away. The search for locked jobs,
--             which would read them again, is left out
-- p_limited are the tasks of p_tasks whose jobs wait in a lane, p_lanes the lanes of p_tasks that should be read. The
-- jobs of open lanes are candidates, too, in one order with the ready jobs, at most p_limit of each lane. If p_tasks is
-- NULL, they are the only candidates: no ready job is read. One more row for each of p_lanes:
--   lane      task is its name, args the reason why no more of its jobs may start (NULL: there is none), waited_s the
--             seconds until it should be read again (NULL: after a notification)
CREATE OR REPLACE FUNCTION {schema}.dl_claim_known(
  p_queue text, p_limit int, p_slots int, p_worker text, p_tasks text[], p_held int[], p_backoff_s float8, p_freed int[],
  p_after uuid, p_limited text[], p_lanes text[])
RETURNS TABLE (verdict text, lock_hash int, job_id uuid, token bigint, task text, args text, lock_key text,
               partition_key text, attempt int, max_attempts int, lease_s int, waited_s float8, more jsonb)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off
SET enable_sort = off SET jit = off
AS $$
#variable_conflict use_column
DECLARE
  v_jobs uuid[];
  v_hashes int[];
  v_verdicts text[];
  v_keyed boolean;
  v_live int[];
  v_last uuid;
  v_priority int;
  v_created_at timestamptz;
  v_ready int;
  v_open record;
  v_lane text[] := '{}';
  v_allowed int[];
  v_supplier text[];
  v_cost int[];
  v_units bigint[];
  v_margin float8[];
  v_asked int[];
  v_turns uuid[] := '{}';
  v_passed_over boolean[];
  v_job_lanes text[];
  v_behind record;
  v_behinds uuid[];
  v_priorities int[];
  v_created_ats timestamptz[];
  v_untils float8[];
  v_lasts uuid[];
  v_left text[];
  v_began float8;
  v_looked_s float8;
  v_read bigint;
BEGIN
  -- The next job of a freed key may be before p_after.
  IF cardinality(p_freed) > 0 AND {schema}.dl_release(p_freed) > 0 THEN
    p_after := NULL;
  END IF;
  IF EXISTS (SELECT FROM {schema}.dl_queues q WHERE q.queue = p_queue AND q.paused) THEN
    RETURN;
  END IF;

  SELECT j.priority, j.created_at INTO v_priority, v_created_at FROM {schema}.dl_jobs j WHERE j.job_id = p_after ORDER BY j.job_id;

  -- First snapshot: candidates, then locks. Only rows that are already picked and ranked are locked: in one query with
  -- ORDER BY and LIMIT, more rows would be locked than returned.
  IF cardinality(p_lanes) = 0 THEN
    v_read := pg_stat_get_xact_tuples_fetched(to_regclass('{schema}.ix_dl_jobs_ready'));
    WITH picked AS MATERIALIZED (
      SELECT j.job_id, CASE WHEN j.keyed THEN hashtext(j.lock_key) END AS h, j.cancel_requested AS stop, j.priority, j.created_at,
             j.task = ANY (p_limited) AS files, pg_column_size(j.args) AS size
      FROM {schema}.dl_jobs j
      WHERE j.queue = p_queue AND j.status = 'queued' AND j.waits_for IS NULL
        AND (j.priority, j.created_at, j.job_id)
          > (coalesce(v_priority, -1), coalesce(v_created_at, '-infinity'), coalesce(p_after, '00000000-0000-0000-0000-000000000000'))
        AND (j.task = ANY (p_tasks) OR j.cancel_requested)
      ORDER BY j.priority, j.created_at, j.job_id
      LIMIT p_limit
      FOR NO KEY UPDATE SKIP LOCKED
    ), placed AS MATERIALIZED (
      SELECT p.*, h IS NOT NULL AND (h = ANY (p_held)
             OR row_number() OVER (PARTITION BY h, NOT stop AND NOT files ORDER BY priority, created_at, job_id) > 1) AS held
      FROM picked p
    ), ranked AS MATERIALIZED (
      SELECT p.*, row_number() OVER (PARTITION BY stop OR held OR files ORDER BY priority, created_at, job_id) AS rank,
             sum(size) OVER (PARTITION BY stop OR held OR files ORDER BY priority, created_at, job_id) - size AS before
      FROM placed p
    ), judged AS MATERIALIZED (
      SELECT r.job_id, r.h,
             CASE WHEN stop THEN 'canceled'
                  WHEN files THEN 'limit'
                  WHEN held THEN 'held'
                  WHEN rank > p_slots THEN 'later'
                  WHEN before > 1048576 THEN 'large'
                  WHEN h IS NULL THEN 'run'
                  WHEN pg_try_advisory_lock(h) THEN 'run'
                  ELSE 'busy' END AS v
      FROM ranked r
    )
    SELECT array_agg(judged.job_id), array_agg(judged.h), array_agg(judged.v), bool_or(judged.h IS NOT NULL),
           (SELECT p.job_id FROM picked p ORDER BY p.priority DESC, p.created_at DESC, p.job_id DESC LIMIT 1)
    INTO v_jobs, v_hashes, v_verdicts, v_keyed, v_last FROM judged;
    v_ready := coalesce(cardinality(v_jobs), 0);
  ELSE
    v_began := extract(epoch FROM clock_timestamp());
    -- Their locks come before those of jobs and keys, and wait for no other session.
    FOR v_open IN SELECT * FROM {schema}.dl_open_lanes(p_queue, p_lanes) LOOP
      IF v_open.allowed > 0 THEN
        v_lane := v_lane || v_open.lane;
        v_allowed := v_allowed || v_open.allowed;
        v_supplier := v_supplier || v_open.supplier;
        v_cost := v_cost || v_open.cost;
        v_units := v_units || v_open.left_units;
        v_margin := v_margin || v_open.margin_s;
        -- With round-robin, no more jobs are taken than may start: a key that has had its turn waits for the others.
        v_asked := v_asked || CASE v_open.why WHEN 'partitions' THEN 0 ELSE least(v_open.allowed, p_limit) END;
        IF v_open.why = 'partitions' THEN
          v_jobs := {schema}.dl_turns(v_open.lane, p_queue, least(v_open.allowed, p_slots));
          v_turns := v_turns || v_jobs;
        END IF;
        v_passed_over := v_passed_over || (v_open.why = 'partitions' AND array_position(v_jobs, NULL) IS NOT NULL);
        SELECT * INTO v_behind FROM {schema}.dl_lane_cursor(v_open.lane, p_queue);
        v_behinds := v_behinds || coalesce(v_behind.job_id, '00000000-0000-0000-0000-000000000000');
        v_priorities := v_priorities || coalesce(v_behind.priority, -1);
        v_created_ats := v_created_ats || coalesce(v_behind.created_at, '-infinity');
        v_untils := v_untils || v_behind.until;
      ELSE
        RETURN QUERY SELECT 'lane'::text, NULL::int, NULL::uuid, NULL::bigint, v_open.lane, v_open.why, NULL::text, NULL::text,
                            NULL::int, NULL::int, NULL::int, v_open.wait_s, NULL::jsonb;
      END IF;
    END LOOP;
    v_read := pg_stat_get_xact_tuples_fetched(to_regclass('{schema}.ix_dl_jobs_ready'));
    -- As above, with the jobs of open lanes: `spent` is the use of the supplier's units by all jobs before it in this
    -- order.
    WITH ready AS MATERIALIZED (
      SELECT j.job_id, CASE WHEN j.keyed THEN hashtext(j.lock_key) END AS h, j.cancel_requested AS stop, j.priority, j.created_at,
             j.task = ANY (p_limited) AS files,
             pg_column_size(j.args) AS size, NULL::text AS lane, NULL::text AS supplier, NULL::int AS cost, NULL::bigint AS units
      FROM {schema}.dl_jobs j
      WHERE j.queue = p_queue AND j.status = 'queued' AND j.waits_for IS NULL
        AND (j.priority, j.created_at, j.job_id)
          > (coalesce(v_priority, -1), coalesce(v_created_at, '-infinity'), coalesce(p_after, '00000000-0000-0000-0000-000000000000'))
        AND (j.task = ANY (p_tasks) OR j.cancel_requested)
      ORDER BY j.priority, j.created_at, j.job_id
      LIMIT CASE WHEN p_tasks IS NULL THEN 0 ELSE p_limit END
      FOR NO KEY UPDATE SKIP LOCKED
    ), laned AS MATERIALIZED (
      SELECT w.*, false AS files, o.lane, o.supplier, o.cost, o.units
      FROM unnest(v_lane, v_asked, v_supplier, v_cost, v_units, v_behinds, v_priorities, v_created_ats)
        AS o (lane, asked, supplier, cost, units, behind, priority, created_at)
      CROSS JOIN LATERAL (
        SELECT j.job_id, CASE WHEN j.keyed THEN hashtext(j.lock_key) END AS h, j.cancel_requested AS stop, j.priority, j.created_at,
               pg_column_size(j.args) AS size
        FROM {schema}.dl_jobs j
        WHERE (j.lane, j.queue, j.priority, j.created_at, j.job_id) > (o.lane, p_queue, o.priority, o.created_at, o.behind)
          AND (j.lane, j.queue) <= (o.lane, p_queue) AND j.status = 'queued' AND j.waits_for = 'limit'
        ORDER BY j.lane, j.queue, j.priority, j.created_at, j.job_id
        LIMIT o.asked
        FOR NO KEY UPDATE SKIP LOCKED
      ) AS w
    ), turned AS MATERIALIZED (
      SELECT j.job_id, CASE WHEN j.keyed THEN hashtext(j.lock_key) END AS h, j.cancel_requested AS stop, j.priority, j.created_at,
             false AS files, pg_column_size(j.args) AS size, o.lane, o.supplier, o.cost, o.units
      FROM unnest(v_turns) AS t (job_id)
      CROSS JOIN LATERAL (SELECT * FROM {schema}.dl_jobs j WHERE j.job_id = ANY (ARRAY[t.job_id]) ORDER BY j.job_id LIMIT 1) AS j
      JOIN unnest(v_lane, v_supplier, v_cost, v_units) AS o (lane, supplier, cost, units) ON o.lane = j.lane
    ), picked AS (
      SELECT * FROM ready
      UNION ALL
      SELECT job_id, h, stop, priority, created_at, files, size, lane, supplier, cost, units FROM laned
      UNION ALL
      SELECT * FROM turned
    ), placed AS MATERIALIZED (
      SELECT p.*, h IS NOT NULL AND (h = ANY (p_held)
             OR row_number() OVER (PARTITION BY h, NOT stop AND NOT files ORDER BY priority, created_at, job_id) > 1) AS held
      FROM picked p
    ), ranked AS MATERIALIZED (
      SELECT p.*,
             row_number() OVER (PARTITION BY stop OR held OR files ORDER BY priority, created_at, job_id) AS rank,
             sum(cost) OVER (PARTITION BY supplier, stop OR held ORDER BY priority, created_at, job_id) AS spent
      FROM placed p
    ), sized AS MATERIALIZED (
      SELECT r.*, sum(CASE WHEN spent > units THEN 0 ELSE size END)
                    OVER (PARTITION BY stop OR held OR files ORDER BY priority, created_at, job_id) - size AS before
      FROM ranked r
    ), judged AS MATERIALIZED (
      SELECT r.job_id, r.h, r.lane,
             CASE WHEN stop THEN 'canceled'
                  WHEN files THEN 'limit'
                  WHEN held THEN 'held'
                  WHEN spent > units THEN 'over'
                  WHEN rank > p_slots THEN 'later'
                  WHEN before > 1048576 THEN 'large'
                  WHEN h IS NULL THEN 'run'
                  WHEN pg_try_advisory_lock(h) THEN 'run'
                  ELSE 'busy' END AS v
      FROM sized r
    )
    SELECT array_agg(judged.job_id), array_agg(judged.h), array_agg(judged.v), bool_or(judged.h IS NOT NULL), array_agg(judged.lane),
           (SELECT p.job_id FROM ready p ORDER BY p.priority DESC, p.created_at DESC, p.job_id DESC LIMIT 1),
           CASE WHEN p_tasks IS NULL THEN p_limit ELSE (SELECT count(*) FROM ready) END,
           ARRAY(SELECT (SELECT l.job_id FROM laned l WHERE l.lane = o.lane ORDER BY l.priority DESC, l.created_at DESC, l.job_id DESC LIMIT 1)
                 FROM unnest(v_lane) WITH ORDINALITY AS o (lane, number) ORDER BY o.number),
           array_agg(judged.lane) FILTER (WHERE judged.v IN ('later', 'large', 'over'))
    INTO v_jobs, v_hashes, v_verdicts, v_keyed, v_job_lanes, v_last, v_ready, v_lasts, v_left FROM judged;
    -- The next claim continues behind the jobs that this one has claimed, and begins at the front again after 0.25 s;
    -- if a read of the front takes long, after ten times its duration.
    v_looked_s := extract(epoch FROM clock_timestamp()) - v_began;
    PERFORM set_config('dataloader.lane_' || to_hex(hashtextextended(o.lane, hashtext(p_queue))),
                       o.last || ' ' || coalesce(o.until, v_began + least(greatest(10 * v_looked_s, 0.25), 5)), false)
    FROM unnest(v_lane, v_lasts, v_untils) AS o (lane, last, until)
    WHERE o.last IS NOT NULL AND (o.lane = ANY (v_left)) IS NOT TRUE;
  END IF;
  IF v_created_at IS NULL AND pg_stat_get_xact_tuples_fetched(to_regclass('{schema}.ix_dl_jobs_ready')) - v_read > 10000 THEN
    RETURN QUERY SELECT 'blocked'::text, NULL::int, NULL::uuid, NULL::bigint, NULL::text, NULL::text, NULL::text, NULL::text,
                        NULL::int, NULL::int, NULL::int, NULL::float8, NULL::jsonb;
  ELSIF v_ready < p_limit AND v_created_at IS NULL THEN
    -- Picked rows are locked by us and still in the index, so the search is for one row more.
    PERFORM FROM (
      SELECT j.job_id FROM {schema}.dl_jobs j
      WHERE j.queue = p_queue AND j.status = 'queued' AND j.waits_for IS NULL AND (j.task = ANY (p_tasks) OR j.cancel_requested)
      ORDER BY j.priority, j.created_at, j.job_id LIMIT v_ready + 1
    ) AS ready
    OFFSET v_ready;
    IF FOUND THEN
      RETURN QUERY SELECT 'locked'::text, NULL::int, NULL::uuid, NULL::bigint, NULL::text, NULL::text, NULL::text, NULL::text,
                          NULL::int, NULL::int, NULL::int, NULL::float8, NULL::jsonb;
    END IF;
  END IF;
  -- Second snapshot, taken while holding the locks: a key whose running row has a live lease is not free, even if the
  -- session that held its lock was lost.
  IF v_keyed THEN
    SELECT array_agg(k.h) INTO v_live
    FROM unnest(v_hashes, v_verdicts) AS k (h, v)
    CROSS JOIN LATERAL (
      SELECT FROM {schema}.dl_jobs r
      WHERE r.status = 'running' AND r.keyed AND hashtext(r.lock_key) BETWEEN k.h AND k.h AND (r.lease_expires_at > now() OR {schema}.dl_lease_counts(r.heartbeat_at, r.lease_ttl_sec)) IS TRUE
      ORDER BY hashtext(r.lock_key), r.job_id LIMIT 1
    ) AS live
    WHERE k.v = 'run' AND k.h IS NOT NULL;
  END IF;
  IF v_live IS NOT NULL THEN
    FOR i IN 1 .. array_length(v_jobs, 1) LOOP
      IF v_verdicts[i] = 'run' AND v_hashes[i] = ANY (v_live) THEN
        PERFORM pg_advisory_unlock(v_hashes[i]);
        v_verdicts[i] := 'busy';
      END IF;
    END LOOP;
  END IF;

  IF 'large' = ANY (v_verdicts) THEN
    v_verdicts := array_replace(v_verdicts, 'large', 'later');
    RETURN QUERY SELECT 'large'::text, NULL::int, NULL::uuid, NULL::bigint, NULL::text, NULL::text, NULL::text, NULL::text,
                        NULL::int, NULL::int, NULL::int, NULL::float8, NULL::jsonb;
  END IF;
  IF v_lane <> '{}' THEN
    -- If all allowed jobs came from a lane, it should be read again immediately. With round-robin, also if some of its
    -- jobs cannot start: others of their keys may.
    RETURN QUERY
    SELECT 'lane'::text, NULL::int, NULL::uuid, NULL::bigint, o.lane, NULL::text, NULL::text, NULL::text, NULL::int, NULL::int, NULL::int, CASE
             WHEN p.picked >= CASE o.asked WHEN 0 THEN least(o.allowed, p_slots) ELSE o.asked END THEN 0
             WHEN o.asked = 0 AND p.is_parked THEN 0
             -- If more rows were there than were returned, another session has locked them; the release of a lock sends
             -- no notification.
             WHEN o.passed_over THEN 0.05
             WHEN o.asked > 0 THEN (
               SELECT 0.05 FROM {schema}.dl_jobs j
               WHERE j.lane BETWEEN o.lane AND o.lane AND j.queue BETWEEN p_queue AND p_queue
                 AND j.status = 'queued' AND j.waits_for = 'limit'
               ORDER BY j.lane, j.queue, j.priority, j.created_at, j.job_id OFFSET p.picked LIMIT 1)
           END::float8, NULL::jsonb
    FROM unnest(v_lane, v_allowed, v_asked, v_passed_over) AS o (lane, allowed, asked, passed_over)
    CROSS JOIN LATERAL (
      SELECT count(*) AS picked, bool_or(j.v NOT IN ('run', 'later', 'over')) AS is_parked
      FROM unnest(v_job_lanes, v_verdicts) AS j (lane, v) WHERE j.lane = o.lane
    ) AS p;
  END IF;
  IF v_jobs IS NULL THEN
    RETURN;
  END IF;

  IF v_lane <> '{}' THEN
    PERFORM {schema}.dl_charge_lanes(array_agg(o.lane), array_agg(o.supplier), array_agg(o.cost))
    FROM unnest(v_job_lanes, v_verdicts) AS j (lane, v)
    JOIN unnest(v_lane, v_supplier, v_cost) AS o (lane, supplier, cost) ON o.lane = j.lane
    WHERE j.v = 'run'
    HAVING count(*) > 0;
  END IF;

  RETURN QUERY
  WITH mine AS (
    UPDATE {schema}.dl_jobs j
    SET status = 'running', waits_for = NULL, attempt = least(j.attempt, 2147483646) + 1, token = greatest(uuid_hash_extended(gen_random_uuid(), 0) & 9007199254740991, 1), claimed_by = p_worker,
        lease_expires_at = now() + make_interval(secs => j.lease_ttl_sec), heartbeat_at = now(),
        started_at = coalesce(j.started_at, now()), run_started_at = now()
    FROM (SELECT u.id FROM unnest(v_jobs, v_verdicts) AS u (id, v) WHERE u.v = 'run') AS w
    WHERE j.job_id = ANY (ARRAY[w.id])
    RETURNING j.job_id, j.token, j.queue, j.task, j.args, CASE WHEN j.keyed THEN j.lock_key END AS lock_key, j.partition_key,
              j.attempt, j.max_attempts, j.lease_ttl_sec, j.available_at, j.schedule, j.planned_at,
              j.lane, j.previous, j.requested_version
  ), journal AS (
    INSERT INTO {schema}.dl_job_events (job_id, queue, kind, payload)
    SELECT m.job_id, m.queue, 'picked', jsonb_build_object('attempt', m.attempt, 'worker', p_worker) FROM mine m
  )
  SELECT 'run'::text, hashtext(m.lock_key), m.job_id, m.token, m.task,
         CASE WHEN pg_column_size(m.args) <= 65536 THEN m.args::text
              WHEN pg_column_size(m.args #> '{}') <= 67109888
              THEN (SELECT a FROM (SELECT m.args::text AS a OFFSET 0) AS whole WHERE octet_length(a) <= 16777216) END,
         m.lock_key, m.partition_key, m.attempt, m.max_attempts, m.lease_ttl_sec,
         CASE WHEN isfinite(m.available_at) THEN extract(epoch FROM clock_timestamp() - m.available_at) ELSE 0 END::float8,
         CASE WHEN num_nonnulls(m.schedule, m.lane, m.previous, m.requested_version) > 0
              THEN jsonb_strip_nulls(jsonb_build_object(
                'schedule', m.schedule, 'planned_at', m.planned_at, 'version', m.requested_version,
                'margin_s', (SELECT o.margin FROM unnest(v_lane, v_margin) AS o (lane, margin) WHERE o.lane = m.lane)))
                || CASE WHEN m.previous IS NULL THEN '{}' ELSE jsonb_build_object('previous', m.previous) END END
  FROM mine m;

  IF NOT 'later' = ANY (v_verdicts) THEN
    RETURN QUERY SELECT 'last'::text, NULL::int, v_last, NULL::bigint, NULL::text, NULL::text, NULL::text, NULL::text,
                        NULL::int, NULL::int, NULL::int, NULL::float8, NULL::jsonb;
  ELSE
    RETURN QUERY SELECT 'later'::text, NULL::int, NULL::uuid, NULL::bigint, NULL::text, NULL::text, NULL::text, NULL::text,
                        NULL::int, NULL::int, NULL::int, NULL::float8, NULL::jsonb;
  END IF;
  IF NOT 'run' = ALL (v_verdicts) THEN
    WITH others AS (
      UPDATE {schema}.dl_jobs j
      SET status = CASE w.v WHEN 'canceled' THEN 'canceled'::{schema}.dl_status ELSE j.status END,
          finished_at = CASE w.v WHEN 'canceled' THEN now() ELSE j.finished_at END,
          waits_for = CASE w.v WHEN 'canceled' THEN NULL WHEN 'limit' THEN 'limit' ELSE 'lock' END,
          lane = CASE w.v WHEN 'limit' THEN j.task ELSE j.lane END,
          available_at = CASE WHEN w.v IN ('held', 'busy') THEN now() + make_interval(secs => p_backoff_s) ELSE j.available_at END
      FROM (SELECT u.id, u.v FROM unnest(v_jobs, v_verdicts) AS u (id, v) WHERE u.v NOT IN ('run', 'later', 'over')) AS w
      WHERE j.job_id = ANY (ARRAY[w.id])
      RETURNING j.job_id, j.queue, w.v
    )
    INSERT INTO {schema}.dl_job_events (job_id, queue, kind, payload)
    SELECT o.job_id, o.queue, CASE o.v WHEN 'canceled' THEN 'canceled' ELSE 'requeue' END,
           jsonb_build_object('reason', CASE o.v WHEN 'canceled' THEN 'cancel_requested' ELSE 'lock_key' END)
    FROM others o
    WHERE o.v <> 'limit';
    RETURN QUERY
    SELECT u.v, u.h, u.id, NULL::bigint, NULL::text, NULL::text, NULL::text, NULL::text, NULL::int, NULL::int, NULL::int,
           NULL::float8, NULL::jsonb
    FROM unnest(v_jobs, v_hashes, v_verdicts) AS u (id, h, v) WHERE u.v NOT IN ('run', 'later', 'over');
  END IF;

END $$;
REVOKE ALL ON FUNCTION {schema}.dl_claim_known(text, int, int, text, text[], int[], float8, int[], uuid, text[], text[]) FROM PUBLIC;
