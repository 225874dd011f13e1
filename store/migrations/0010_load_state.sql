-- The state of a load is an object, so that it can be of other kinds than a window, and three tables of loads have new names. Under their
-- former names they are views, through which programs of the release before read and write until they are drained: `upto` is the state's
-- timestamp for them. The trigger and the rights on the views belong to the same transaction: without them, statements of those programs
-- would fail.

-- As in functions/load_state.sql.
CREATE OR REPLACE FUNCTION dl_load_state_upto() RETURNS trigger LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $fn$
BEGIN
  IF NEW.state IS NULL OR (TG_OP = 'UPDATE' AND NEW.upto IS DISTINCT FROM OLD.upto AND NEW.state IS NOT DISTINCT FROM OLD.state) THEN
    NEW.state := jsonb_build_object('kind', 'window', 'upto', NEW.upto);
  ELSE
    NEW.upto := CASE WHEN NEW.state ->> 'kind' = 'window' THEN (NEW.state ->> 'upto')::timestamptz END;
  END IF;
  RETURN NEW;
END $fn$;
REVOKE EXECUTE ON FUNCTION dl_load_state_upto() FROM PUBLIC;

DO $names$
DECLARE
  v_name text;
  v_renamed record;
  v_grant text;
BEGIN
  -- In the order in which a commit of those programs locks them.
  FOREACH v_name IN ARRAY ARRAY['dl_etl_history', 'dl_etl_snapshots', 'dl_etl_cursors'] LOOP
    IF (SELECT relkind FROM pg_class WHERE oid = to_regclass(v_name)) = 'r' THEN
      EXECUTE format('LOCK TABLE %I IN ACCESS EXCLUSIVE MODE', v_name);
    END IF;
  END LOOP;
  FOR v_renamed IN
    SELECT * FROM (VALUES ('dl_etl_cursors', 'dl_load_state'), ('dl_etl_history', 'dl_load_history'), ('dl_etl_snapshots', 'dl_load_snapshots'))
      AS t (former, new)
    WHERE (SELECT relkind FROM pg_class WHERE oid = to_regclass(former)) = 'r'
  LOOP
    EXECUTE format('ALTER TABLE %I RENAME TO %I', v_renamed.former, v_renamed.new);
    EXECUTE format('ALTER TABLE %I RENAME CONSTRAINT %I TO %I', v_renamed.new, v_renamed.former || '_pkey', v_renamed.new || '_pkey');
    IF v_renamed.new = 'dl_load_state' THEN
      ALTER TABLE dl_load_state ADD COLUMN state jsonb, ALTER COLUMN upto DROP NOT NULL;
      UPDATE dl_load_state SET state = jsonb_build_object('kind', 'window', 'upto', upto);
      ALTER TABLE dl_load_state ALTER COLUMN state SET NOT NULL;
      CREATE TRIGGER dl_load_state_upto BEFORE INSERT OR UPDATE ON dl_load_state FOR EACH ROW EXECUTE FUNCTION dl_load_state_upto();
      CREATE VIEW dl_etl_cursors AS SELECT load, upto, run_id, moved_at FROM dl_load_state WHERE upto IS NOT NULL;
    ELSE
      EXECUTE format('CREATE VIEW %I AS TABLE %I', v_renamed.former, v_renamed.new);
    END IF;
    FOR v_grant IN
      SELECT format('GRANT %s ON %I TO %s', a.privilege_type, v_renamed.former, a.grantee::regrole)
      FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) AS a
      WHERE c.oid = to_regclass(v_renamed.new) AND a.grantee NOT IN (0, c.relowner)
        AND a.privilege_type IN ('SELECT', 'INSERT', 'UPDATE', 'DELETE')
    LOOP
      EXECUTE v_grant;
    END LOOP;
  END LOOP;
END $names$;
