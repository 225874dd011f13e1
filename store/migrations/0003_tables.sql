-- Our own tables of the queue. The last one refers to dl_jobs: this locks dl_jobs against writes until the file's transaction commits.

-- Queues that were paused or resumed: since when, and by whom.
CREATE TABLE IF NOT EXISTS dl_queues (
  queue text PRIMARY KEY,
  paused boolean NOT NULL DEFAULT false,
  changed_at timestamptz NOT NULL DEFAULT now(),
  changed_by text
);

-- Processes.
--   queues      their queues, each with its number of slots
--   only_tasks  the queues from which they take jobs of some tasks alone, with those tasks: {"hr": ["employee"]}; NULL: there are none
--   tasks       the tasks that they know; NULL: the program does not say
-- Statements about all workers read these three: the check refuses a row of another shape to the program that writes it.
CREATE TABLE IF NOT EXISTS dl_workers (
  worker text PRIMARY KEY,
  host text NOT NULL,
  pid int NOT NULL,
  version text NOT NULL,
  queues jsonb NOT NULL,
  only_tasks jsonb,
  tasks text[],
  started_at timestamptz NOT NULL DEFAULT now(),
  seen_at timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT dl_workers_shapes CHECK (
    jsonb_typeof(queues) = 'object'
    AND NOT jsonb_path_exists(queues, 'strict $.* ? (!(@.type() == "number" && @ >= 0 && @ <= 1000000 && @.floor() == @))', '{}', true)
    AND coalesce(jsonb_typeof(only_tasks), 'object') = 'object'
    AND NOT coalesce(jsonb_path_exists(only_tasks, 'strict $.* ? (@.type() != "array")', '{}', true), false)
    AND NOT coalesce(jsonb_path_exists(only_tasks, 'strict $.*[*] ? (@.type() != "string")', '{}', true), false)
    AND array_position(tasks, NULL) IS NULL)
);

-- The history of the database: one row, which a service writes when the server or the database is another than before, after a restore or
-- the promotion of a standby. It informs: no guarantee depends on it, since a restore of the tables alone changes nothing here.
--   id                          random; a service that finds another one than before starts anew
--   system, timeline, database  of the server, of its write-ahead log, and the database's oid
--   clock_jumped_at             when the database's clock was last found to have jumped ahead, by that clock. A lease that was renewed
--                               before counts for its whole length from then on: another clock has ended it than the one that granted it
CREATE TABLE IF NOT EXISTS dl_history (
  one boolean PRIMARY KEY DEFAULT true CHECK (one),
  id uuid NOT NULL DEFAULT gen_random_uuid(),
  system bigint NOT NULL,
  timeline text NOT NULL,
  database bigint NOT NULL,
  changed_at timestamptz NOT NULL DEFAULT now(),
  clock_jumped_at timestamptz
);

-- Each operator's action. It outlives its job, so job_id is no foreign key.
CREATE TABLE IF NOT EXISTS dl_audit (
  audit_id bigserial PRIMARY KEY,
  ts timestamptz NOT NULL DEFAULT now(),
  actor text NOT NULL,
  action text NOT NULL,
  job_id uuid,
  detail jsonb NOT NULL DEFAULT '{}'::jsonb
);

-- Sign-ins of the pages that were ended by a sign-out, by the hash of their cookie, until they would have ended anyway.
CREATE TABLE IF NOT EXISTS dl_ended_sessions (
  session bytea PRIMARY KEY,
  until timestamptz NOT NULL
);

