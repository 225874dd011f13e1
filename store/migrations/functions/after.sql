-- Jobs that run after others (dl_job_after). Each waits for the end of one predecessor at a time, its `waits_on`, and
-- is evaluated when all of them have ended.
-- Why none is missed: the end of a job and a check of the ended job lock the same row. If the check comes first, it
-- marks the row as `awaited`. Then the end sends a notification, and the row stays in ix_dl_jobs_awaited until the jobs
-- that wait for it have been evaluated, even if the notification is lost. If the end comes first, the check sees it in
-- a new snapshot. The end does not search for waiting jobs: of two concurrent ends, each would see the other job as
-- running.
-- Why the work is linear: `waits_on` moves down the list of a job's predecessors, past the ended ones, each of them
-- once.

-- Checks up to p_limit jobs that run after others, and makes ready or cancels those whose predecessors have all ended.
-- Skips locked rows. It begins with few jobs and doubles their number, for about a second: if each of them runs after
-- thousands, evaluating all of them would exceed the statement timeout, repeatedly, and no job would ever become ready.
-- The plans are pinned as in the claim, whatever the statistics say. With BETWEEN instead of =, only the index of
-- waiting jobs has the order by `waits_on`. A locked table is soon given up: the stager also serves jobs that do not
-- run after others.
--   p_unchosen   whether to check also jobs whose `waits_on` has not been chosen yet. They all enter the index with one
--                ID, and until a vacuum a check reads the dead entries of all that have left: too much for the end of
--                each job
--   judged   number of jobs that were made ready or canceled, or that wait for another one now
--   more     whether others are left, more than p_limit or locked at the moment
CREATE OR REPLACE FUNCTION {schema}.dl_judge_after(p_limit int, p_unchosen boolean, OUT judged int, OUT more boolean)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off
SET enable_sort = off SET jit = off SET lock_timeout = '1s'
AS $$
DECLARE
  c_unchosen CONSTANT uuid := '00000000-0000-0000-0000-000000000000';
  v_unchosen uuid[] := CASE WHEN p_unchosen THEN ARRAY[c_unchosen] END;
  v_ended uuid[];
  v_jobs uuid[];
  v_next uuid[];
  v_open uuid[];
  v_ready uuid[];
  v_canceled uuid[];
  v_errors text[];
  v_failed jsonb[];
  v_now int;
  v_picked int;
  v_batch int := least(p_limit, 20);
  v_until timestamptz := clock_timestamp() + interval '1 s';
