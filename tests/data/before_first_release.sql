-- The schema as the last program before the first release has left it, with its list of migrations, for the test of its conversion: tables and
-- indexes as pg_dump writes them, the document's function, and the names of the functions that the conversion drops.
CREATE TYPE dl_status AS ENUM (
    'queued',
    'running',
    'succeeded',
    'failed',
    'canceled',
    'lost'
);
CREATE TABLE dl_sources (
    source text NOT NULL,
    holder bigint,
    held_until timestamptz,
    free_at timestamptz DEFAULT '-infinity' NOT NULL,
    waits_for text DEFAULT 'pause' NOT NULL,
    kept_s float8 DEFAULT 0 NOT NULL,
    limits jsonb,
    override jsonb,
    paused boolean DEFAULT false NOT NULL,
    periods int4multirange,
    zone text,
    units integer[] DEFAULT '{}' NOT NULL,
    spans_s float8[] DEFAULT '{}' NOT NULL,
    margin_s float8 DEFAULT 1 NOT NULL,
    last_n bigint DEFAULT 0 NOT NULL,
    last_at timestamptz DEFAULT '-infinity' NOT NULL,
    zones text[] DEFAULT '{}' NOT NULL
)
WITH (fillfactor='50');
CREATE TABLE dl_audit (
    audit_id bigint NOT NULL,
    ts timestamptz DEFAULT now() NOT NULL,
    actor text NOT NULL,
    action text NOT NULL,
    job_id uuid,
    detail jsonb DEFAULT '{}' NOT NULL
);
CREATE SEQUENCE dl_audit_audit_id_seq;
ALTER SEQUENCE dl_audit_audit_id_seq OWNED BY dl_audit.audit_id;
CREATE TABLE dl_bulk (
    bulk_id uuid NOT NULL,
    action text NOT NULL,
    priority integer,
    filter jsonb NOT NULL,
    actor text NOT NULL,
    created_at timestamptz DEFAULT statement_timestamp() NOT NULL,
    worked_at timestamptz DEFAULT statement_timestamp() NOT NULL,
    jobs bigint DEFAULT 0 NOT NULL,
    done bigint DEFAULT 0 NOT NULL,
    changed bigint DEFAULT 0 NOT NULL,
    faults integer DEFAULT 0 NOT NULL,
    error text,
    stopped_by text,
    ended_at timestamptz
);
CREATE TABLE dl_bulk_jobs (
    bulk_id uuid NOT NULL,
    turn integer DEFAULT 0 NOT NULL,
    job_id uuid NOT NULL
);
CREATE TABLE dl_depths (
    one boolean DEFAULT true NOT NULL,
    at timestamptz,
    next_at timestamptz DEFAULT '-infinity' NOT NULL,
    queues jsonb,
    CONSTRAINT dl_depths_one_check CHECK (one)
);
CREATE TABLE dl_ended_sessions (
    session bytea NOT NULL,
    until timestamptz NOT NULL
);
CREATE TABLE dl_errors (
    error_id bigint NOT NULL,
    at timestamptz NOT NULL,
    job_id uuid NOT NULL,
    task text NOT NULL,
    queue text NOT NULL,
    attempt integer NOT NULL,
    worker text,
    status dl_status NOT NULL,
    error_group bigint NOT NULL,
    error text NOT NULL
);
CREATE SEQUENCE dl_errors_error_id_seq;
ALTER SEQUENCE dl_errors_error_id_seq OWNED BY dl_errors.error_id;
CREATE TABLE dl_etl_cursors (
    load text NOT NULL,
    upto timestamptz NOT NULL,
    run_id uuid NOT NULL,
    moved_at timestamptz DEFAULT now() NOT NULL
);
CREATE TABLE dl_etl_details (
    run_id uuid NOT NULL,
    task text NOT NULL,
    segment text NOT NULL,
    token bigint NOT NULL,
    details text[] NOT NULL,
    counts jsonb NOT NULL,
    committed_at timestamptz DEFAULT now() NOT NULL,
    row_id bigint NOT NULL
);
ALTER TABLE dl_etl_details ALTER COLUMN row_id ADD GENERATED ALWAYS AS IDENTITY;
CREATE TABLE dl_etl_failures (
    failure_id bigint NOT NULL,
    run_id uuid NOT NULL,
    load text NOT NULL,
    segment text NOT NULL,
    phase text NOT NULL,
    key text NOT NULL,
    error text NOT NULL,
    sample text,
    requests jsonb DEFAULT '[]' NOT NULL,
    failed_at timestamptz DEFAULT now() NOT NULL,
    solved_at timestamptz,
    times integer DEFAULT 1 NOT NULL
);
CREATE SEQUENCE dl_etl_failures_failure_id_seq;
ALTER SEQUENCE dl_etl_failures_failure_id_seq OWNED BY dl_etl_failures.failure_id;
CREATE TABLE dl_etl_former (
    target text NOT NULL,
    version jsonb NOT NULL,
    columns jsonb NOT NULL
);
CREATE TABLE dl_etl_history (
    target text NOT NULL,
    last_as_of timestamptz,
    columns text[]
);
CREATE TABLE dl_etl_logs (
    run_id uuid NOT NULL,
    task text NOT NULL,
    token bigint NOT NULL,
    first_event bigint NOT NULL,
    last_event bigint NOT NULL,
    lines bigint NOT NULL,
    warnings bigint NOT NULL,
    errors bigint NOT NULL
);
CREATE TABLE dl_etl_observed (
    target text NOT NULL,
    as_of timestamptz NOT NULL,
    keys bigint[]
);
CREATE TABLE dl_etl_runs (
    run_id uuid NOT NULL,
    name text NOT NULL,
    kind text NOT NULL,
    status text DEFAULT 'running' NOT NULL,
    started_at timestamptz DEFAULT now() NOT NULL,
    finished_at timestamptz,
    summary jsonb
);
CREATE TABLE dl_etl_segments (
    run_id uuid NOT NULL,
    task text NOT NULL,
    segment text NOT NULL,
    counts jsonb NOT NULL,
    committed_at timestamptz DEFAULT now() NOT NULL
);
CREATE TABLE dl_etl_snapshots (
    target text NOT NULL,
    load text NOT NULL,
    segment text NOT NULL,
    as_of timestamptz NOT NULL
);
CREATE TABLE dl_etl_tasks (
    run_id uuid NOT NULL,
    ordinal integer NOT NULL,
    layer text DEFAULT '' NOT NULL,
    task text NOT NULL,
    status text DEFAULT 'waiting' NOT NULL,
    started_at timestamptz,
    finished_at timestamptz,
    summary jsonb
);
CREATE TABLE dl_function_sets (
    number integer NOT NULL,
    hash text NOT NULL,
    oldest integer DEFAULT 0 NOT NULL,
    applied_at timestamptz DEFAULT now() NOT NULL
);
CREATE TABLE dl_history (
    one boolean DEFAULT true NOT NULL,
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    system bigint NOT NULL,
    timeline text NOT NULL,
    database bigint NOT NULL,
    changed_at timestamptz DEFAULT now() NOT NULL,
    clock_jumped_at timestamptz,
    CONSTRAINT dl_history_one_check CHECK (one)
);
CREATE TABLE dl_job_after (
    job_id uuid NOT NULL,
    after_id uuid NOT NULL,
    was text
);
CREATE TABLE dl_job_events (
    event_id bigint NOT NULL,
    job_id uuid NOT NULL,
    queue text NOT NULL,
    ts timestamptz DEFAULT now() NOT NULL,
    kind text NOT NULL,
    payload jsonb
);
CREATE SEQUENCE dl_job_events_event_id_seq;
ALTER SEQUENCE dl_job_events_event_id_seq OWNED BY dl_job_events.event_id;
CREATE TABLE dl_jobs (
    job_id uuid NOT NULL,
    queue text NOT NULL,
    task text NOT NULL,
    args jsonb DEFAULT '{}' NOT NULL,
    idempotency_key text,
    lock_key text NOT NULL,
    partition_key text DEFAULT '' NOT NULL,
    priority integer DEFAULT 100 NOT NULL,
    available_at timestamptz DEFAULT now() NOT NULL,
    status dl_status DEFAULT 'queued'::dl_status NOT NULL,
    attempt integer DEFAULT 0 NOT NULL,
    max_attempts integer DEFAULT 5 NOT NULL,
    lease_ttl_sec integer DEFAULT 60 NOT NULL,
    lease_expires_at timestamptz,
    heartbeat_at timestamptz,
    cancel_requested boolean DEFAULT false NOT NULL,
    progress jsonb DEFAULT '{}' NOT NULL,
    error text,
    producer text,
    consumer_group text,
    created_at timestamptz DEFAULT now() NOT NULL,
    started_at timestamptz,
    finished_at timestamptz,
    waits_for text,
    token bigint DEFAULT 0 NOT NULL,
    claimed_by text,
    crashes integer DEFAULT 0 NOT NULL,
    refunds integer DEFAULT 0 NOT NULL,
    result jsonb,
    request_hash bytea,
    watched boolean DEFAULT false NOT NULL,
    keyed boolean DEFAULT true NOT NULL,
    when_failed text,
    waits_on uuid,
    wanted_at timestamptz,
    awaited boolean DEFAULT false NOT NULL,
    root_id uuid,
    schedule text,
    planned_at timestamptz,
    backfill uuid,
    run_started_at timestamptz,
    lane text,
    unique_key text,
    version float8,
    superseded_by uuid,
    error_group bigint,
    previous jsonb,
    moves integer,
    requested_version float8,
    CONSTRAINT dl_jobs_chk_positive CHECK (((priority >= 0) AND (attempt >= 0) AND (max_attempts >= 0) AND (lease_ttl_sec > 0)))
);
CREATE TABLE dl_lanes (
    lane text NOT NULL,
    batch_left integer DEFAULT 0 NOT NULL,
    idle_since timestamptz DEFAULT '-infinity',
    last_partition text,
    unknown_at timestamptz,
    closing_at timestamptz,
    queues text[] DEFAULT '{}' NOT NULL,
    error text,
    failed_at timestamptz
)
WITH (fillfactor='50');
CREATE TABLE dl_load_holders (
    load text NOT NULL,
    run_id uuid NOT NULL,
    token bigint NOT NULL,
    since timestamptz DEFAULT now() NOT NULL
);
CREATE TABLE dl_migrations (
    number integer NOT NULL,
    name text NOT NULL,
    applied_at timestamptz DEFAULT now() NOT NULL,
    oldest integer DEFAULT 0 NOT NULL
);
CREATE TABLE dl_notice_groups (
    kind text NOT NULL,
    name text NOT NULL,
    error_group text NOT NULL,
    waiting bigint NOT NULL,
    first_at timestamptz NOT NULL,
    last_at timestamptz NOT NULL,
    queue text,
    job_ids uuid[] NOT NULL,
    error text NOT NULL,
    told_at timestamptz
);
CREATE TABLE dl_notice_watch (
    one boolean DEFAULT true NOT NULL,
    until timestamptz NOT NULL,
    CONSTRAINT dl_notice_watch_one_check CHECK (one)
);
CREATE TABLE dl_notices (
    notice_id bigint NOT NULL,
    at timestamptz DEFAULT statement_timestamp() NOT NULL,
    kind text NOT NULL,
    name text NOT NULL,
    queue text,
    job_id uuid,
    error text,
    times integer DEFAULT 1 NOT NULL
);
CREATE SEQUENCE dl_notices_notice_id_seq;
ALTER SEQUENCE dl_notices_notice_id_seq OWNED BY dl_notices.notice_id;
CREATE TABLE dl_process_events (
    key bigint NOT NULL,
    event_id bigint NOT NULL,
    task_id bigint NOT NULL,
    at timestamptz DEFAULT statement_timestamp() NOT NULL,
    payload jsonb NOT NULL
);
CREATE TABLE dl_process_holdups (
    sink text NOT NULL,
    key bigint NOT NULL,
    partition smallint NOT NULL,
    tries integer NOT NULL,
    since timestamptz DEFAULT statement_timestamp() NOT NULL,
    next_at timestamptz,
    error text NOT NULL
);
CREATE TABLE dl_process_outbox (
    id bigint NOT NULL,
    sink text NOT NULL,
    partition smallint NOT NULL,
    key bigint NOT NULL,
    task_id bigint,
    event_id bigint,
    kind text NOT NULL,
    body jsonb,
    at timestamptz DEFAULT statement_timestamp() NOT NULL,
    held_up boolean DEFAULT false NOT NULL,
    ident uuid DEFAULT gen_random_uuid()
)
WITH (autovacuum_vacuum_scale_factor='0.01', autovacuum_vacuum_threshold='1000');
ALTER TABLE dl_process_outbox ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY;
CREATE TABLE dl_process_partitions (
    sink text NOT NULL,
    partition smallint NOT NULL,
    job_id uuid
);
CREATE TABLE dl_process_sinks (
    sink text NOT NULL,
    types text[],
    kinds text[] NOT NULL,
    until timestamptz NOT NULL
);
CREATE SEQUENCE dl_process_task_seq;
CREATE TABLE dl_process_tasks (
    task_id bigint DEFAULT nextval('dl_process_task_seq'::regclass) NOT NULL,
    key bigint NOT NULL,
    type text NOT NULL,
    kind text NOT NULL,
    method text,
    status text DEFAULT 'waiting' NOT NULL,
    args jsonb,
    context jsonb,
    idempotency_key text,
    request_hash bytea,
    response jsonb,
    error text,
    attempt integer DEFAULT 0 NOT NULL,
    first_task bigint,
    created_at timestamptz DEFAULT statement_timestamp() NOT NULL,
    scheduled_at timestamptz,
    started_at timestamptz,
    finished_at timestamptz,
    expires_at timestamptz,
    watched boolean DEFAULT false NOT NULL,
    ident uuid DEFAULT gen_random_uuid(),
    CONSTRAINT dl_process_tasks_kind_check CHECK ((kind = ANY (ARRAY['init', 'call', 'repair', 'timeout', 'remove']))),
    CONSTRAINT dl_process_tasks_status_check CHECK ((status = ANY (ARRAY['waiting', 'finished', 'error', 'cancelled'])))
);
CREATE TABLE dl_process_types (
    type text NOT NULL,
    version integer NOT NULL,
    served_until timestamptz NOT NULL
)
WITH (fillfactor='50');
CREATE TABLE dl_processes (
    key bigint NOT NULL,
    type text NOT NULL,
    process_id text NOT NULL,
    version integer DEFAULT 1 NOT NULL,
    status text DEFAULT 'init' NOT NULL,
    previous_status text,
    status_changed_at timestamptz DEFAULT now() NOT NULL,
    created_at timestamptz DEFAULT now() NOT NULL,
    detail text,
    error_group bigint,
    corrupted_by bigint,
    aux_state jsonb,
    metadata jsonb DEFAULT '{}' NOT NULL,
    last_event_id bigint DEFAULT 0 NOT NULL,
    job_id uuid,
    timer_task bigint,
    timer_kind text,
    timer_at timestamptz,
    timer_attempt integer,
    timer_first bigint,
    timer_context jsonb,
    running_task bigint,
    running_kind text,
    running_token bigint,
    running_at timestamptz,
    crashes integer DEFAULT 0 NOT NULL,
    removed_at timestamptz,
    timer_ident uuid,
    running_ident uuid,
    CONSTRAINT dl_processes_status_check CHECK ((status = ANY (ARRAY['init', 'running', 'error'])))
)
WITH (fillfactor='70');
ALTER TABLE dl_processes ALTER COLUMN key ADD GENERATED ALWAYS AS IDENTITY;
CREATE TABLE dl_queues (
    queue text NOT NULL,
    paused boolean DEFAULT false NOT NULL,
    changed_at timestamptz DEFAULT now() NOT NULL,
    changed_by text
);
CREATE TABLE dl_run_stats (
    hour timestamptz NOT NULL,
    queue text NOT NULL,
    task text NOT NULL,
    outcome text NOT NULL,
    runs bigint NOT NULL,
    total_s float8 NOT NULL,
    max_s float8 NOT NULL
);
CREATE TABLE dl_run_stats_days (
    day timestamptz NOT NULL,
    queue text NOT NULL,
    task text NOT NULL,
    outcome text NOT NULL,
    runs bigint NOT NULL,
    total_s float8 NOT NULL,
    max_s float8 NOT NULL
);
CREATE TABLE dl_run_stats_new (
    at timestamptz DEFAULT statement_timestamp() NOT NULL,
    queue text NOT NULL,
    task text NOT NULL,
    outcome text NOT NULL,
    runs bigint NOT NULL,
    total_s float8 NOT NULL,
    max_s float8 NOT NULL,
    row_id bigint NOT NULL
);
ALTER TABLE dl_run_stats_new ALTER COLUMN row_id ADD GENERATED ALWAYS AS IDENTITY;
CREATE TABLE dl_schedule_events (
    event_id bigint NOT NULL,
    name text NOT NULL,
    at timestamptz DEFAULT clock_timestamp() NOT NULL,
    kind text NOT NULL,
    payload jsonb
);
CREATE SEQUENCE dl_schedule_events_event_id_seq;
ALTER SEQUENCE dl_schedule_events_event_id_seq OWNED BY dl_schedule_events.event_id;
CREATE TABLE dl_schedules (
    name text NOT NULL,
    spec jsonb NOT NULL,
    task text NOT NULL,
    origin text NOT NULL,
    stored_by text NOT NULL,
    stored_at timestamptz DEFAULT now() NOT NULL,
    changed_at timestamptz DEFAULT now() NOT NULL,
    next_at timestamptz,
    last_at timestamptz,
    last_job_id uuid,
    paused boolean DEFAULT false NOT NULL,
    paused_why text,
    retired_at timestamptz
)
WITH (fillfactor='50');
CREATE TABLE dl_source_calls (
    source text NOT NULL,
    at timestamptz NOT NULL,
    n bigint DEFAULT 0 NOT NULL,
    cost integer DEFAULT 1 NOT NULL
);
CREATE TABLE dl_tasks (
    task text NOT NULL,
    queue text,
    priority integer,
    lock_key jsonb,
    max_attempts integer,
    lease_ttl_sec integer,
    layout integer NOT NULL,
    declared_by text NOT NULL,
    declared_at timestamptz DEFAULT now() NOT NULL,
    limits jsonb,
    override jsonb,
    paused boolean DEFAULT false NOT NULL,
    limited boolean DEFAULT false NOT NULL,
    periods int4multirange,
    zone text,
    max_running integer,
    batch_size integer,
    batch_delay_s float8,
    supplier text,
    cost integer,
    retry_priority integer,
    uniqueness jsonb,
    description text,
    args_schema jsonb,
    first_stage text,
    at_period_end text,
    paused_at timestamptz,
    paused_by text,
    max_running_per_partition integer
);
CREATE SEQUENCE dl_token_seq;
CREATE TABLE dl_workers (
    worker text NOT NULL,
    host text NOT NULL,
    pid integer NOT NULL,
    version text NOT NULL,
    queues jsonb NOT NULL,
    started_at timestamptz DEFAULT now() NOT NULL,
    seen_at timestamptz DEFAULT now() NOT NULL,
    tasks text[],
    only_tasks jsonb
);
ALTER TABLE dl_audit ALTER COLUMN audit_id SET DEFAULT nextval('dl_audit_audit_id_seq'::regclass);
ALTER TABLE dl_errors ALTER COLUMN error_id SET DEFAULT nextval('dl_errors_error_id_seq'::regclass);
ALTER TABLE dl_etl_failures ALTER COLUMN failure_id SET DEFAULT nextval('dl_etl_failures_failure_id_seq'::regclass);
ALTER TABLE dl_job_events ALTER COLUMN event_id SET DEFAULT nextval('dl_job_events_event_id_seq'::regclass);
ALTER TABLE dl_notices ALTER COLUMN notice_id SET DEFAULT nextval('dl_notices_notice_id_seq'::regclass);
ALTER TABLE dl_schedule_events ALTER COLUMN event_id SET DEFAULT nextval('dl_schedule_events_event_id_seq'::regclass);
ALTER TABLE dl_audit ADD CONSTRAINT dl_audit_pkey PRIMARY KEY (audit_id);
ALTER TABLE dl_bulk_jobs ADD CONSTRAINT dl_bulk_jobs_pkey PRIMARY KEY (bulk_id, turn, job_id);
ALTER TABLE dl_bulk ADD CONSTRAINT dl_bulk_pkey PRIMARY KEY (bulk_id);
ALTER TABLE dl_depths ADD CONSTRAINT dl_depths_pkey PRIMARY KEY (one);
ALTER TABLE dl_ended_sessions ADD CONSTRAINT dl_ended_sessions_pkey PRIMARY KEY (session);
ALTER TABLE dl_errors ADD CONSTRAINT dl_errors_pkey PRIMARY KEY (error_id);
ALTER TABLE dl_etl_cursors ADD CONSTRAINT dl_etl_cursors_pkey PRIMARY KEY (load);
ALTER TABLE dl_etl_details ADD CONSTRAINT dl_etl_details_pkey PRIMARY KEY (row_id);
ALTER TABLE dl_etl_failures ADD CONSTRAINT dl_etl_failures_pkey PRIMARY KEY (failure_id);
ALTER TABLE dl_etl_former ADD CONSTRAINT dl_etl_former_pkey PRIMARY KEY (target, version);
ALTER TABLE dl_etl_history ADD CONSTRAINT dl_etl_history_pkey PRIMARY KEY (target);
ALTER TABLE dl_etl_logs ADD CONSTRAINT dl_etl_logs_pkey PRIMARY KEY (run_id, task, token);
ALTER TABLE dl_etl_observed ADD CONSTRAINT dl_etl_observed_pkey PRIMARY KEY (target, as_of);
ALTER TABLE dl_etl_runs ADD CONSTRAINT dl_etl_runs_pkey PRIMARY KEY (run_id);
ALTER TABLE dl_etl_segments ADD CONSTRAINT dl_etl_segments_pkey PRIMARY KEY (run_id, task, segment);
ALTER TABLE dl_etl_snapshots ADD CONSTRAINT dl_etl_snapshots_pkey PRIMARY KEY (target, load, segment);
ALTER TABLE dl_etl_tasks ADD CONSTRAINT dl_etl_tasks_pkey PRIMARY KEY (run_id, ordinal);
ALTER TABLE dl_function_sets ADD CONSTRAINT dl_function_sets_pkey PRIMARY KEY (number);
ALTER TABLE dl_history ADD CONSTRAINT dl_history_pkey PRIMARY KEY (one);
ALTER TABLE dl_job_after ADD CONSTRAINT dl_job_after_pkey PRIMARY KEY (job_id, after_id);
ALTER TABLE dl_job_events ADD CONSTRAINT dl_job_events_pkey PRIMARY KEY (event_id);
ALTER TABLE dl_jobs ADD CONSTRAINT dl_jobs_idempotency_key_key UNIQUE (idempotency_key);
ALTER TABLE dl_jobs ADD CONSTRAINT dl_jobs_pkey PRIMARY KEY (job_id);
ALTER TABLE dl_lanes ADD CONSTRAINT dl_lanes_pkey PRIMARY KEY (lane);
ALTER TABLE dl_load_holders ADD CONSTRAINT dl_load_holders_pkey PRIMARY KEY (load);
ALTER TABLE dl_migrations ADD CONSTRAINT dl_migrations_pkey PRIMARY KEY (number);
ALTER TABLE dl_notice_groups ADD CONSTRAINT dl_notice_groups_pkey PRIMARY KEY (kind, name, error_group);
ALTER TABLE dl_notice_watch ADD CONSTRAINT dl_notice_watch_pkey PRIMARY KEY (one);
ALTER TABLE dl_notices ADD CONSTRAINT dl_notices_pkey PRIMARY KEY (notice_id);
ALTER TABLE dl_process_events ADD CONSTRAINT dl_process_events_pkey PRIMARY KEY (key, event_id);
ALTER TABLE dl_process_holdups ADD CONSTRAINT dl_process_holdups_pkey PRIMARY KEY (sink, key);
ALTER TABLE dl_process_outbox ADD CONSTRAINT dl_process_outbox_pkey PRIMARY KEY (id);
ALTER TABLE dl_process_partitions ADD CONSTRAINT dl_process_partitions_pkey PRIMARY KEY (sink, partition);
ALTER TABLE dl_process_sinks ADD CONSTRAINT dl_process_sinks_pkey PRIMARY KEY (sink);
ALTER TABLE dl_process_tasks ADD CONSTRAINT dl_process_tasks_pkey PRIMARY KEY (task_id);
ALTER TABLE dl_process_types ADD CONSTRAINT dl_process_types_pkey PRIMARY KEY (type, version);
ALTER TABLE dl_processes ADD CONSTRAINT dl_processes_pkey PRIMARY KEY (key);
ALTER TABLE dl_queues ADD CONSTRAINT dl_queues_pkey PRIMARY KEY (queue);
ALTER TABLE dl_run_stats_days ADD CONSTRAINT dl_run_stats_days_pkey PRIMARY KEY (day, queue, task, outcome);
ALTER TABLE dl_run_stats_new ADD CONSTRAINT dl_run_stats_new_pkey PRIMARY KEY (row_id);
ALTER TABLE dl_run_stats ADD CONSTRAINT dl_run_stats_pkey PRIMARY KEY (hour, queue, task, outcome);
ALTER TABLE dl_schedule_events ADD CONSTRAINT dl_schedule_events_pkey PRIMARY KEY (event_id);
ALTER TABLE dl_schedules ADD CONSTRAINT dl_schedules_pkey PRIMARY KEY (name);
ALTER TABLE dl_source_calls ADD CONSTRAINT dl_source_calls_pkey PRIMARY KEY (source, n);
ALTER TABLE dl_sources ADD CONSTRAINT dl_sources_pkey PRIMARY KEY (source);
ALTER TABLE dl_tasks ADD CONSTRAINT dl_tasks_pkey PRIMARY KEY (task);
ALTER TABLE dl_workers ADD CONSTRAINT dl_workers_pkey PRIMARY KEY (worker);
ALTER TABLE dl_workers ADD CONSTRAINT dl_workers_shapes CHECK (((jsonb_typeof(queues) = 'object') AND (NOT jsonb_path_exists(queues, 'strict $.*?(!(((@.type() == "number" && @ >= 0) && @ <= 1000000) && @.floor() == @))'::jsonpath, '{}', true)) AND (COALESCE(jsonb_typeof(only_tasks), 'object') = 'object') AND (NOT COALESCE(jsonb_path_exists(only_tasks, 'strict $.*?(@.type() != "array")'::jsonpath, '{}', true), false)) AND (NOT COALESCE(jsonb_path_exists(only_tasks, 'strict $.*[*]?(@.type() != "string")'::jsonpath, '{}', true), false)) AND (array_position(tasks, NULL::text) IS NULL))) NOT VALID;
CREATE INDEX ix_dl_bulk_created ON dl_bulk (created_at, bulk_id);
CREATE INDEX ix_dl_bulk_open ON dl_bulk (worked_at) WHERE (ended_at IS NULL);
CREATE INDEX ix_dl_errors_group ON dl_errors (error_group, error_id);
CREATE INDEX ix_dl_errors_job ON dl_errors (job_id, error_id);
CREATE INDEX ix_dl_etl_details ON dl_etl_details (run_id, task, segment);
CREATE INDEX ix_dl_etl_failures_load ON dl_etl_failures (load, failure_id) WHERE (solved_at IS NULL);
CREATE INDEX ix_dl_etl_failures_run ON dl_etl_failures (run_id, failure_id);
CREATE INDEX ix_dl_etl_runs_name ON dl_etl_runs (name, started_at, run_id);
CREATE INDEX ix_dl_etl_runs_started ON dl_etl_runs (started_at, run_id);
CREATE INDEX ix_dl_etl_tasks_task ON dl_etl_tasks (task, started_at);
CREATE INDEX ix_dl_job_after ON dl_job_after (after_id, job_id);
CREATE INDEX ix_dl_job_events_job ON dl_job_events (job_id, event_id);
CREATE INDEX ix_dl_jobs_after ON dl_jobs (waits_on, created_at, job_id) WHERE ((status = 'queued'::dl_status) AND (waits_for = 'after'));
CREATE INDEX ix_dl_jobs_awaited ON dl_jobs (job_id) WHERE (awaited AND (status = ANY (ARRAY['succeeded'::dl_status, 'failed'::dl_status, 'canceled'::dl_status, 'lost'::dl_status])));
CREATE INDEX ix_dl_jobs_claim ON dl_jobs (queue, available_at, priority, created_at) WHERE (status = 'queued'::dl_status);
CREATE INDEX ix_dl_jobs_created ON dl_jobs (created_at, job_id);
CREATE INDEX ix_dl_jobs_due ON dl_jobs (available_at) WHERE ((status = 'queued'::dl_status) AND (waits_for = 'time'));
CREATE INDEX ix_dl_jobs_ended_keys ON dl_jobs (hashtext(lock_key), created_at, job_id) WHERE ((status = ANY (ARRAY['succeeded'::dl_status, 'failed'::dl_status, 'canceled'::dl_status, 'lost'::dl_status])) AND keyed);
CREATE INDEX ix_dl_jobs_failing ON dl_jobs (error_group, created_at, job_id) INCLUDE (status) WHERE ((error_group IS NOT NULL) AND (status = ANY (ARRAY['queued'::dl_status, 'failed'::dl_status, 'lost'::dl_status])));
CREATE INDEX ix_dl_jobs_finished ON dl_jobs (status, finished_at) WHERE (finished_at IS NOT NULL);
CREATE INDEX ix_dl_jobs_key_versions ON dl_jobs (unique_key, version) WHERE ((unique_key IS NOT NULL) AND (version IS NOT NULL));
CREATE INDEX ix_dl_jobs_lane ON dl_jobs (lane, queue, priority, created_at, job_id) WHERE ((status = 'queued'::dl_status) AND (waits_for = 'limit'));
CREATE INDEX ix_dl_jobs_lane_running ON dl_jobs (lane) WHERE ((status = 'running'::dl_status) AND (lane IS NOT NULL));
CREATE INDEX ix_dl_jobs_lane_turns ON dl_jobs (lane, queue, (
CASE
    WHEN (octet_length(partition_key) <= 500) THEN partition_key
    ELSE md5(partition_key)
END), priority, created_at, job_id) WHERE ((status = 'queued'::dl_status) AND (waits_for = 'limit'));
CREATE INDEX ix_dl_jobs_parked ON dl_jobs (hashtext(lock_key), priority, created_at, job_id) WHERE ((status = 'queued'::dl_status) AND (waits_for = 'lock'));
CREATE UNIQUE INDEX ix_dl_jobs_planned ON dl_jobs (schedule, planned_at, COALESCE(backfill, '00000000-0000-0000-0000-000000000000'::uuid)) WHERE (schedule IS NOT NULL);
CREATE INDEX ix_dl_jobs_ready ON dl_jobs (queue, priority, created_at, job_id) WHERE ((status = 'queued'::dl_status) AND (waits_for IS NULL));
CREATE INDEX ix_dl_jobs_root ON dl_jobs (root_id, created_at, job_id) WHERE (root_id IS NOT NULL);
CREATE INDEX ix_dl_jobs_running_keys ON dl_jobs (hashtext(lock_key), job_id) WHERE ((status = 'running'::dl_status) AND keyed);
CREATE INDEX ix_dl_jobs_running_lease ON dl_jobs (lease_expires_at) WHERE (status = 'running'::dl_status);
CREATE INDEX ix_dl_jobs_schedule_open ON dl_jobs (schedule) WHERE ((schedule IS NOT NULL) AND (status = ANY (ARRAY['queued'::dl_status, 'running'::dl_status])));
CREATE INDEX ix_dl_jobs_status_queue ON dl_jobs (status, queue);
CREATE UNIQUE INDEX ix_dl_jobs_unique ON dl_jobs (unique_key) WHERE ((unique_key IS NOT NULL) AND (status = ANY (ARRAY['queued'::dl_status, 'running'::dl_status])) AND (superseded_by IS NULL));
CREATE INDEX ix_dl_jobs_unknown ON dl_jobs (queue, hashtext(task), created_at) WHERE ((status = 'queued'::dl_status) AND (waits_for = 'task'));
CREATE INDEX ix_dl_jobs_wrong ON dl_jobs (created_at, job_id) WHERE (status = ANY (ARRAY['failed'::dl_status, 'canceled'::dl_status, 'lost'::dl_status]));
CREATE INDEX ix_dl_notice_groups_waiting ON dl_notice_groups (first_at) WHERE (waiting > 0);
CREATE INDEX ix_dl_process_holdups_next ON dl_process_holdups (sink, partition, next_at);
CREATE INDEX ix_dl_process_holdups_process ON dl_process_holdups (key);
CREATE INDEX ix_dl_process_outbox_held_up ON dl_process_outbox (sink, id) WHERE held_up;
CREATE INDEX ix_dl_process_outbox_next ON dl_process_outbox (sink, partition, id) WHERE (NOT held_up);
CREATE INDEX ix_dl_process_outbox_process ON dl_process_outbox (key, sink, id);
CREATE INDEX ix_dl_process_tasks_expiring ON dl_process_tasks (key, expires_at) WHERE ((status = 'waiting') AND (expires_at IS NOT NULL));
CREATE INDEX ix_dl_process_tasks_process ON dl_process_tasks (key, task_id DESC);
CREATE INDEX ix_dl_process_tasks_waiting ON dl_process_tasks (key, task_id) WHERE (status = 'waiting');
CREATE INDEX ix_dl_processes_error ON dl_processes (type, error_group, key) WHERE ((status = 'error') AND (removed_at IS NULL));
CREATE INDEX ix_dl_processes_metadata ON dl_processes USING gin (metadata jsonb_path_ops) WHERE (removed_at IS NULL);
CREATE INDEX ix_dl_processes_removed ON dl_processes (removed_at) WHERE (removed_at IS NOT NULL);
CREATE INDEX ix_dl_processes_status ON dl_processes (type, status, key) WHERE (removed_at IS NULL);
CREATE INDEX ix_dl_processes_version ON dl_processes (type, version, status, key) WHERE (removed_at IS NULL);
CREATE INDEX ix_dl_schedule_events_name ON dl_schedule_events (name, event_id);
CREATE INDEX ix_dl_schedules_due ON dl_schedules (next_at) WHERE ((NOT paused) AND (retired_at IS NULL));
CREATE INDEX ix_dl_source_calls ON dl_source_calls (source, at);
CREATE UNIQUE INDEX ux_dl_process_tasks_key ON dl_process_tasks (type, idempotency_key) WHERE (idempotency_key IS NOT NULL);
CREATE UNIQUE INDEX ux_dl_processes_id ON dl_processes (type, process_id) WHERE (removed_at IS NULL);
ALTER TABLE dl_etl_details ADD CONSTRAINT dl_etl_details_run_id_fkey FOREIGN KEY (run_id) REFERENCES dl_etl_runs(run_id) ON DELETE CASCADE;
ALTER TABLE dl_etl_failures ADD CONSTRAINT dl_etl_failures_run_id_fkey FOREIGN KEY (run_id) REFERENCES dl_etl_runs(run_id) ON DELETE CASCADE;
ALTER TABLE dl_etl_former ADD CONSTRAINT dl_etl_former_target_fkey FOREIGN KEY (target) REFERENCES dl_etl_history(target) ON DELETE CASCADE;
ALTER TABLE dl_etl_logs ADD CONSTRAINT dl_etl_logs_run_id_fkey FOREIGN KEY (run_id) REFERENCES dl_etl_runs(run_id) ON DELETE CASCADE;
ALTER TABLE dl_etl_observed ADD CONSTRAINT dl_etl_observed_target_fkey FOREIGN KEY (target) REFERENCES dl_etl_history(target) ON DELETE CASCADE;
ALTER TABLE dl_etl_runs ADD CONSTRAINT dl_etl_runs_run_id_fkey FOREIGN KEY (run_id) REFERENCES dl_jobs(job_id) ON DELETE CASCADE;
ALTER TABLE dl_etl_segments ADD CONSTRAINT dl_etl_segments_run_id_fkey FOREIGN KEY (run_id) REFERENCES dl_etl_runs(run_id) ON DELETE CASCADE;
ALTER TABLE dl_etl_snapshots ADD CONSTRAINT dl_etl_snapshots_target_fkey FOREIGN KEY (target) REFERENCES dl_etl_history(target) ON DELETE CASCADE;
ALTER TABLE dl_etl_tasks ADD CONSTRAINT dl_etl_tasks_run_id_fkey FOREIGN KEY (run_id) REFERENCES dl_etl_runs(run_id) ON DELETE CASCADE;
ALTER TABLE dl_job_after ADD CONSTRAINT dl_job_after_job_id_fkey FOREIGN KEY (job_id) REFERENCES dl_jobs(job_id) ON DELETE CASCADE;
ALTER TABLE dl_job_events ADD CONSTRAINT dl_job_events_job_id_fkey FOREIGN KEY (job_id) REFERENCES dl_jobs(job_id) ON DELETE CASCADE;
INSERT INTO dl_depths DEFAULT VALUES;
INSERT INTO dl_migrations (number, name) VALUES
  (1, 'document'), (2, 'columns'), (4, 'backfill'), (5, 'indexes'), (7, 'etl'), (8, 'details'), (9, 'former'),
  (10, 'worker_tasks'), (11, 'tasks'), (12, 'keyed'), (13, 'after'), (14, 'key_indexes'), (15, 'after_indexes'),
  (16, 'schedules'), (17, 'schedule_indexes'), (18, 'run_start'), (19, 'limits'), (20, 'unique'),
  (21, 'unique_indexes'), (22, 'failures'), (23, 'failing'), (24, 'run_stats'), (25, 'notices'), (26, 'stages'),
  (28, 'limit_indexes'), (30, 'unique_versions'), (31, 'period_ends'), (32, 'day_budgets'), (33, 'entries'),
  (37, 'run_logs'), (40, 'bulk'), (41, 'depths'), (46, 'partitions'), (47, 'partition_indexes'),
  (48, 'partition_keys'), (49, 'processes'), (50, 'process_outbox'), (51, 'run_stats_of_days'), (52, 'primary_keys'),
  (53, 'versions_side_by_side'), (54, 'version_indexes'), (55, 'process_idents'), (56, 'history'),
  (57, 'load_holders'), (58, 'observed'), (60, 'shapes'), (61, 'ended_sessions'), (62, 'clock_jumps'),
  (63, 'overlap_names');