-- What each process declares of its tasks when it starts. The statement that adds jobs reads it. NULL: the task does not say.
--   lock_key     a template, "rates:{year}", or names of fields, ["source", "year"]; the function dl_key makes the key
--   uniqueness   an object; NULL: the task's jobs are not unique
--     key          true (all args), a template or names of fields
--     duplicates   "waiting", "open" or "update"
--     keep_time, when_running ("cancel"), after_error ("delay"): of updates, where they are set
--   first_stage  of a task that consists of stages: the task that its jobs get when they are added
--   description  the first line of the task's documentation
--   args_schema  the JSON Schema of its arguments
--   layout       of the program that wrote the row: a program that knows fewer settings does not write it
-- Limits:
--   limits       what processes declare; override: what operators have set instead, which outlives a deploy
--   limited      its jobs wait in a limit queue with its name. Once true, it stays so: a limit queue without limits is open
--   paused       no job of it starts; paused_at, paused_by: since when, and by whom
-- Computed from limits and override when one of them changes:
--   periods      the minutes of a week (Monday 00:00 is 0) in which its jobs may start, by the clock of zone; NULL: always
--   at_period_end  what happens to running jobs when a work period of the task or of its supplier closes: 'stop': they are stopped and
--                return to their limit queue; NULL, 'finish': they continue
--   cost         units of the supplier's rate limits that a start takes
CREATE TABLE IF NOT EXISTS dl_tasks (
  task text PRIMARY KEY,
  queue text,
  priority int,
  lock_key jsonb,
  max_attempts int,
  lease_ttl_sec int,
  uniqueness jsonb,
  first_stage text,
  description text,
  args_schema jsonb,
  layout int NOT NULL,
  declared_by text NOT NULL,
  declared_at timestamptz NOT NULL DEFAULT now(),
  limits jsonb,
  override jsonb,
  limited boolean NOT NULL DEFAULT false,
  paused boolean NOT NULL DEFAULT false,
  paused_at timestamptz,
  paused_by text,
  periods int4multirange,
  zone text,
  at_period_end text,
  max_running int,
  max_running_per_partition int,
  batch_size int,
  batch_delay_s float8,
  supplier text,
  cost int,
  retry_priority int
);

-- Limit queues. The claim that starts jobs of one locks its row.
--   batch_left      the places that are left in the current batch
--   idle_since      when it was first seen that no job of it runs
--   last_partition  the partition key that was served last: the next one is that of the next waiting key, in key order
--   error           why claims can't evaluate its limits; failed_at: when that was last tried. It is closed until a later claim succeeds;
--                   the others stay open
-- Of a limit queue for jobs whose task some workers of their queues do not know:
--   unknown_at      when a live worker of one of these queues was last seen that did not know the task; NULL: it has other reasons
--   queues          the queues in which the task was unknown
--   closing_at      since when new jobs of the task are plain ready jobs; the limit queue is dropped later, once it is empty
CREATE TABLE IF NOT EXISTS dl_lanes (
  lane text PRIMARY KEY,
  batch_left int NOT NULL DEFAULT 0,
  idle_since timestamptz DEFAULT '-infinity',
  last_partition text,
  error text,
  failed_at timestamptz,
  unknown_at timestamptz,
  closing_at timestamptz,
  queues text[] NOT NULL DEFAULT '{}'
) WITH (fillfactor = 50);

-- Suppliers: external systems that tasks and loads call.
--   holder           the token of the run of a load whose request is under way, until held_until at the latest
--   free_at          no load may call the supplier before, for the reason waits_for
--   kept_s           the longest span of a rate limit that it was called with: so long its calls are kept
--   limits, override, paused, periods, zone: as in dl_tasks
--   units, spans_s   its rate limits: units[i] in any spans_s[i] seconds; where spans_s[i] is 0, in a day of zones[i]
--   margin_s         a start counts for so much longer: its handler may begin within this time
--   last_n, last_at  the number of all units taken so far, and the time of the last one
CREATE TABLE IF NOT EXISTS dl_sources (
  source text PRIMARY KEY,
  holder bigint,
  held_until timestamptz,
  free_at timestamptz NOT NULL DEFAULT '-infinity',
  waits_for text NOT NULL DEFAULT 'pause',
  kept_s float8 NOT NULL DEFAULT 0,
  limits jsonb,
  override jsonb,
  paused boolean NOT NULL DEFAULT false,
  periods int4multirange,
  zone text,
  units int[] NOT NULL DEFAULT '{}',
  spans_s float8[] NOT NULL DEFAULT '{}',
  zones text[] NOT NULL DEFAULT '{}',
  margin_s float8 NOT NULL DEFAULT 1,
  last_n bigint NOT NULL DEFAULT 0,
  last_at timestamptz NOT NULL DEFAULT '-infinity'
) WITH (fillfactor = 50);

-- Calls of suppliers with rate limits, for as long as the limits' spans. Up to the call, n units had been taken, `cost` of them by it.
CREATE TABLE IF NOT EXISTS dl_source_calls (
  source text NOT NULL,
  n bigint NOT NULL DEFAULT 0,
  at timestamptz NOT NULL,
  cost int NOT NULL DEFAULT 1,
  PRIMARY KEY (source, n)
);
CREATE INDEX IF NOT EXISTS ix_dl_source_calls ON dl_source_calls (source, at);

