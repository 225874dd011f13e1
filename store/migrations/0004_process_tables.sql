-- The tables of durable processes. Columns named ident identify a step for external systems. No number of this database decides them, so a
-- restore can't give them out again. NULL: written by an earlier program, which knows the step by its task's number.

-- The state of each process. The lock of its row orders all that is done with it.
--   job_id       its wake-up job, the one job that runs its steps; NULL while nothing can run and no timer waits
--   timer_…      its one timer: timer_kind is timeout or remove, timer_task the id that its run will have, timer_first that of the first
--                try, timer_attempt how often it was tried; a further try keeps timer_ident
--   running_…    the step that runs: its task, the task's kind, and the token of the job's run. With an older token than the job's, it is a
--                step whose worker died
--   crashes      how many runs of a step in a row have lost their worker
--   removed_at   the process is gone: the pruner deletes it, and its idempotency keys are known until then
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
  timer_ident uuid,
  running_task bigint,
  running_kind text,
  running_token bigint,
  running_at timestamptz,
  running_ident uuid,
  crashes int NOT NULL DEFAULT 0,
  removed_at timestamptz
) WITH (fillfactor = 70);
CREATE UNIQUE INDEX IF NOT EXISTS ux_dl_processes_id ON dl_processes (type, process_id) WHERE removed_at IS NULL;
CREATE INDEX IF NOT EXISTS ix_dl_processes_metadata ON dl_processes USING gin (metadata jsonb_path_ops) WHERE removed_at IS NULL;
CREATE INDEX IF NOT EXISTS ix_dl_processes_status ON dl_processes (type, status, key) WHERE removed_at IS NULL;
CREATE INDEX IF NOT EXISTS ix_dl_processes_version ON dl_processes (type, version, status, key) WHERE removed_at IS NULL;
CREATE INDEX IF NOT EXISTS ix_dl_processes_error ON dl_processes (type, error_group, key) WHERE status = 'error' AND removed_at IS NULL;
CREATE INDEX IF NOT EXISTS ix_dl_processes_removed ON dl_processes (removed_at) WHERE removed_at IS NOT NULL;

-- Requests of clients, and timers that have ended. The waiting one with the lowest id is next.
--   status           waiting (the process's row says which one runs), then finished, error or cancelled
--   response, error  the answer: response of one that finished; error of one that failed, was refused or cancelled
--   first_task       of a further try: the first one
--   watched          another process waits for the answer
--   ident            of a client's request: random; of a step's: a hash of the step's ident and of the request
CREATE SEQUENCE IF NOT EXISTS dl_process_task_seq;
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
  watched boolean NOT NULL DEFAULT false,
  ident uuid DEFAULT gen_random_uuid()
);
CREATE UNIQUE INDEX IF NOT EXISTS ux_dl_process_tasks_key ON dl_process_tasks (type, idempotency_key) WHERE idempotency_key IS NOT NULL;
-- The newest first: so a walk over the waiting ones, the oldest first, can't use it instead of its own.
CREATE INDEX IF NOT EXISTS ix_dl_process_tasks_process ON dl_process_tasks (key, task_id DESC);
CREATE INDEX IF NOT EXISTS ix_dl_process_tasks_waiting ON dl_process_tasks (key, task_id) WHERE status = 'waiting';
CREATE INDEX IF NOT EXISTS ix_dl_process_tasks_expiring ON dl_process_tasks (key, expires_at)
  WHERE status = 'waiting' AND expires_at IS NOT NULL;

-- The events of each process, numbered by the engine.
CREATE TABLE IF NOT EXISTS dl_process_events (
  key bigint NOT NULL,
  event_id bigint NOT NULL,
  task_id bigint NOT NULL,
  at timestamptz NOT NULL DEFAULT statement_timestamp(),
  payload jsonb NOT NULL,
  PRIMARY KEY (key, event_id)
);

-- Versions of types of processes, each with the time until which a worker serves it. Workers renew it.
CREATE TABLE IF NOT EXISTS dl_process_types (
  type text NOT NULL,
  version int NOT NULL,
  served_until timestamptz NOT NULL,
  PRIMARY KEY (type, version)
) WITH (fillfactor = 50);

-- What processes send: events and changes of their status to sinks, messages to other processes.
--   dl_process_sinks       the sinks in the settings of running processes; until: no process has named it since
--     types, kinds         of which types (NULL: all), and which of event, created, failed, repaired, removed
--   dl_process_outbox      what is to be delivered, in the order of id for each process; a row is deleted when it was delivered
--     sink                 of a message: messages
--     partition            0 to 15, by the process: each has one job that delivers
--     event_id             of an event, whose payload is the event's. Otherwise body is the reason of a failure, or the message
--     held_up              it waits behind a row of the same process that could not be delivered
--     ident                identifies the delivery: a hash of the step's ident and of what the step sends
--   dl_process_partitions  the job that delivers, one at a time
--   dl_process_holdups     processes whose first row could not be delivered: how often, why, and when the next try is; next_at NULL: not
--                          before an operator asks for it
CREATE TABLE IF NOT EXISTS dl_process_sinks (
  sink text PRIMARY KEY,
  types text[],
  kinds text[] NOT NULL,
  until timestamptz NOT NULL
);
CREATE TABLE IF NOT EXISTS dl_process_outbox (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  sink text NOT NULL,
  partition smallint NOT NULL,
  key bigint NOT NULL,
  task_id bigint,
  event_id bigint,
  kind text NOT NULL,
  body jsonb,
  at timestamptz NOT NULL DEFAULT statement_timestamp(),
  held_up boolean NOT NULL DEFAULT false,
  ident uuid DEFAULT gen_random_uuid()
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000);
CREATE INDEX IF NOT EXISTS ix_dl_process_outbox_next ON dl_process_outbox (sink, partition, id) WHERE NOT held_up;
CREATE INDEX IF NOT EXISTS ix_dl_process_outbox_held_up ON dl_process_outbox (sink, id) WHERE held_up;
CREATE INDEX IF NOT EXISTS ix_dl_process_outbox_process ON dl_process_outbox (key, sink, id);
CREATE TABLE IF NOT EXISTS dl_process_partitions (
  sink text NOT NULL,
  partition smallint NOT NULL,
  job_id uuid,
  PRIMARY KEY (sink, partition)
);
CREATE TABLE IF NOT EXISTS dl_process_holdups (
  sink text NOT NULL,
  key bigint NOT NULL,
  partition smallint NOT NULL,
  tries int NOT NULL,
  since timestamptz NOT NULL DEFAULT statement_timestamp(),
  next_at timestamptz,
  error text NOT NULL,
  PRIMARY KEY (sink, key)
);
CREATE INDEX IF NOT EXISTS ix_dl_process_holdups_next ON dl_process_holdups (sink, partition, next_at);
CREATE INDEX IF NOT EXISTS ix_dl_process_holdups_process ON dl_process_holdups (key);
