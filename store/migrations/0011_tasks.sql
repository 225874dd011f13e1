-- What a task's jobs have that their requests do not say: written by each process when it starts, read by the statement that adds
-- jobs. NULL: the task says nothing of it.
--   lock_key     a template, "rates:{year}", or names of fields, ["source", "year"]; the function dl_key makes the key of it
--   layout       of the program that wrote the row; one that knows fewer settings leaves the row alone, or it would be half of each
CREATE TABLE IF NOT EXISTS dl_tasks (
  task text PRIMARY KEY,
  queue text,
  priority int,
  lock_key jsonb,
  max_attempts int,
  lease_ttl_sec int,
  layout int NOT NULL,
  declared_by text NOT NULL,
  declared_at timestamptz NOT NULL DEFAULT now()
);