-- Schedules.
--   spec             what was declared: a cron expression or a period, its zone, the task, its args and options, the policies
--   origin           code: processes declare it when they start, the last one wins; operator: an operator has set it, and they leave it
--   stored_at        when it was first stored: a period without a start counts from then
--   next_at          the next planned time; NULL: there is no further one
--   last_at          the newest planned time that has a job, last_job_id
--   paused           no job is added, for the reason paused_why; after the pause `missed` decides about times that were due meanwhile
--   retired_at       since when no process declares it
CREATE TABLE IF NOT EXISTS dl_schedules (
  name text PRIMARY KEY,
  spec jsonb NOT NULL,
  task text NOT NULL,
  origin text NOT NULL,
  stored_by text NOT NULL,
  stored_at timestamptz NOT NULL DEFAULT now(),
  changed_at timestamptz NOT NULL DEFAULT now(),
  next_at timestamptz,
  last_at timestamptz,
  last_job_id uuid,
  paused boolean NOT NULL DEFAULT false,
  paused_why text,
  retired_at timestamptz
) WITH (fillfactor = 50);
-- Schedules that fall due, for the scheduler.
CREATE INDEX IF NOT EXISTS ix_dl_schedules_due ON dl_schedules (next_at) WHERE NOT paused AND retired_at IS NULL;

-- Planned times that have no job, and changes of schedules: left_out (missed, or the job before had not ended), paused, resumed, changed,
-- retired.
CREATE TABLE IF NOT EXISTS dl_schedule_events (
  event_id bigserial PRIMARY KEY,
  name text NOT NULL,
  at timestamptz NOT NULL DEFAULT clock_timestamp(),
  kind text NOT NULL,
  payload jsonb
);
CREATE INDEX IF NOT EXISTS ix_dl_schedule_events_name ON dl_schedule_events (name, event_id);

-- The log of errors: a row for each run that failed, whichever program ran it. It outlives its job, so job_id is no foreign key.
--   status  the job's status after the run: queued (a retry), failed or lost
--   worker  the worker of the run; NULL: another service
CREATE TABLE IF NOT EXISTS dl_errors (
  error_id bigserial PRIMARY KEY,
  at timestamptz NOT NULL,
  job_id uuid NOT NULL,
  task text NOT NULL,
  queue text NOT NULL,
  attempt int NOT NULL,
  worker text,
  status dl_status NOT NULL,
  error_group bigint NOT NULL,
  error text NOT NULL
);
CREATE INDEX IF NOT EXISTS ix_dl_errors_group ON dl_errors (error_group, error_id);
CREATE INDEX IF NOT EXISTS ix_dl_errors_job ON dl_errors (job_id, error_id);

-- Statistics of runs: their number, and their own durations in seconds.
--   dl_run_stats_new   rows that finishes append, one for each queue, task and outcome of a batch; it has no further index, so that they
--                      cost little. The pruner folds them into dl_run_stats
--   dl_run_stats       one row for each hour, queue, task and outcome
--   dl_run_stats_days  the same for each day in UTC, for views of weeks; a trigger of dl_run_stats keeps the sums
--   outcome            succeeded, failed, retried, snoozed, returned, canceled, expired (its lease ended and it returned to the queue), lost
CREATE TABLE IF NOT EXISTS dl_run_stats_new (
  row_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  at timestamptz NOT NULL DEFAULT statement_timestamp(),
  queue text NOT NULL,
  task text NOT NULL,
  outcome text NOT NULL,
  runs bigint NOT NULL,
  total_s float8 NOT NULL,
  max_s float8 NOT NULL
);
CREATE TABLE IF NOT EXISTS dl_run_stats (
  hour timestamptz NOT NULL,
  queue text NOT NULL,
  task text NOT NULL,
  outcome text NOT NULL,
  runs bigint NOT NULL,
  total_s float8 NOT NULL,
  max_s float8 NOT NULL,
  PRIMARY KEY (hour, queue, task, outcome)
);
CREATE TABLE IF NOT EXISTS dl_run_stats_days (
  day timestamptz NOT NULL,
  queue text NOT NULL,
  task text NOT NULL,
  outcome text NOT NULL,
  runs bigint NOT NULL,
  total_s float8 NOT NULL,
  max_s float8 NOT NULL,
  PRIMARY KEY (day, queue, task, outcome)
);

