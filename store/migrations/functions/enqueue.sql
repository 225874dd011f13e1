-- Enqueueing: dl_enqueue for every transaction, and the functions that it shares with our own statement
-- (store/queue/enqueue.py).
-- dl_enqueue and dl_enqueue_job run with their owner's rights, so that a client needs no right on a table. Therefore
-- they check all arguments, and refuse built-in tasks themselves: for the trigger that refuses these to clients, the
-- inserting role is the owner. The functions that they call run with the caller's rights, which are then the owner's. A
-- refusal has SQLSTATE 22023; it names the argument at the beginning of its message and, for programs, as its column.
CREATE OR REPLACE FUNCTION {schema}.dl_refuse(p_field text, p_message text) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RAISE EXCEPTION USING ERRCODE = '22023', COLUMN = p_field, MESSAGE = p_field || ': ' || p_message;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_refuse(text, text) FROM PUBLIC;

-- Checks a name or a key by the rules of NewJob: one line, no control characters, and not only spaces.
CREATE OR REPLACE FUNCTION {schema}.dl_check_name(p_field text, p_value text, p_most int) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF p_value IS NOT NULL AND (length(p_value) NOT BETWEEN 1 AND p_most OR p_value ~ E'[\\x01-\\x1f\\x7f-\\x9f\\u2028\\u2029]|^\\s*$') THEN
    PERFORM {schema}.dl_refuse(p_field, format(
      'must have 1 to %s characters on one line, without control characters, and not only spaces, not %s',
      p_most, to_json(left(p_value, 60))));
  END IF;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_check_name(text, text, int) FROM PUBLIC;

-- The key of a job's args: by a template, "rates:{year}", or by names of fields, ["source", "year"]. The latter is the
-- task's name with the values as JSON, so that different lists of values have different keys. Numbers have one form: 1
-- for 1.0. p_setting is the setting that needs the key.
CREATE OR REPLACE FUNCTION {schema}.dl_key(p_setting text, p_spec jsonb, p_task text, p_args jsonb) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_part record;
  v_value jsonb;
  v_values jsonb := '[]';
  v_key text := '';
