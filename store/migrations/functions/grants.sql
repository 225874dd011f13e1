-- A service with few rights continues during the upgrade. If a function replaces another one, or another one calls it,
-- the roles that may execute that one may execute it, too. A table that a new function needs gets the grants of the
-- table with which it is used. (Only when the function is created: a right that the owner revokes later stays revoked.)
DO $do$
DECLARE
  v_grant text;
BEGIN
  FOR v_grant IN
    SELECT DISTINCT format('GRANT EXECUTE ON FUNCTION %s TO %s', n.oid::regprocedure, a.grantee::regrole)
    FROM (VALUES ('dl_turns', 'dl_open_lanes'), ('dl_lane_cursor', 'dl_open_lanes'), ('dl_limits_seen', 'dl_budgets_left'),
                 ('dl_zone_offset_s', 'dl_opens_in'), ('dl_lease_counts', 'dl_free_keys'), ('dl_cut_back', 'dl_budgets_left'),
                 ('dl_enqueue_job', 'dl_enqueue'), ('dl_add_unique', 'dl_enqueue'), ('dl_unique_key', 'dl_enqueue'),
                 ('dl_process_ident', 'dl_process_act'), ('dl_process_move', 'dl_process_wake'),
                 ('dl_process_move_some', 'dl_process_wake')) AS f (new, former)
    JOIN pg_class c ON c.oid = '{schema}.dl_jobs'::regclass
    JOIN pg_proc n ON n.pronamespace = c.relnamespace AND n.proname = f.new
    JOIN pg_proc p ON p.pronamespace = c.relnamespace AND p.proname = f.former
    CROSS JOIN LATERAL aclexplode(p.proacl) AS a
    WHERE f.new <> ALL (string_to_array(current_setting('dataloader.functions'), ' '))
      AND f.former = ANY (string_to_array(current_setting('dataloader.functions'), ' '))
      AND a.grantee NOT IN (0, p.proowner)
    UNION ALL
    SELECT format('GRANT %s ON %s TO %s', a.privilege_type, n.oid::regclass, a.grantee::regrole)
    FROM (VALUES ('dl_process_types', 'dl_processes', 'dl_process_move'), ('dl_etl_observed', 'dl_load_history', 'dl_claim_known'),
                 ('dl_etl_cursors', 'dl_load_state', 'dl_load_state_upto'), ('dl_etl_history', 'dl_load_history', 'dl_load_state_upto'),
                 ('dl_etl_snapshots', 'dl_load_snapshots', 'dl_load_state_upto'),
                 ('dl_ended_sessions', 'dl_queues', 'dl_jobs_built_in'), ('dl_history', 'dl_workers', 'dl_lease_counts'))
      AS t (new, former, needs)
    JOIN pg_class c ON c.oid = '{schema}.dl_jobs'::regclass
    JOIN pg_class n ON n.relnamespace = c.relnamespace AND n.relname = t.new
    JOIN pg_class p ON p.relnamespace = c.relnamespace AND p.relname = t.former
    CROSS JOIN LATERAL aclexplode(p.relacl) AS a
    WHERE t.needs <> ALL (string_to_array(current_setting('dataloader.functions'), ' '))
      AND a.grantee NOT IN (0, p.relowner) AND a.privilege_type IN ('SELECT', 'INSERT', 'UPDATE', 'DELETE')
  LOOP
    EXECUTE v_grant;
  END LOOP;
END $do$;
