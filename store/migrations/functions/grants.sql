-- A function that takes another's place: whoever may execute that one may execute it, so that a service with few rights goes on
-- during the upgrade. (Only when it is made: what the owner takes away later stays away.)
DO $do$
DECLARE
  v_grant text;
BEGIN
  FOR v_grant IN
    SELECT DISTINCT format('GRANT EXECUTE ON FUNCTION %s TO %s', n.oid::regprocedure, a.grantee::regrole)
    FROM (VALUES ('dl_claim_jobs', 'dl_claim'), ('dl_claim_runs', 'dl_claim'), ('dl_claim_runs', 'dl_claim_jobs'),
                 ('dl_budgets_left', 'dl_units_left'), ('dl_day', 'dl_units_left'), ('dl_turns', 'dl_open_lanes'),
                 ('dl_lane_cursor', 'dl_open_lanes'),
                 ('dl_enqueue_job', 'dl_enqueue'), ('dl_add_unique', 'dl_enqueue'), ('dl_unique_key', 'dl_enqueue'),
                 ('dl_process_ask_many', 'dl_process_ask')) AS f (new, former)
    JOIN pg_class c ON c.oid = '{schema}.dl_jobs'::regclass
    JOIN pg_proc n ON n.pronamespace = c.relnamespace AND n.proname = f.new
    JOIN pg_proc p ON p.pronamespace = c.relnamespace AND p.proname = f.former
    CROSS JOIN LATERAL aclexplode(p.proacl) AS a
    WHERE f.new <> ALL (string_to_array(current_setting('dataloader.functions'), ' '))
      AND f.former = ANY (string_to_array(current_setting('dataloader.functions'), ' '))
      AND a.grantee NOT IN (0, p.proowner)
  LOOP
    EXECUTE v_grant;
  END LOOP;
END $do$;
