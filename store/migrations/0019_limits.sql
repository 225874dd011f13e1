-- Limits of tasks and of suppliers.
-- dl_tasks:
--   limits     what processes declare; override: what operators have put in its place, which outlives a deploy
--   paused     no job of it starts
--   limited    its jobs wait in a lane, which has its name. Once it is, it stays so: a lane without limits is open
-- and what holds, computed from both whenever one changes:
--   periods    the minutes of a week (Monday 00:00 is 0) in which its jobs may start, by the clock of zone; NULL: always
--   cost       units of the supplier's budgets that a start takes
ALTER TABLE dl_tasks
  ADD COLUMN IF NOT EXISTS limits jsonb,
  ADD COLUMN IF NOT EXISTS override jsonb,
  ADD COLUMN IF NOT EXISTS paused boolean NOT NULL DEFAULT false,
  ADD COLUMN IF NOT EXISTS limited boolean NOT NULL DEFAULT false,
  ADD COLUMN IF NOT EXISTS periods int4multirange,
  ADD COLUMN IF NOT EXISTS zone text,
  ADD COLUMN IF NOT EXISTS max_running int,
  ADD COLUMN IF NOT EXISTS batch_size int,
  ADD COLUMN IF NOT EXISTS batch_delay_s float8,
  ADD COLUMN IF NOT EXISTS supplier text,
  ADD COLUMN IF NOT EXISTS cost int,
  ADD COLUMN IF NOT EXISTS retry_priority int;

-- A lane is locked by the claim that starts jobs of it. batch_left are the places that the batch under way has still, idle_since
-- is when it was first seen that no job of it is in work.
CREATE TABLE IF NOT EXISTS dl_lanes (
  lane text PRIMARY KEY,
  batch_left int NOT NULL DEFAULT 0,
  idle_since timestamptz DEFAULT '-infinity'
) WITH (fillfactor = 50);

-- Suppliers: who is asked, by tasks and by loads. units[i] in any spans_s[i] seconds are their budgets; a start counts for margin_s
-- longer, in which its handler may begin. last_n is the number of all units taken, last_at the time of the last.
-- dl_source_calls: up to the call, n units had been taken, cost of them by it.
ALTER TABLE dl_sources
  ADD COLUMN IF NOT EXISTS limits jsonb,
  ADD COLUMN IF NOT EXISTS override jsonb,
  ADD COLUMN IF NOT EXISTS paused boolean NOT NULL DEFAULT false,
  ADD COLUMN IF NOT EXISTS periods int4multirange,
  ADD COLUMN IF NOT EXISTS zone text,
  ADD COLUMN IF NOT EXISTS units int[] NOT NULL DEFAULT '{}',
  ADD COLUMN IF NOT EXISTS spans_s float8[] NOT NULL DEFAULT '{}',
  ADD COLUMN IF NOT EXISTS margin_s float8 NOT NULL DEFAULT 1,
  ADD COLUMN IF NOT EXISTS last_n bigint NOT NULL DEFAULT 0,
  ADD COLUMN IF NOT EXISTS last_at timestamptz NOT NULL DEFAULT '-infinity';
ALTER TABLE dl_source_calls
  ADD COLUMN IF NOT EXISTS n bigint NOT NULL DEFAULT 0,
  ADD COLUMN IF NOT EXISTS cost int NOT NULL DEFAULT 1;
CREATE INDEX IF NOT EXISTS ix_dl_source_calls_n ON dl_source_calls (source, n);
