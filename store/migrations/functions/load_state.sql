-- Programs of the release before write the state of a load as `upto`, through the view dl_etl_cursors.
CREATE OR REPLACE FUNCTION {schema}.dl_load_state_upto() RETURNS trigger LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $fn$
BEGIN
  IF NEW.state IS NULL OR (TG_OP = 'UPDATE' AND NEW.upto IS DISTINCT FROM OLD.upto AND NEW.state IS NOT DISTINCT FROM OLD.state) THEN
    NEW.state := jsonb_build_object('kind', 'window', 'upto', NEW.upto);
  ELSE
    NEW.upto := CASE WHEN NEW.state ->> 'kind' = 'window' THEN (NEW.state ->> 'upto')::timestamptz END;
  END IF;
  RETURN NEW;
END $fn$;
REVOKE EXECUTE ON FUNCTION {schema}.dl_load_state_upto() FROM PUBLIC;

DO $do$
BEGIN
  IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = '{schema}.dl_load_state'::regclass AND tgname = 'dl_load_state_upto') THEN
    CREATE TRIGGER dl_load_state_upto BEFORE INSERT OR UPDATE ON {schema}.dl_load_state
    FOR EACH ROW EXECUTE FUNCTION {schema}.dl_load_state_upto();
  END IF;
END $do$;
