-- The functions that exist before the set is applied: `grants` gives the rights on a former function to its
-- replacement.
DO $do$
BEGIN
  PERFORM set_config('dataloader.functions', coalesce(string_agg(p.proname, ' '), ''), true)
  FROM pg_class c JOIN pg_proc p ON p.pronamespace = c.relnamespace
  WHERE c.oid = '{schema}.dl_jobs'::regclass AND starts_with(p.proname, 'dl_');
END $do$;
