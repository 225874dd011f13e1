-- Lanes for blocks of jobs whose task not all workers of their queues know. For such a lane:
--   unknown_at  when a live worker of one of these queues was last seen that did not know the task; NULL: a lane for other reasons
--   queues      the queues in which it was unknown
--   closing_at  since when its task's new jobs are plain ready jobs; the lane is dropped later, once it is empty
ALTER TABLE dl_lanes
  ADD COLUMN IF NOT EXISTS unknown_at timestamptz,
  ADD COLUMN IF NOT EXISTS closing_at timestamptz,
  ADD COLUMN IF NOT EXISTS queues text[] NOT NULL DEFAULT '{}';

-- Versions of types of durable processes, each with the instant until which a worker serves it: workers renew it.
CREATE TABLE IF NOT EXISTS dl_process_types (
  type text NOT NULL,
  version int NOT NULL,
  served_until timestamptz NOT NULL,
  PRIMARY KEY (type, version)
) WITH (fillfactor = 50);
