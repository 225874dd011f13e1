-- outside a transaction
-- Each table has a primary key: in a database with a publication for all tables, UPDATE and DELETE fail on a table without one.
-- An identity column needs no right on its sequence. The tables stay small: the pruner and the end of a segment delete their rows.
ALTER TABLE dl_run_stats_new ADD COLUMN IF NOT EXISTS row_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY;
ALTER TABLE dl_etl_details ADD COLUMN IF NOT EXISTS row_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY;
-- The calls of a supplier are numbered, so the unique index on their numbers replaces the former one, and a call costs what it did.
-- Where the database is published already, rows can be deleted only with an identity.
ALTER TABLE dl_source_calls REPLICA IDENTITY FULL;
-- Calls from before 0019 all have the number 0. Calls of one number become one call with the units of all.
WITH repeated AS (
  SELECT source, n FROM dl_source_calls GROUP BY source, n HAVING count(*) > 1
), gone AS (
  DELETE FROM dl_source_calls c USING repeated r WHERE c.source = r.source AND c.n = r.n
  RETURNING c.source, c.n, c.at, c.cost
)
INSERT INTO dl_source_calls (source, n, at, cost) SELECT source, n, max(at), sum(cost) FROM gone GROUP BY source, n;
CREATE UNIQUE INDEX CONCURRENTLY IF NOT EXISTS dl_source_calls_pkey ON dl_source_calls (source, n);
DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_constraint WHERE conrelid = 'dl_source_calls'::regclass AND contype = 'p') THEN ALTER TABLE dl_source_calls ADD PRIMARY KEY USING INDEX dl_source_calls_pkey; END IF; END $$;
ALTER TABLE dl_source_calls REPLICA IDENTITY DEFAULT;
DROP INDEX CONCURRENTLY IF EXISTS ix_dl_source_calls_n;
-- The error of a lane that claims can't judge, and when it was last tried: it is closed until then, and the other lanes stay open.
ALTER TABLE dl_lanes ADD COLUMN IF NOT EXISTS error text, ADD COLUMN IF NOT EXISTS failed_at timestamptz;
