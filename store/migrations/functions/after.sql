-- Jobs that run after others (dl_job_after): one waits for the end of one of those at a time, its `waits_on`, and is judged when
-- all of them have ended.
-- Why nothing is missed: an ending and a look at the job that has ended lock the same row. Either the look comes first and marks
-- the row as `awaited`: then the ending tells of itself, and the row stands in ix_dl_jobs_awaited until those who wait for it have
-- been judged, also if nobody hears of it. Or the ending comes first, and the look, in a new snapshot, sees it. No ending looks
-- for jobs that wait: of two that end at once each would see the other one running.
-- Why it is linear: `waits_on` goes down the list of a job's predecessors, over those that have ended, each of them once.

-- Looks at up to p_limit jobs that wait for others and makes those ready, or cancels those, whose predecessors have all ended.
-- Rows that somebody has locked are passed over. It begins with few and goes on with twice as many, for about a second: where each
-- runs after thousands, to judge all of them would take longer than a statement may, again and again, and nobody would get on.
-- The plans are pinned as the claim's, whatever the statistics say: with
-- BETWEEN for = no other index than that of jobs that wait has the order by `waits_on`.
-- A table that somebody has locked is given up soon: the stager has others to make ready, which wait for no job.
--   p_unchosen   whether to look also at those whose `waits_on` is still to be chosen. All enter the index at that one id, and
--                until a vacuum a look passes over the dead entries of all that have left: too much for the end of each job
--   judged   jobs that were made ready, canceled, or wait for another one now
--   more     others are left, more than p_limit or locked at the moment
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

    -- Of each that waits the next predecessor that has not ended, below the one that it waited for.
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

    -- Those who have come to the end of their list are judged by the whole of it: a predecessor may have been revived since.
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
           array_agg(CASE WHEN v.number > 1 THEN format('%s of the %s jobs that this one runs after did not succeed: ',
                                                        cardinality(v.failed), v.number) ELSE '' END
                     || format(CASE v.how[1] WHEN 'failed' THEN 'job %s, which this one runs after, failed'
                                             ELSE 'job %s, which this one runs after, was ' || v.how[1] END, v.failed[1]))
             FILTER (WHERE left_over IS NULL AND NOT is_ready),
           array_agg((SELECT jsonb_object_agg(f.id, f.how) FROM unnest(v.failed[:20], v.how[:20]) AS f (id, how)))
             FILTER (WHERE left_over IS NULL AND NOT is_ready),
           array_cat(v_jobs, array_agg(v.id) FILTER (WHERE left_over IS NOT NULL)),
           array_cat(v_next, array_agg(v.left_over) FILTER (WHERE left_over IS NOT NULL))
    INTO v_ready, v_canceled, v_errors, v_failed, v_jobs, v_next
    FROM verdicts v;

    -- Statements of their own: a job that waits may be waited for itself.
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

    -- Locked first, and looked at in a new snapshot: nobody can revive it and wait for it again meanwhile.
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

-- A job is deleted, by whomever: those that run after it learn what it was, and one that waits for it is looked at again.
-- With its owner's rights, for that table alone: who may delete jobs needs no right on ours.
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