BEGIN
  FOR v_part IN
    SELECT NULL AS literal, field FROM jsonb_array_elements_text(CASE jsonb_typeof(p_spec) WHEN 'array' THEN p_spec ELSE '[]' END) AS field
    UNION ALL
    SELECT m[1], m[2] FROM regexp_matches(CASE jsonb_typeof(p_spec) WHEN 'string' THEN p_spec #>> '{}' ELSE '' END,
                                          E'([^{}]+)|\\{([^{}]+)\\}', 'g') AS m
  LOOP
    IF v_part.field IS NULL THEN
      v_key := v_key || v_part.literal;
      CONTINUE;
    END IF;
    v_value := p_args -> v_part.field;
    IF v_value IS NULL OR jsonb_typeof(v_value) NOT IN ('string', 'number', 'boolean') THEN
      PERFORM {schema}.dl_refuse('args.' || v_part.field, format(
        'is required as a string, a number or a boolean for the %s of the task %s', p_setting, to_json(p_task)));
    END IF;
    IF jsonb_typeof(v_value) = 'number' THEN
      v_value := to_jsonb(trim_scale(v_value::numeric));
    END IF;
    v_values := v_values || jsonb_build_array(v_value);
    v_key := v_key || (v_value #>> '{}');
  END LOOP;
  IF jsonb_typeof(p_spec) = 'array' THEN
    v_key := p_task || ':' || v_values;
  END IF;
  PERFORM {schema}.dl_check_name(p_setting, v_key, 512);
  RETURN v_key;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_key(text, jsonb, text, jsonb) FROM PUBLIC;

-- Adds one job in the caller's own transaction: the row, its first event and the notification become visible with its
-- commit, or not at all. Values that are not given are those of the task (dl_tasks). Returns the ID of the job that the
-- request results in, and `did`: added; again (the idempotency_key is known, and the request was the same); or, if the
-- task's jobs are unique, kept, updated, older (see dl_add_unique). `version` is a number; for a timestamp, the seconds
-- since 1970.
-- Its lookups are of one row each. A plan that was made while the tables were empty would scan them, so scans are off.
-- That also applies to the foreign key of dl_job_events, whose lookup the session plans with these settings.
-- The hash of a request begins with 01, which distinguishes it from the hashes of our programs: a job that one of them
-- has added and the other sends again is compared by its columns.
CREATE OR REPLACE FUNCTION {schema}.dl_enqueue_job(
  task text, args jsonb DEFAULT '{}', queue text DEFAULT NULL, lock_key text DEFAULT NULL, priority int DEFAULT NULL,
  available_at timestamptz DEFAULT NULL, idempotency_key text DEFAULT NULL, partition_key text DEFAULT NULL,
  max_attempts int DEFAULT NULL, lease_ttl_sec int DEFAULT NULL, producer text DEFAULT NULL, consumer_group text DEFAULT NULL,
  after uuid[] DEFAULT NULL, when_failed text DEFAULT NULL, root uuid DEFAULT NULL, version float8 DEFAULT NULL,
  OUT job_id uuid, OUT did text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
  v_now bigint := extract(epoch FROM clock_timestamp()) * 1000000;
  v_time text := lpad(to_hex((v_now / 1000 << 12) | (v_now % 1000 * 4096 / 1000)), 15, '0');
  -- A UUID of version 7: 48 bits of milliseconds, 12 bits of the fraction; variant and rest are from the server's
  -- random UUID.
  v_id uuid := left(v_time, 12) || '7' || right(v_time, 3) || right(replace(gen_random_uuid()::text, '-', ''), 16);
  v_names text := concat_ws('/', dl_enqueue_job.task, dl_enqueue_job.queue, dl_enqueue_job.lock_key, dl_enqueue_job.idempotency_key,
                            nullif(dl_enqueue_job.partition_key, ''), dl_enqueue_job.producer, dl_enqueue_job.consumer_group);
  v_hash bytea;
  v_after uuid[];
  v_waits boolean := coalesce(cardinality(dl_enqueue_job.after), 0) > 0;
  v_task record;
  v_queue text;
  v_lock_key text;
  v_lane text;
  v_root uuid;
  v_first record;
BEGIN
  IF dl_enqueue_job.task IS NULL THEN
    PERFORM {schema}.dl_refuse('task', 'is required');
  ELSIF dl_enqueue_job.task LIKE ANY (ARRAY['process.%', 'notify.%', 'migrate']) THEN
    PERFORM {schema}.dl_refuse('task', format(
      'must not be %s: process.*, notify.*, migrate are names of built-in tasks', to_json(dl_enqueue_job.task)));
  END IF;
  -- One check of all names together; each is checked separately only if one of them may be wrong.
  IF length(v_names) > 200 OR v_names ~ E'[\\x01-\\x1f\\x7f-\\x9f\\u2028\\u2029]|(^|/)\\s*(/|$)' THEN
    PERFORM {schema}.dl_check_name('task', dl_enqueue_job.task, 200), {schema}.dl_check_name('queue', dl_enqueue_job.queue, 200),
            {schema}.dl_check_name('lock_key', dl_enqueue_job.lock_key, 512),
            {schema}.dl_check_name('idempotency_key', dl_enqueue_job.idempotency_key, 512),
            {schema}.dl_check_name('partition_key', nullif(dl_enqueue_job.partition_key, ''), 512),
            {schema}.dl_check_name('producer', dl_enqueue_job.producer, 512),
            {schema}.dl_check_name('consumer_group', dl_enqueue_job.consumer_group, 512);
  END IF;
  IF dl_enqueue_job.priority < 0 OR dl_enqueue_job.max_attempts NOT BETWEEN 1 AND 1000000
     OR dl_enqueue_job.lease_ttl_sec NOT BETWEEN 3 AND 86400 THEN
    PERFORM {schema}.dl_refuse(n.name, format('must be an integer from %s to %s, not %s', n.low, n.high, n.value))
    FROM (VALUES ('priority', dl_enqueue_job.priority, 0, 2147483647), ('max_attempts', dl_enqueue_job.max_attempts, 1, 1000000),
                 ('lease_ttl_sec', dl_enqueue_job.lease_ttl_sec, 3, 86400)) AS n (name, value, low, high)
    WHERE n.value NOT BETWEEN n.low AND n.high;
  END IF;
  IF dl_enqueue_job.available_at NOT BETWEEN '1900-01-01 UTC' AND '9000-01-01 UTC' THEN
    PERFORM {schema}.dl_refuse('available_at', format('must be between the years 1900 and 9000, not %s', dl_enqueue_job.available_at));
  ELSIF jsonb_typeof(dl_enqueue_job.args) IS DISTINCT FROM 'object' THEN
    PERFORM {schema}.dl_refuse('args', format(
      'must be a JSON object, not %s', coalesce(jsonb_typeof(dl_enqueue_job.args), 'null')));
  ELSIF octet_length(dl_enqueue_job.args::text) > 16777216 THEN
    PERFORM {schema}.dl_refuse('args', format(
      'must have at most 16777216 bytes in PostgreSQL''s format, not %s', octet_length(dl_enqueue_job.args::text)));
  END IF;
  IF v_waits THEN
    -- Each job ID only once.
    v_after := (SELECT array_agg(DISTINCT a.id ORDER BY a.id) FROM unnest(dl_enqueue_job.after) AS a (id));
  END IF;
  IF cardinality(v_after) > 10000 THEN
    PERFORM {schema}.dl_refuse('after', format('must have at most 10000 IDs, not %s', cardinality(v_after)));
  ELSIF dl_enqueue_job.when_failed NOT IN ('cancel', 'run') THEN
    PERFORM {schema}.dl_refuse('when_failed', format('must be cancel or run, not %s', to_json(left(dl_enqueue_job.when_failed, 60))));
  END IF;
  IF dl_enqueue_job.idempotency_key IS NOT NULL THEN
    v_hash := E'\\x01' || sha256(convert_to((jsonb_build_array(
      dl_enqueue_job.task, dl_enqueue_job.args, dl_enqueue_job.queue, dl_enqueue_job.lock_key, dl_enqueue_job.priority,
      extract(epoch FROM dl_enqueue_job.available_at), dl_enqueue_job.partition_key, dl_enqueue_job.max_attempts, dl_enqueue_job.lease_ttl_sec,
      dl_enqueue_job.producer, dl_enqueue_job.consumer_group, v_after,
      CASE WHEN v_waits THEN coalesce(dl_enqueue_job.when_failed, 'cancel') END)
      || CASE WHEN dl_enqueue_job.version IS NULL THEN '[]' ELSE jsonb_build_array(dl_enqueue_job.version) END)::text, 'UTF8'));
  END IF;
  -- The first job of a key may be deleted between the two statements.
  FOR attempt IN 1 .. 3 LOOP
    SELECT t.task, t.queue, t.lock_key, t.priority, t.max_attempts, t.lease_ttl_sec, t.limited, t.first_stage, t.uniqueness
    INTO v_task FROM {schema}.dl_tasks t WHERE t.task = dl_enqueue_job.task;
    IF v_task.uniqueness IS NULL AND dl_enqueue_job.version IS NULL THEN
      v_queue := coalesce(dl_enqueue_job.queue, v_task.queue, {schema}.dl_refuse('queue', format(
        'is required, because the task %s has no queue', to_json(dl_enqueue_job.task)) || CASE WHEN v_task.task IS NULL
        THEN '; no process has declared it yet: start `dataloader serve` with it once, or set queue' ELSE '' END));
      v_lock_key := dl_enqueue_job.lock_key;
      IF v_lock_key IS NULL AND v_task.lock_key IS NOT NULL THEN
        v_lock_key := {schema}.dl_key('lock_key', v_task.lock_key, dl_enqueue_job.task, dl_enqueue_job.args);
      END IF;
      v_lane := CASE WHEN v_task.limited THEN v_task.task END;
      IF v_task.first_stage IS NOT NULL THEN
        v_lane := (SELECT s.task FROM {schema}.dl_tasks s WHERE s.task = v_task.first_stage AND s.limited);
      END IF;
      IF dl_enqueue_job.root IS NOT NULL THEN
        v_root := coalesce((SELECT p.root_id FROM {schema}.dl_jobs p WHERE p.job_id = dl_enqueue_job.root), dl_enqueue_job.root);
      END IF;
      INSERT INTO {schema}.dl_jobs (job_id, queue, task, args, idempotency_key, lock_key, keyed, partition_key, priority,
                                    available_at, max_attempts, lease_ttl_sec, producer, consumer_group, request_hash,
                                    root_id, when_failed, waits_for, waits_on, wanted_at, lane)
      VALUES (v_id, v_queue, coalesce(v_task.first_stage, dl_enqueue_job.task), dl_enqueue_job.args, dl_enqueue_job.idempotency_key,
              coalesce(v_lock_key, v_id::text), v_lock_key IS NOT NULL, coalesce(dl_enqueue_job.partition_key, ''),
              coalesce(dl_enqueue_job.priority, v_task.priority, {default_priority}),
              CASE WHEN v_waits THEN 'infinity' ELSE coalesce(dl_enqueue_job.available_at, now()) END,
              coalesce(dl_enqueue_job.max_attempts, v_task.max_attempts, {default_max_attempts}),
              coalesce(dl_enqueue_job.lease_ttl_sec, v_task.lease_ttl_sec, {default_lease_s}), dl_enqueue_job.producer, dl_enqueue_job.consumer_group, v_hash,
              v_root, CASE WHEN v_waits THEN coalesce(dl_enqueue_job.when_failed, 'cancel') END, CASE WHEN v_waits THEN 'after' END,
              CASE WHEN v_waits THEN '00000000-0000-0000-0000-000000000000'::uuid END,
              CASE WHEN v_waits THEN dl_enqueue_job.available_at END, v_lane)
      ON CONFLICT DO NOTHING;
      IF FOUND THEN
        INSERT INTO {schema}.dl_job_events (job_id, queue, kind) VALUES (v_id, v_queue, 'queued');
        job_id := v_id;
        did := 'added';
        IF v_waits THEN
          PERFORM {schema}.dl_refuse('after', format('must have IDs of existing jobs; no job has the ID %s', coalesce(a.id::text, 'null')))
          FROM unnest(v_after) AS a (id) WHERE (SELECT j.job_id FROM {schema}.dl_jobs j WHERE j.job_id = a.id) IS NULL;
          INSERT INTO {schema}.dl_job_after (job_id, after_id) SELECT job_id, a.id FROM unnest(v_after) AS a (id);
        END IF;
        RETURN;
      END IF;
    END IF;
    SELECT j.job_id, CASE WHEN get_byte(j.request_hash, 0) = 1 AND octet_length(j.request_hash) = 33 THEN j.request_hash = v_hash
                          ELSE (j.task = dl_enqueue_job.task OR starts_with(j.task, dl_enqueue_job.task || '.')) AND j.args = dl_enqueue_job.args
                               AND j.partition_key = coalesce(dl_enqueue_job.partition_key, '')
                               AND j.queue = coalesce(dl_enqueue_job.queue, j.queue)
                               AND (dl_enqueue_job.lock_key IS NULL OR j.keyed AND j.lock_key = dl_enqueue_job.lock_key) END AS is_same
    INTO v_first FROM {schema}.dl_jobs j WHERE j.idempotency_key = dl_enqueue_job.idempotency_key;
    IF FOUND AND v_first.is_same THEN
      -- With a synchronous standby: the commit of this answer waits for the standby, and so for all earlier commits.
      PERFORM pg_logical_emit_message(true, 'dataloader', '') WHERE current_setting('synchronous_standby_names') <> '';
      SELECT v_first.job_id, 'again' INTO job_id, did;
      RETURN;
    ELSIF FOUND THEN
      RAISE EXCEPTION USING ERRCODE = 'unique_violation', COLUMN = 'idempotency_key', MESSAGE = format(
        'idempotency_key: %s belongs to job %s, whose request was different',
        to_json(dl_enqueue_job.idempotency_key), v_first.job_id);
    END IF;
    IF v_waits THEN
      PERFORM {schema}.dl_refuse('after', 'is not supported, because one job of a unique task can cover several requests')
      FROM {schema}.dl_tasks t WHERE t.task = dl_enqueue_job.task AND t.uniqueness IS NOT NULL;
    END IF;
    SELECT u.job_id, u.did INTO job_id, did FROM {schema}.dl_add_unique(
      v_id, dl_enqueue_job.queue, dl_enqueue_job.task, dl_enqueue_job.args, dl_enqueue_job.idempotency_key,
      dl_enqueue_job.lock_key, coalesce(dl_enqueue_job.partition_key, ''), dl_enqueue_job.priority,
      dl_enqueue_job.available_at, dl_enqueue_job.max_attempts, dl_enqueue_job.lease_ttl_sec, {default_lease_s}, dl_enqueue_job.producer,
      dl_enqueue_job.consumer_group, v_hash, dl_enqueue_job.root, dl_enqueue_job.version) AS u;
    IF did IS NOT NULL THEN
      RETURN;
    END IF;
  END LOOP;
  RAISE EXCEPTION USING ERRCODE = 'serialization_failure',
    MESSAGE = 'the first job of the idempotency key was repeatedly deleted while this job was being added';
END $$;
REVOKE ALL ON FUNCTION
  {schema}.dl_enqueue_job(text, jsonb, text, text, int, timestamptz, text, text, int, int, text, text, uuid[], text, uuid, float8)
FROM PUBLIC;

-- The same for callers that need only the ID.
CREATE OR REPLACE FUNCTION {schema}.dl_enqueue(
  task text, args jsonb DEFAULT '{}', queue text DEFAULT NULL, lock_key text DEFAULT NULL, priority int DEFAULT NULL,
  available_at timestamptz DEFAULT NULL, idempotency_key text DEFAULT NULL, partition_key text DEFAULT NULL,
  max_attempts int DEFAULT NULL, lease_ttl_sec int DEFAULT NULL, producer text DEFAULT NULL, consumer_group text DEFAULT NULL,
  after uuid[] DEFAULT NULL, when_failed text DEFAULT NULL, root uuid DEFAULT NULL)
RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN ({schema}.dl_enqueue_job(
    task, args, queue, lock_key, priority, available_at, idempotency_key, partition_key, max_attempts, lease_ttl_sec, producer,
    consumer_group, after, when_failed, root)).job_id;
END $$;
REVOKE ALL ON FUNCTION
  {schema}.dl_enqueue(text, jsonb, text, text, int, timestamptz, text, text, int, int, text, text, uuid[], text, uuid) FROM PUBLIC;
