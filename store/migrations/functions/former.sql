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