INSERT INTO dl_function_sets (number, hash) VALUES (52, 'df7b34628e15c9fc7d30e7418720d65881057752154015c85e6a29e5b914a086');
CREATE FUNCTION notify_job_ready() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
  IF (TG_OP = 'INSERT') THEN
    PERFORM pg_notify('dl_jobs', NEW.queue);
    RETURN NEW;
  ELSIF (TG_OP = 'UPDATE') THEN
    IF NEW.status = 'queued' AND NEW.available_at <= now()
       AND (OLD.status IS DISTINCT FROM NEW.status OR OLD.available_at IS DISTINCT FROM NEW.available_at) THEN
      PERFORM pg_notify('dl_jobs', NEW.queue);
    END IF;
    RETURN NEW;
  END IF;
  RETURN NEW;
END $$;
CREATE FUNCTION dl_claim(text,integer,integer,text,text[],integer[],float8,integer[],uuid) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION dl_claim_jobs(text,integer,integer,text,text[],integer[],float8,integer[],uuid) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION dl_claim_runs(text,integer,integer,text,text[],integer[],float8,integer[],uuid,text[],text[]) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION dl_process_ask(text,text,text,text,jsonb,jsonb,text,bytea,timestamptz,boolean,jsonb,integer,jsonb,uuid,integer) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION dl_process_ask_many(text[],text[],text[],text[],text[],text[],text[],bytea[],timestamptz[],boolean[],text[],integer[],boolean[],uuid[],integer,boolean) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION dl_process_begin(bigint[],uuid[],bigint[],integer[]) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION dl_process_commit(bigint[],uuid[],bigint[],bigint[],text[],text[],text[],text[],text[],text[],text[],float8[],timestamptz[],text[],boolean[],integer[],text[]) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION dl_process_forget_ident(bigint,bigint) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION dl_process_settle(text,integer,uuid,bigint,bigint[],bigint[],bigint[],text[],bigint[],integer,float8,float8) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION dl_process_take_back(bigint[],boolean) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION dl_process_tried_by_ident(bigint[]) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION dl_units_left(dl_sources,integer[],float8[],integer,timestamptz) RETURNS void LANGUAGE sql AS '';
