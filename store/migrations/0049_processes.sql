-- Durable processes: what they are now, what was asked of them, and what happened.
--   dl_processes         one row a process; its lock is the order of all that is done with it
--     job_id             its wake-up job, the one row of dl_jobs that runs its steps; NULL while nothing can run and no timer waits
--     timer_…            the one timer that lives: `timer_kind` is timeout or remove, `timer_task` the id that its run will have,
--                        `timer_first` that of its first try, `timer_attempt` how often it was tried before
--     running_…          the mark of the step that runs: its task, that task's kind, and the token of the job's run. A mark with
--                        an older token than the job's is a step whose worker died
--     crashes            how often a step in a row has lost its worker
--     removed_at         the process is gone: the pruner deletes it, and until then its idempotency keys are known
--   dl_process_tasks     what was asked by clients, and timers that have ended; a task that waits is the oldest by its id first
--     status             waiting, running is said by the process's mark, then finished, error or cancelled
--     response, error    the answer: `response` of one that finished; `error` of one that failed, was refused or cancelled
--     first_task         of a try again: the first one
--     watched            another process waits for the answer
--   dl_process_events    what happened, numbered by the engine
CREATE SEQUENCE IF NOT EXISTS dl_process_task_seq;
CREATE TABLE IF NOT EXISTS dl_processes (
  key bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  type text NOT NULL,
  process_id text NOT NULL,
  version int NOT NULL DEFAULT 1,
  status text NOT NULL DEFAULT 'init' CHECK (status IN ('init', 'running', 'error')),
  previous_status text,
  status_changed_at timestamptz NOT NULL DEFAULT now(),
  created_at timestamptz NOT NULL DEFAULT now(),
  detail text,
  error_group bigint,
  corrupted_by bigint,
  aux_state jsonb,
  metadata jsonb NOT NULL DEFAULT '{}',
  last_event_id bigint NOT NULL DEFAULT 0,
  job_id uuid,
  timer_task bigint,
  timer_kind text,
  timer_at timestamptz,
  timer_attempt int,
  timer_first bigint,
  timer_context jsonb,
  running_task bigint,
  running_kind text,
  running_token bigint,
  running_at timestamptz,
  crashes int NOT NULL DEFAULT 0,
  removed_at timestamptz
) WITH (fillfactor = 70);
CREATE UNIQUE INDEX IF NOT EXISTS ux_dl_processes_id ON dl_processes (type, process_id) WHERE removed_at IS NULL;
CREATE INDEX IF NOT EXISTS ix_dl_processes_metadata ON dl_processes USING gin (metadata jsonb_path_ops) WHERE removed_at IS NULL;
CREATE INDEX IF NOT EXISTS ix_dl_processes_status ON dl_processes (type, status, key) WHERE removed_at IS NULL;
CREATE INDEX IF NOT EXISTS ix_dl_processes_error ON dl_processes (type, error_group, key) WHERE status = 'error' AND removed_at IS NULL;
CREATE INDEX IF NOT EXISTS ix_dl_processes_removed ON dl_processes (removed_at) WHERE removed_at IS NOT NULL;

CREATE TABLE IF NOT EXISTS dl_process_tasks (
  task_id bigint PRIMARY KEY DEFAULT nextval('dl_process_task_seq'),
  key bigint NOT NULL,
  type text NOT NULL,
  kind text NOT NULL CHECK (kind IN ('init', 'call', 'repair', 'timeout', 'remove')),
  method text,
  status text NOT NULL DEFAULT 'waiting' CHECK (status IN ('waiting', 'finished', 'error', 'cancelled')),
  args jsonb,
  context jsonb,
  idempotency_key text,
  request_hash bytea,
  response jsonb,
  error text,
  attempt int NOT NULL DEFAULT 0,
  first_task bigint,
  created_at timestamptz NOT NULL DEFAULT statement_timestamp(),
  scheduled_at timestamptz,
  started_at timestamptz,
  finished_at timestamptz,
  expires_at timestamptz,
  watched boolean NOT NULL DEFAULT false
);
CREATE UNIQUE INDEX IF NOT EXISTS ux_dl_process_tasks_key ON dl_process_tasks (type, idempotency_key) WHERE idempotency_key IS NOT NULL;
-- The newest first, so that what walks over the waiting ones, the oldest first, can't take it for theirs.
CREATE INDEX IF NOT EXISTS ix_dl_process_tasks_process ON dl_process_tasks (key, task_id DESC);
CREATE INDEX IF NOT EXISTS ix_dl_process_tasks_waiting ON dl_process_tasks (key, task_id) WHERE status = 'waiting';
CREATE INDEX IF NOT EXISTS ix_dl_process_tasks_expiring ON dl_process_tasks (key, expires_at)
  WHERE status = 'waiting' AND expires_at IS NOT NULL;

CREATE TABLE IF NOT EXISTS dl_process_events (
  key bigint NOT NULL,
  event_id bigint NOT NULL,
  task_id bigint NOT NULL,
  at timestamptz NOT NULL DEFAULT statement_timestamp(),
  payload jsonb NOT NULL,
  PRIMARY KEY (key, event_id)
);