-- How many jobs wait in each queue, counted by one process for all (pages): the last count, and when the next one may begin. One row.
CREATE TABLE IF NOT EXISTS dl_depths (
  one boolean PRIMARY KEY DEFAULT true CHECK (one),
  at timestamptz,
  next_at timestamptz NOT NULL DEFAULT '-infinity',
  queues jsonb
);
INSERT INTO dl_depths DEFAULT VALUES ON CONFLICT DO NOTHING;

-- Failures of jobs and of schedules that operators are to be notified of, while a process has targets for notices.
--   dl_notice_watch   one row: until when triggers write notices
--   dl_notices        what happened and was not gathered yet: failed, lost (name: the task), schedule_paused, left_out (name: the schedule)
--   dl_notice_groups  what was gathered, by task or schedule and error: how many wait, since when, and when operators were last notified
CREATE TABLE IF NOT EXISTS dl_notice_watch (
  one boolean PRIMARY KEY DEFAULT true CHECK (one),
  until timestamptz NOT NULL
);
CREATE TABLE IF NOT EXISTS dl_notices (
  notice_id bigserial PRIMARY KEY,
  at timestamptz NOT NULL DEFAULT statement_timestamp(),
  kind text NOT NULL,
  name text NOT NULL,
  queue text,
  job_id uuid,
  error text,
  times int NOT NULL DEFAULT 1
);
CREATE TABLE IF NOT EXISTS dl_notice_groups (
  kind text NOT NULL,
  name text NOT NULL,
  error_group text NOT NULL,
  waiting bigint NOT NULL,
  first_at timestamptz NOT NULL,
  last_at timestamptz NOT NULL,
  queue text,
  job_ids uuid[] NOT NULL,
  error text NOT NULL,
  told_at timestamptz,
  PRIMARY KEY (kind, name, error_group)
);
CREATE INDEX IF NOT EXISTS ix_dl_notice_groups_waiting ON dl_notice_groups (first_at) WHERE waiting > 0;

-- Bulk operations (U16): one statement chooses their jobs when an operator confirms.
--   jobs, done, changed  how many were chosen, how many of these were processed, and how many of those were changed
--   worked_at            the operation that has waited longest is next
--   ended_at             nothing is left to do, or it was stopped (stopped_by), or it can't be done (error, after some faults)
-- dl_bulk_jobs has the jobs that were not processed yet. turn: 0; farther from it, the more often another session had the row locked.
CREATE TABLE IF NOT EXISTS dl_bulk (
  bulk_id uuid PRIMARY KEY,
  action text NOT NULL,
  priority int,
  filter jsonb NOT NULL,
  actor text NOT NULL,
  created_at timestamptz NOT NULL DEFAULT statement_timestamp(),
  worked_at timestamptz NOT NULL DEFAULT statement_timestamp(),
  jobs bigint NOT NULL DEFAULT 0,
  done bigint NOT NULL DEFAULT 0,
  changed bigint NOT NULL DEFAULT 0,
  faults int NOT NULL DEFAULT 0,
  error text,
  stopped_by text,
  ended_at timestamptz
);
CREATE INDEX IF NOT EXISTS ix_dl_bulk_open ON dl_bulk (worked_at) WHERE ended_at IS NULL;
CREATE INDEX IF NOT EXISTS ix_dl_bulk_created ON dl_bulk (created_at, bulk_id);
CREATE TABLE IF NOT EXISTS dl_bulk_jobs (
  bulk_id uuid NOT NULL,
  turn int NOT NULL DEFAULT 0,
  job_id uuid NOT NULL,
  PRIMARY KEY (bulk_id, turn, job_id)
);

-- Jobs that run after others. after_id is no foreign key: other services may delete jobs. `was` is the status that it had then.
CREATE TABLE IF NOT EXISTS dl_job_after (
  job_id uuid NOT NULL REFERENCES dl_jobs (job_id) ON DELETE CASCADE,
  after_id uuid NOT NULL,
  was text,
  PRIMARY KEY (job_id, after_id)
);
-- Retention, and the deletion of a job that others wait for.
CREATE INDEX IF NOT EXISTS ix_dl_job_after ON dl_job_after (after_id, job_id);
