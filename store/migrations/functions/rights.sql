-- Which functions are there before the set is applied: `grants` gives those that are new to whom they take a former one's place.
DO $do$
BEGIN
  PERFORM set_config('dataloader.functions', coalesce(string_agg(p.proname, ' '), ''), true)
  FROM pg_class c JOIN pg_proc p ON p.pronamespace = c.relnamespace
  WHERE c.oid = '{schema}.dl_jobs'::regclass AND starts_with(p.proname, 'dl_');
END $do$;
