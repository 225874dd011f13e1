-- The state of a load is an object, so that it can be of other kinds than a window, and three tables of loads have new names. Under their
-- former names they are views, through which programs of the release before read and write until they are drained: `upto` is the state's
-- timestamp for them (functions/load_state.sql).
DO $names$
DECLARE
  v_renamed record;
BEGIN
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
      CREATE VIEW dl_etl_cursors AS SELECT load, upto, run_id, moved_at FROM dl_load_state WHERE upto IS NOT NULL;
    ELSE
      EXECUTE format('CREATE VIEW %I AS TABLE %I', v_renamed.former, v_renamed.new);
    END IF;
  END LOOP;
END $names$;
