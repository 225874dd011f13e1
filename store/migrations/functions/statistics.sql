-- Statistics by hour are summed up by day, for every writer. Rows come in the order of their keys, so that concurrent
-- folds also lock days in one order. Deleted old rows stay in the sums of their days.
CREATE OR REPLACE FUNCTION {schema}.dl_run_stats_of_day() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  INSERT INTO {schema}.dl_run_stats_days AS d (day, queue, task, outcome, runs, total_s, max_s)
  VALUES (date_trunc('day', NEW.hour, 'UTC'), NEW.queue, NEW.task, NEW.outcome,
          NEW.runs - CASE WHEN TG_OP = 'UPDATE' THEN OLD.runs ELSE 0 END,
          NEW.total_s - CASE WHEN TG_OP = 'UPDATE' THEN OLD.total_s ELSE 0 END, NEW.max_s)
  ON CONFLICT (day, queue, task, outcome) DO UPDATE
  SET runs = d.runs + excluded.runs, total_s = d.total_s + excluded.total_s, max_s = greatest(d.max_s, excluded.max_s);
  RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_run_stats_of_day() FROM PUBLIC;
-- Once the trigger exists, no other session writes until this transaction ends: the sums so far are complete.
DO $do$
DECLARE
  v_grant text;
BEGIN
  IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = '{schema}.dl_run_stats'::regclass AND tgname = 'dl_run_stats_of_day') THEN
    CREATE TRIGGER dl_run_stats_of_day AFTER INSERT OR UPDATE ON {schema}.dl_run_stats FOR EACH ROW
      EXECUTE FUNCTION {schema}.dl_run_stats_of_day();
    DELETE FROM {schema}.dl_run_stats_days;
    INSERT INTO {schema}.dl_run_stats_days (day, queue, task, outcome, runs, total_s, max_s)
    SELECT date_trunc('day', hour, 'UTC'), queue, task, outcome, sum(runs), sum(total_s), max(max_s)
    FROM {schema}.dl_run_stats GROUP BY 1, 2, 3, 4;
    -- Roles that may write the hours write days by the trigger, so that a service with few rights continues during the
    -- upgrade.
    FOR v_grant IN
      SELECT DISTINCT format('GRANT %s ON {schema}.dl_run_stats_days TO %s', a.privilege_type, a.grantee::regrole)
      FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) AS a
      WHERE c.oid = '{schema}.dl_run_stats'::regclass AND a.grantee NOT IN (0, c.relowner)
    LOOP
      EXECUTE v_grant;
    END LOOP;
  END IF;
END $do$;
