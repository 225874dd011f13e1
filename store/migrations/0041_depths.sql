-- How many jobs wait in which queue, counted by one process for all (pages): what was counted last, and from when on it may be
-- counted again. One row.
CREATE TABLE IF NOT EXISTS dl_depths (
  one boolean PRIMARY KEY DEFAULT true CHECK (one),
  at timestamptz,
  next_at timestamptz NOT NULL DEFAULT '-infinity',
  queues jsonb
);
INSERT INTO dl_depths DEFAULT VALUES ON CONFLICT DO NOTHING;

-- Who has paused what, and when.
ALTER TABLE dl_queues ADD COLUMN IF NOT EXISTS changed_by text;
ALTER TABLE dl_tasks
  ADD COLUMN IF NOT EXISTS paused_at timestamptz,
  ADD COLUMN IF NOT EXISTS paused_by text;
