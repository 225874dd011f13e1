-- Which functions are there before the set is applied: `grants` gives those that are new to whom they take a former one's place.
DO $do$
BEGIN
  PERFORM set_config('dataloader.functions', coalesce(string_agg(p.proname, ' '), ''), true)
  FROM pg_class c JOIN pg_proc p ON p.pronamespace = c.relnamespace
  WHERE c.oid = '{schema}.dl_jobs'::regclass AND starts_with(p.proname, 'dl_');
END $do$;

-- Before EXECUTE is taken from PUBLIC: a service of a release that lived on it goes on during the upgrade. Whoever was granted
-- UPDATE on dl_jobs keeps EXECUTE on the functions that PUBLIC could execute; they run with the caller's rights, so nobody gains
-- anything. Not on the triggers' functions, which fire without it. A database whose functions PUBLIC can't execute is left as it is.
DO $do$
DECLARE
  v_grant text;
BEGIN
  FOR v_grant IN
    SELECT DISTINCT format('GRANT EXECUTE ON FUNCTION %s TO %s', p.oid::regprocedure, a.grantee::regrole)
    FROM pg_class c
    CROSS JOIN LATERAL aclexplode(c.relacl) AS a
    JOIN pg_proc p ON p.pronamespace = c.relnamespace
    WHERE c.oid = '{schema}.dl_jobs'::regclass AND a.privilege_type = 'UPDATE' AND a.grantee <> 0
      AND starts_with(p.proname, 'dl_') AND p.prorettype <> 'trigger'::regtype AND NOT p.prosecdef
      AND has_function_privilege('public', p.oid, 'EXECUTE') AND pg_has_role(p.proowner, 'USAGE')
  LOOP
    EXECUTE v_grant;
  END LOOP;
END $do$;
