-- What durable processes tell to others: events and changes of their status to sinks, messages to other processes.
--   dl_process_sinks       who is told, as the settings of running processes name them; `until`: nobody has named it since
--     types, kinds         of which types, NULL: all; and which of event, created, failed, repaired, removed
--   dl_process_outbox      what is to be delivered, in the order of `id` for each process; a row goes when it was delivered
--     sink                 messages: one to another process
--     partition            0 to 15, by the process: each has one job that delivers
--     event_id             of an event, whose payload is the event's; else `body` is the reason of a failure, or the message
--     held_up              waits behind one of the same process that could not be delivered
--   dl_process_partitions  the job that delivers, one at a time
--   dl_process_holdups     processes whose first row could not be delivered: how often, why, and when it is tried again;
--                          `next_at` NULL: not before an operator says so
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
  held_up boolean NOT NULL DEFAULT false
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