BEGIN
  judged := 0;
  LOOP
    v_ended := ARRAY(
      SELECT e.job_id FROM {schema}.dl_jobs e
      WHERE e.awaited AND e.status IN ('succeeded', 'failed', 'canceled', 'lost')
      ORDER BY e.job_id LIMIT p_limit);

    -- For each waiting job, the next predecessor that has not ended, below the one that it waited for.
    SELECT array_agg(w.job_id), array_agg(n.after_id) INTO v_jobs, v_next
    FROM (
      SELECT j.job_id, coalesce(nullif(j.waits_on, c_unchosen), 'ffffffff-ffff-ffff-ffff-ffffffffffff') AS below
      FROM unnest(v_ended || v_unchosen) AS looked (id)
      CROSS JOIN LATERAL (
        SELECT j.job_id, j.waits_on FROM {schema}.dl_jobs j
        WHERE j.status = 'queued' AND j.waits_for = 'after' AND j.waits_on BETWEEN looked.id AND looked.id
        ORDER BY j.waits_on, j.created_at, j.job_id
        LIMIT v_batch
        FOR NO KEY UPDATE SKIP LOCKED
      ) AS j
      LIMIT v_batch
    ) AS w
    LEFT JOIN LATERAL (
      SELECT a.after_id FROM {schema}.dl_job_after a
      CROSS JOIN LATERAL (
        SELECT FROM {schema}.dl_jobs p WHERE p.job_id = a.after_id AND p.status IN ('queued', 'running')
        ORDER BY p.job_id LIMIT 1
      ) AS still
      WHERE a.job_id = w.job_id AND a.after_id < w.below
      ORDER BY a.after_id DESC LIMIT 1
    ) AS n ON true;
    EXIT WHEN v_jobs IS NULL AND v_ended = '{}';
    v_picked := coalesce(cardinality(v_jobs), 0);

    -- Jobs at the end of their list are evaluated by the whole list: a predecessor may have been retried since.
    WITH whole AS MATERIALIZED (
      SELECT u.id, j.when_failed, a.*
      FROM unnest(v_jobs, v_next) AS u (id, next)
      CROSS JOIN LATERAL (
        SELECT j.when_failed FROM {schema}.dl_jobs j WHERE j.job_id = u.id ORDER BY j.job_id LIMIT 1
      ) AS j
      CROSS JOIN LATERAL (
        SELECT count(*) AS number,
               (array_agg(a.after_id) FILTER (WHERE p.status IN ('queued', 'running')))[1] AS left_over,
               array_agg(a.after_id ORDER BY a.after_id) FILTER (WHERE f.how <> 'succeeded') AS failed,
               array_agg(f.how ORDER BY a.after_id) FILTER (WHERE f.how <> 'succeeded') AS how
        FROM {schema}.dl_job_after a
        LEFT JOIN {schema}.dl_jobs p ON p.job_id = a.after_id
        CROSS JOIN LATERAL (
          SELECT CASE WHEN p.job_id IS NOT NULL THEN p.status::text WHEN a.was = 'succeeded' THEN a.was ELSE 'deleted' END AS how
        ) AS f
        WHERE a.job_id = u.id
      ) AS a
      WHERE u.next IS NULL
    ), verdicts AS (
      SELECT w.*, w.left_over IS NULL AND (w.failed IS NULL OR w.when_failed IS NOT DISTINCT FROM 'run') AS is_ready FROM whole w
    )
    SELECT array_agg(v.id) FILTER (WHERE is_ready),
           array_agg(v.id) FILTER (WHERE left_over IS NULL AND NOT is_ready),
           array_agg(CASE WHEN v.number > 1 THEN format('%s of the %s jobs that this job depends on did not succeed: ',
                                                        cardinality(v.failed), v.number) ELSE '' END
                     || format(CASE v.how[1] WHEN 'failed' THEN 'job %s, which this job depends on, failed'
                                             ELSE 'job %s, which this job depends on, was ' || v.how[1] END, v.failed[1]))
             FILTER (WHERE left_over IS NULL AND NOT is_ready),
           array_agg((SELECT jsonb_object_agg(f.id, f.how) FROM unnest(v.failed[:20], v.how[:20]) AS f (id, how)))
             FILTER (WHERE left_over IS NULL AND NOT is_ready),
           array_cat(v_jobs, array_agg(v.id) FILTER (WHERE left_over IS NOT NULL)),
           array_cat(v_next, array_agg(v.left_over) FILTER (WHERE left_over IS NOT NULL))
    INTO v_ready, v_canceled, v_errors, v_failed, v_jobs, v_next
    FROM verdicts v;

    -- Separate statements, because other jobs may wait for a waiting job.
    v_open := ARRAY(
      SELECT p.job_id FROM unnest(v_next) AS u (id)
      CROSS JOIN LATERAL (
        SELECT p.job_id FROM {schema}.dl_jobs p WHERE p.job_id = u.id AND p.status IN ('queued', 'running')
        ORDER BY p.job_id LIMIT 1
        FOR NO KEY UPDATE SKIP LOCKED
      ) AS p);
    UPDATE {schema}.dl_jobs p SET awaited = true WHERE p.job_id = ANY (v_open) AND NOT p.awaited;
    UPDATE {schema}.dl_jobs j SET waits_on = u.next
    FROM unnest(v_jobs, v_next) AS u (id, next) WHERE j.job_id = ANY (ARRAY[u.id]) AND u.next = ANY (v_open);
    GET DIAGNOSTICS v_now = ROW_COUNT;

    UPDATE {schema}.dl_jobs j
    SET waits_on = NULL, wanted_at = NULL, available_at = greatest(j.wanted_at, now()),
        waits_for = CASE WHEN j.wanted_at > now() THEN 'time' END
    WHERE j.job_id = ANY (v_ready);
    WITH canceled AS (
      UPDATE {schema}.dl_jobs j
      SET status = 'canceled', waits_for = NULL, finished_at = clock_timestamp(), error = u.error
      FROM unnest(v_canceled, v_errors) AS u (id, error) WHERE j.job_id = ANY (ARRAY[u.id])
      RETURNING j.job_id, j.queue
    )
    INSERT INTO {schema}.dl_job_events (job_id, queue, kind, payload)
    SELECT c.job_id, c.queue, 'canceled', jsonb_build_object('reason', 'after', 'failed', u.failed)
    FROM canceled c JOIN unnest(v_canceled, v_failed) AS u (id, failed) ON u.id = c.job_id;
    v_now := v_now + coalesce(cardinality(v_ready), 0) + coalesce(cardinality(v_canceled), 0);

    -- Locked first, and checked in a new snapshot, so that it cannot be retried and awaited again meanwhile.
    v_ended := ARRAY(
      SELECT e.job_id FROM unnest(v_ended) AS u (id)
      CROSS JOIN LATERAL (
        SELECT e.job_id FROM {schema}.dl_jobs e
        WHERE e.job_id = u.id AND e.status IN ('succeeded', 'failed', 'canceled', 'lost')
        ORDER BY e.job_id LIMIT 1
        FOR NO KEY UPDATE SKIP LOCKED
      ) AS e);
    UPDATE {schema}.dl_jobs e SET awaited = false
    WHERE e.job_id = ANY (ARRAY(
      SELECT u.id FROM unnest(v_ended) AS u (id)
      WHERE (SELECT j.job_id FROM {schema}.dl_jobs j
             WHERE j.status = 'queued' AND j.waits_for = 'after' AND j.waits_on BETWEEN u.id AND u.id
             ORDER BY j.waits_on, j.created_at, j.job_id LIMIT 1) IS NULL));
    judged := judged + v_now;
    EXIT WHEN (v_now = 0 AND (v_picked < v_batch OR v_batch = p_limit)) OR judged >= p_limit OR clock_timestamp() > v_until;
    v_batch := least(2 * v_batch, p_limit);
  END LOOP;
  more := (
    SELECT e.job_id FROM {schema}.dl_jobs e
    WHERE e.awaited AND e.status IN ('succeeded', 'failed', 'canceled', 'lost')
    ORDER BY e.job_id LIMIT 1
  ) IS NOT NULL OR p_unchosen AND (
    SELECT j.job_id FROM {schema}.dl_jobs j
    WHERE j.status = 'queued' AND j.waits_for = 'after' AND j.waits_on BETWEEN c_unchosen AND c_unchosen
    ORDER BY j.waits_on, j.created_at, j.job_id LIMIT 1
  ) IS NOT NULL;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_judge_after(int, boolean) FROM PUBLIC;

-- When any session deletes a job, the jobs that run after it record its status, and one that waits for it is checked
-- again. It runs with its owner's rights, only for that table: a role that may delete jobs needs no right on our
-- tables.
CREATE OR REPLACE FUNCTION {schema}.dl_jobs_deleted() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF TG_RELID <> '{schema}.dl_jobs'::regclass THEN
    RAISE EXCEPTION 'dl_jobs_deleted is a trigger of dl_jobs alone';
  END IF;
  UPDATE {schema}.dl_job_after SET was = OLD.status::text WHERE after_id = OLD.job_id;
  IF OLD.awaited THEN
    UPDATE {schema}.dl_jobs SET waits_on = '00000000-0000-0000-0000-000000000000'
    WHERE status = 'queued' AND waits_for = 'after' AND waits_on = OLD.job_id;
    PERFORM pg_notify('dl_after', '');
  END IF;
  IF OLD.lane IS NOT NULL AND OLD.status = 'running' THEN
    PERFORM pg_notify('dl_lane', left(OLD.lane, 1000));
  END IF;
  RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_jobs_deleted() FROM PUBLIC;
