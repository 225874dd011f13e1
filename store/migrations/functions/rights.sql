-- A function that takes another's place begins as its copy, so that whoever may execute that one may execute it: a service with
-- few rights goes on during the upgrade. (Only when it is made: what the owner takes away later stays away.)
DO $do$
DECLARE
  v_former regprocedure := to_regprocedure('{schema}.dl_claim(text, int, int, text, text[], int[], float8, int[], uuid)');
  v_new text := '{schema}.dl_claim_jobs(text, int, int, text, text[], int[], float8, int[], uuid)';
  v_grant text;
BEGIN
  IF v_former IS NOT NULL AND to_regprocedure(v_new) IS NULL THEN
    EXECUTE replace(pg_get_functiondef(v_former), '.dl_claim(', '.dl_claim_jobs(');
    IF NOT has_function_privilege('public', v_former, 'EXECUTE') THEN
      EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', v_new);
    END IF;
    FOR v_grant IN
      SELECT format('GRANT EXECUTE ON FUNCTION %s TO %s', v_new, a.grantee::regrole)
      FROM pg_proc p CROSS JOIN LATERAL aclexplode(p.proacl) AS a
      WHERE p.oid = v_former AND a.grantee NOT IN (0, p.proowner)
    LOOP
      EXECUTE v_grant;
    END LOOP;
  END IF;
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
