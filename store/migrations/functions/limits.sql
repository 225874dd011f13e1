-- Limits of tasks and suppliers: the open lanes, the number of jobs that each may start now, and the units that the
-- starts take. With the caller's rights and with pinned plans, as the claim.

-- Whether a clock that is in p_periods is open from p_now on for p_margin_s, and otherwise the seconds until the next
-- check. The check is never later than the opening, except for a period that begins within a repeated hour: it may lose
-- ten minutes.
CREATE OR REPLACE FUNCTION {schema}.dl_opens_in(p_periods int4multirange, p_zone text, p_now timestamptz, p_margin_s float8) RETURNS float8
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_wall timestamp;
  v_minute int;
  v_next int;
  v_closes timestamp;
BEGIN
  IF p_periods IS NULL THEN
    RETURN 0;
  ELSIF p_zone IS NULL THEN
    RAISE data_exception USING MESSAGE = 'work periods have no time zone';
  END IF;
  v_wall := p_now AT TIME ZONE p_zone;
  v_minute := (extract(isodow FROM v_wall)::int - 1) * 1440 + extract(hour FROM v_wall)::int * 60 + extract(minute FROM v_wall)::int;
  IF p_periods @> v_minute THEN
    v_closes := (p_now + make_interval(secs => p_margin_s)) AT TIME ZONE p_zone;
    IF p_periods @> ((extract(isodow FROM v_closes)::int - 1) * 1440 + extract(hour FROM v_closes)::int * 60 + extract(minute FROM v_closes)::int) THEN
      RETURN 0;
    END IF;
    -- It closes within the margin.
    RETURN greatest(p_margin_s, 0.001);
  END IF;
  SELECT min(CASE WHEN lower(r) > v_minute THEN lower(r) ELSE lower(r) + 10080 END) INTO v_next FROM unnest(p_periods) AS r;
  RETURN least(greatest(extract(epoch FROM
    (date_trunc('minute', v_wall) + make_interval(mins => v_next - v_minute)) AT TIME ZONE p_zone - p_now), 0.001), 600);
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_opens_in(int4multirange, text, timestamptz, float8) FROM PUBLIC;

-- The begin and the end of the day that a zone has at p_now, by the two offsets that its clock may have at midnight. If
-- a midnight is skipped, the day begins with the change; if it occurs twice, with the first one.
CREATE OR REPLACE FUNCTION {schema}.dl_day(p_zone text, p_now timestamptz, OUT begins timestamptz, OUT ends timestamptz)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_day timestamp := date_trunc('day', p_now AT TIME ZONE p_zone);
  v_next timestamp := v_day + interval '1 day';
  v_began timestamptz := v_day AT TIME ZONE 'UTC' - (p_now AT TIME ZONE p_zone - p_now AT TIME ZONE 'UTC');
  v_before timestamptz := v_began - interval '3 h';
  v_after timestamptz := v_began + interval '27 h';
BEGIN
  SELECT coalesce(min(c.at) FILTER (WHERE c.at <= p_now AND c.at AT TIME ZONE p_zone >= v_day), min(c.at)) INTO begins
  FROM (VALUES (v_began), (v_day AT TIME ZONE 'UTC' - (v_before AT TIME ZONE p_zone - v_before AT TIME ZONE 'UTC'))) AS c (at);
  SELECT coalesce(min(c.at) FILTER (WHERE c.at > p_now AND c.at AT TIME ZONE p_zone >= v_next), max(c.at)) INTO ends
  FROM (VALUES (v_began + interval '24 h'),
               (v_next AT TIME ZONE 'UTC' - (v_after AT TIME ZONE p_zone - v_after AT TIME ZONE 'UTC'))) AS c (at);
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_day(text, timestamptz) FROM PUBLIC;

-- The number of units of a supplier that may be taken at p_now (NULL without a limit), and the seconds until p_cost of
-- them may be taken (0: now).
-- If a span is 0, the rate limit counts by the day of its zone: the units taken since midnight. No units are taken in
-- the last margin of a day, since the request might begin, and be counted by the supplier, after midnight.
-- The caller has locked its row. A load's request in progress, whose exact time is unknown, counts as one unit. That of
-- a load that has died counts until a span after the end of its slot, or until a load sends the next request.
CREATE OR REPLACE FUNCTION {schema}.dl_budgets_left(
  p_source {schema}.dl_sources, p_units int[], p_spans_s float8[], p_zones text[], p_cost int, p_now timestamptz,
  OUT units bigint, OUT wait_s float8
) LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off
SET enable_sort = off SET jit = off
AS $$
DECLARE
  v_since timestamptz;
  v_midnight timestamptz;
  v_under_way int;
  v_left bigint;
  v_at timestamptz;
BEGIN
  wait_s := 0;
  FOR i IN 1 .. cardinality(p_units) LOOP
    -- Rows that were written by hand: a rate limit that cannot be read does not mean that there is none.
    IF p_units[i] IS NULL OR p_spans_s[i] IS NULL THEN
      RAISE data_exception USING MESSAGE = format('rate limit %s of the supplier %s has no units or no period', i, p_source.source);
    END IF;
    IF p_spans_s[i] > 0 THEN
      v_since := p_now - make_interval(secs => p_spans_s[i] + p_source.margin_s);
      v_midnight := NULL;
    ELSE
      SELECT d.begins - interval '1 us', d.ends INTO v_since, v_midnight FROM {schema}.dl_day(coalesce(p_zones[i], 'UTC'), p_now) AS d;
    END IF;
    v_under_way := CASE WHEN p_source.holder IS NOT NULL AND p_source.held_until > v_since THEN 1 ELSE 0 END;
    v_left := p_units[i] - v_under_way - coalesce(p_source.last_n - (
      SELECT c.n - c.cost FROM {schema}.dl_source_calls c
      WHERE c.source BETWEEN p_source.source AND p_source.source AND c.at > v_since
      ORDER BY c.source, c.at LIMIT 1), 0);
    units := least(units, v_left);
    IF v_midnight IS NOT NULL THEN
      IF v_left < p_cost OR (p_cost > 0 AND p_now + make_interval(secs => p_source.margin_s) >= v_midnight) THEN
        wait_s := greatest(wait_s, extract(epoch FROM v_midnight - p_now), 0.001);
      END IF;
    ELSIF v_left < p_cost THEN
      SELECT c.at INTO v_at FROM {schema}.dl_source_calls c
      WHERE c.source BETWEEN p_source.source AND p_source.source AND c.n >= p_source.last_n + v_under_way + p_cost - p_units[i]
      ORDER BY c.source, c.n LIMIT 1;
      wait_s := greatest(wait_s, CASE
        WHEN p_cost > p_units[i] THEN 600
        WHEN v_at IS NOT NULL THEN greatest(extract(epoch FROM v_at - p_now) + p_spans_s[i] + p_source.margin_s, 0.001)
        -- Only the request in progress counts: it may end at any moment.
        WHEN p_source.held_until > p_now THEN greatest(least(extract(epoch FROM p_source.held_until - p_now), 1), 0.05)
        ELSE greatest(extract(epoch FROM p_source.held_until - p_now) + p_spans_s[i] + p_source.margin_s, 0.05) END);
    END IF;
  END LOOP;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_budgets_left({schema}.dl_sources, int[], float8[], text[], int, timestamptz) FROM PUBLIC;

-- A supplier, whose row the caller has locked, without times in the future. They are from a time in which the
-- database's clock was ahead, and would close its rate limits until then. Units taken in that time count as taken now,
-- so no rate limit is exceeded; a pause has its rest at the last request. A clock may be wrong by less than ten
-- seconds, and a request takes less than an hour.
CREATE OR REPLACE FUNCTION {schema}.dl_cut_back(p_source {schema}.dl_sources) RETURNS {schema}.dl_sources
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
AS $$
DECLARE
  v_now timestamptz := clock_timestamp();
BEGIN
  IF p_source.last_at <= v_now + interval '10 s' AND (p_source.held_until > v_now + interval '1 hour') IS NOT TRUE THEN
    RETURN p_source;
  END IF;
  WITH ahead AS (
    DELETE FROM {schema}.dl_source_calls c
    WHERE c.source BETWEEN p_source.source AND p_source.source AND c.at > v_now RETURNING c.n, c.cost
  )
  INSERT INTO {schema}.dl_source_calls (source, at, n, cost)
  SELECT p_source.source, v_now, max(a.n), max(a.n) - min(a.n - a.cost) FROM ahead a HAVING count(*) > 0;
  UPDATE {schema}.dl_sources s
  SET last_at = least(s.last_at, v_now),
      free_at = CASE WHEN s.last_at <= v_now THEN s.free_at
                     WHEN s.free_at > s.last_at THEN v_now + (s.free_at - s.last_at) ELSE least(s.free_at, v_now) END,
      held_until = CASE WHEN s.held_until > v_now + interval '1 hour' THEN v_now + interval '1 min' ELSE s.held_until END
  WHERE s.source = p_source.source RETURNING s.* INTO p_source;
  RAISE WARNING USING ERRCODE = '01DL1', MESSAGE = format(
    'corrected times of the supplier %s that were in the future: the database''s clock had been ahead', p_source.source);
  RETURN p_source;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_cut_back({schema}.dl_sources) FROM PUBLIC;

-- The limits of a task and of its supplier for readers, by the rules of the claim: the seconds until the periods of the
-- task and of the supplier open, the result of dl_budgets_left, and the error of limits that cannot be evaluated. So a
-- bad row is shown as bad, and does not end the statement that reads all rows.
CREATE OR REPLACE FUNCTION {schema}.dl_limits_seen(
  p_periods int4multirange, p_zone text, p_source {schema}.dl_sources, p_units int[], p_spans_s float8[], p_zones text[], p_cost int,
  p_now timestamptz,
  OUT task_wait_s float8, OUT supplier_wait_s float8, OUT units bigint, OUT wait_s float8, OUT error text
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  task_wait_s := {schema}.dl_opens_in(p_periods, p_zone, p_now, 1);
  supplier_wait_s := {schema}.dl_opens_in(p_source.periods, p_source.zone, p_now, p_source.margin_s);
  SELECT u.units, u.wait_s INTO units, wait_s
  FROM {schema}.dl_budgets_left(p_source, p_units, p_spans_s, p_zones, p_cost, p_now) AS u;
EXCEPTION WHEN OTHERS THEN
  units := 0;
  error := SQLERRM;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_limits_seen(int4multirange, text, {schema}.dl_sources, int[], float8[], text[], int, timestamptz) FROM PUBLIC;

-- The seconds by which the clock of a zone is ahead of UTC at p_now; NULL if this server does not know the zone.
CREATE OR REPLACE FUNCTION {schema}.dl_zone_offset_s(p_zone text, p_now timestamptz) RETURNS float8
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN extract(epoch FROM p_now AT TIME ZONE p_zone - p_now AT TIME ZONE 'UTC');
EXCEPTION WHEN invalid_parameter_value THEN
  RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_zone_offset_s(text, timestamptz) FROM PUBLIC;

-- The job of a lane behind which this session's claims of p_queue continue; none if they begin at the front. The
-- entries of claimed jobs stay in the index for a while, and in a backlog each claim would read all of them. As a
-- setting of its session, the claim keeps the last job that it claimed, and the time (Unix time) until which it
-- applies. Then it reads the front again, which may have a more urgent job, or one that another session had locked. It
-- also does so if no job is left behind that one.
CREATE OR REPLACE FUNCTION {schema}.dl_lane_cursor(p_lane text, p_queue text)
RETURNS TABLE (job_id uuid, priority int, created_at timestamptz, until float8)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
  v_kept text[] := string_to_array(current_setting('dataloader.lane_' || to_hex(hashtextextended(p_lane, hashtext(p_queue))), true), ' ');
  v_now float8 := extract(epoch FROM clock_timestamp());
BEGIN
  -- Not longer than the claim may have set, whatever the clock did.
  IF v_kept[2]::float8 > v_now AND v_kept[2]::float8 < v_now + 10 THEN
    RETURN QUERY
    SELECT j.job_id, j.priority, j.created_at, v_kept[2]::float8 FROM {schema}.dl_jobs j
    WHERE j.job_id = ANY (ARRAY[v_kept[1]::uuid]) AND j.lane = p_lane AND j.queue = p_queue AND (
      SELECT n.job_id FROM {schema}.dl_jobs n
      WHERE (n.lane, n.queue, n.priority, n.created_at, n.job_id) > (p_lane, p_queue, j.priority, j.created_at, j.job_id)
        AND (n.lane, n.queue) <= (p_lane, p_queue) AND n.status = 'queued' AND n.waits_for = 'limit'
      ORDER BY n.lane, n.queue, n.priority, n.created_at, n.job_id LIMIT 1) IS NOT NULL
    ORDER BY j.job_id;
  END IF;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_lane_cursor(text, text) FROM PUBLIC;

-- The lanes of p_lanes that may start jobs of p_queue now, with their numbers; for the others the reason, and the
-- seconds until they should be read again (NULL: after a notification). Lanes and suppliers that may start any are
-- locked until the end of the transaction; locked ones are skipped. Jobs are counted in a new snapshot, after the lock,
-- so that all starts by former holders are seen.
--   left_units   the units that the supplier's rate limits leave for all its lanes together; NULL without a limit
--   why          for a lane that may start some, 'partitions' if dl_turns must choose them
CREATE OR REPLACE FUNCTION {schema}.dl_open_lanes(p_queue text, p_lanes text[])
RETURNS TABLE (lane text, allowed int, supplier text, cost int, left_units bigint, margin_s float8, why text, wait_s float8)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off
SET enable_sort = off SET jit = off
AS $$
#variable_conflict use_column
DECLARE
  v_task record;
  v_lane {schema}.dl_lanes;
  v_source {schema}.dl_sources;
  v_now timestamptz;
  v_running int;
  v_begins boolean;
BEGIN
  FOR v_task IN
    SELECT u.name, t.* FROM unnest(p_lanes) AS u (name)
    LEFT JOIN {schema}.dl_tasks t ON t.task = ANY (ARRAY[u.name])
  LOOP
    lane := v_task.name; allowed := 0; supplier := NULL; cost := 0; left_units := NULL; margin_s := NULL; why := NULL; wait_s := NULL;
    v_now := clock_timestamp();
    PERFORM FROM {schema}.dl_lane_cursor(v_task.name, p_queue);
    IF NOT FOUND THEN
      PERFORM FROM {schema}.dl_jobs j
      WHERE j.lane BETWEEN v_task.name AND v_task.name AND j.queue BETWEEN p_queue AND p_queue AND j.status = 'queued' AND j.waits_for = 'limit'
      ORDER BY j.lane, j.queue, j.priority, j.created_at, j.job_id LIMIT 1;
    END IF;
    IF NOT FOUND THEN
      -- The pause after a batch begins with its end, also if no job waits then.
      IF v_task.batch_size IS NOT NULL THEN
        PERFORM FROM {schema}.dl_lanes l WHERE l.lane = v_task.name AND l.idle_since IS NULL FOR NO KEY UPDATE SKIP LOCKED;
        IF FOUND THEN
          UPDATE {schema}.dl_lanes l SET batch_left = 0, idle_since = v_now
          WHERE l.lane = v_task.name AND NOT EXISTS (SELECT FROM {schema}.dl_jobs j WHERE j.lane = v_task.name AND j.status = 'running');
        END IF;
      END IF;
      why := 'empty';
      RETURN NEXT;
      CONTINUE;
    ELSIF v_task.paused THEN
      why := 'paused';
      RETURN NEXT;
      CONTINUE;
    END IF;
    IF v_task.periods IS NOT NULL THEN
      wait_s := {schema}.dl_opens_in(v_task.periods, v_task.zone, v_now, 1);
      IF wait_s > 0 THEN
        why := 'period';
        RETURN NEXT;
        CONTINUE;
      END IF;
      margin_s := 1;
      wait_s := NULL;
    END IF;
    allowed := 2147483647;

    IF num_nonnulls(v_task.max_running, v_task.batch_size, v_task.max_running_per_partition) > 0 THEN
      SELECT * INTO v_lane FROM {schema}.dl_lanes l WHERE l.lane = v_task.name FOR NO KEY UPDATE SKIP LOCKED;
      IF NOT FOUND THEN
        allowed := 0; why := 'locked'; wait_s := 0.01;
        RETURN NEXT;
        CONTINUE;
      END IF;
    END IF;
    IF v_task.max_running IS NOT NULL OR v_task.batch_size IS NOT NULL THEN
      SELECT count(*) INTO v_running FROM (
        SELECT FROM {schema}.dl_jobs j WHERE j.lane = v_task.name AND j.status = 'running' LIMIT v_task.max_running
      ) AS work;
      allowed := coalesce(v_task.max_running, allowed) - CASE WHEN v_task.max_running IS NULL THEN 0 ELSE v_running END;
      IF allowed <= 0 THEN
        allowed := 0; why := 'running';
        RETURN NEXT;
        CONTINUE;
      END IF;
    END IF;
    IF v_task.batch_size IS NOT NULL THEN
      v_begins := false;
      IF v_running = 0 THEN
        -- No job runs: the batch is over, whether its places were used or not.
        v_lane.idle_since := coalesce(v_lane.idle_since, v_now);
        -- A new lane has had no jobs. (Infinite intervals exist from PostgreSQL 17 on.)
        wait_s := CASE WHEN isfinite(v_lane.idle_since)
                       THEN extract(epoch FROM v_lane.idle_since - v_now) + coalesce(v_task.batch_delay_s, 0) ELSE 0 END;
        v_begins := wait_s <= 0;
        wait_s := CASE WHEN NOT v_begins THEN least(wait_s, v_task.batch_delay_s) END;
        v_lane.batch_left := 0;
      END IF;
      IF v_begins THEN
        SELECT count(*) INTO v_lane.batch_left FROM (
          SELECT FROM {schema}.dl_jobs j WHERE j.lane = v_task.name AND j.status = 'queued' AND j.waits_for = 'limit' LIMIT v_task.batch_size
        ) AS waiting;
      END IF;
      UPDATE {schema}.dl_lanes l SET batch_left = v_lane.batch_left, idle_since = v_lane.idle_since
      WHERE l.lane = v_task.name AND (l.batch_left, l.idle_since) IS DISTINCT FROM (v_lane.batch_left, v_lane.idle_since);
      allowed := least(allowed, v_lane.batch_left);
      IF allowed = 0 THEN
        why := 'batch';
        RETURN NEXT;
        CONTINUE;
      END IF;
    END IF;

    IF v_task.supplier IS NOT NULL THEN
      SELECT * INTO v_source FROM {schema}.dl_sources s WHERE s.source = v_task.supplier FOR NO KEY UPDATE SKIP LOCKED;
      IF NOT FOUND THEN
        allowed := 0; why := 'locked'; wait_s := 0.01;
        RETURN NEXT;
        CONTINUE;
      END IF;
      SELECT * INTO v_source FROM {schema}.dl_cut_back(v_source);
      v_now := greatest(clock_timestamp(), v_source.last_at);
      IF v_source.paused THEN
        why := 'paused';
      ELSE
        wait_s := {schema}.dl_opens_in(v_source.periods, v_source.zone, v_now, v_source.margin_s);
        IF wait_s > 0 THEN
          why := 'period';
        ELSE
          SELECT u.units, u.wait_s INTO left_units, wait_s
          FROM {schema}.dl_budgets_left(v_source, v_source.units, v_source.spans_s, v_source.zones, coalesce(v_task.cost, 1), v_now) AS u;
          IF wait_s > 0 THEN
            why := 'budget';
          END IF;
        END IF;
      END IF;
      IF why IS NOT NULL THEN
        allowed := 0;
        RETURN NEXT;
        CONTINUE;
      END IF;
      wait_s := NULL;
      supplier := v_source.source;
      cost := coalesce(v_task.cost, 1);
      margin_s := least(margin_s, v_source.margin_s);
      IF cost > 0 THEN
        allowed := least(allowed, left_units / cost);
      END IF;
    END IF;
    IF v_task.max_running_per_partition IS NOT NULL THEN
      why := 'partitions';
    END IF;
    RETURN NEXT;
  END LOOP;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_open_lanes(text, text[]) FROM PUBLIC;

-- Up to p_limit jobs of p_queue of a lane that may start now by max_running_per_partition: for each waiting key as many
-- as it has room for, beginning behind the key of the last turn. The caller has locked the lane's row. From one key to
-- the next is one step in the index, whatever the number of jobs of a key; only keys with running jobs are passed over.
-- The jobs are locked; a NULL behind them means that another session has locked jobs that could start. A key that is
-- too long for the index is represented by its hash.
CREATE OR REPLACE FUNCTION {schema}.dl_turns(p_lane text, p_queue text, p_limit int) RETURNS uuid[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off
SET enable_sort = off SET jit = off
AS $$
DECLARE
  v_each int;
  v_first text;
  v_key text;
  v_behind int;
  v_found text;
  v_again boolean;
  v_busy text[];
  v_running int[];
  v_room int;
  v_jobs uuid[] := '{}';
  v_some uuid[];
  v_passed_over boolean := false;
  v_turn text;
BEGIN
  SELECT t.max_running_per_partition, l.last_partition INTO v_each, v_first
  FROM {schema}.dl_tasks t JOIN {schema}.dl_lanes l ON l.lane = ANY (ARRAY[t.task]) WHERE t.task = p_lane;
  SELECT array_agg(r.key), array_agg(r.jobs) INTO v_busy, v_running FROM (
    SELECT CASE WHEN octet_length(j.partition_key) <= 500 THEN j.partition_key ELSE md5(j.partition_key) END AS key, count(*)::int AS jobs
    FROM {schema}.dl_jobs j WHERE j.lane = p_lane AND j.status = 'running' GROUP BY 1
  ) AS r;
  v_again := v_first IS NULL;
  v_key := coalesce(v_first, '');
  -- Behind all jobs of a key or, at the beginning, before all jobs of ''.
  v_behind := CASE WHEN v_first IS NULL THEN -1 ELSE 2147483647 END;
  WHILE cardinality(v_jobs) < p_limit LOOP
    SELECT CASE WHEN octet_length(j.partition_key) <= 500 THEN j.partition_key ELSE md5(j.partition_key) END INTO v_found FROM {schema}.dl_jobs j
    WHERE j.status = 'queued' AND j.waits_for = 'limit'
      AND (j.lane, j.queue, CASE WHEN octet_length(j.partition_key) <= 500 THEN j.partition_key ELSE md5(j.partition_key) END, j.priority) > (p_lane, p_queue, v_key, v_behind)
      AND (j.lane, j.queue) <= (p_lane, p_queue)
    ORDER BY j.lane, j.queue, CASE WHEN octet_length(j.partition_key) <= 500 THEN j.partition_key ELSE md5(j.partition_key) END, j.priority, j.created_at, j.job_id LIMIT 1;
    IF NOT FOUND AND NOT v_again THEN
      v_again := true;
      v_key := '';
      v_behind := -1;
      CONTINUE;
    END IF;
    EXIT WHEN v_found IS NULL OR (v_again AND v_found > v_first);
    v_room := v_each - coalesce(v_running[array_position(v_busy, v_found)], 0);
    IF v_room > 0 THEN
      v_some := ARRAY(
        SELECT j.job_id FROM {schema}.dl_jobs j
        WHERE j.status = 'queued' AND j.waits_for = 'limit'
          AND (j.lane, j.queue, CASE WHEN octet_length(j.partition_key) <= 500 THEN j.partition_key ELSE md5(j.partition_key) END, j.priority) > (p_lane, p_queue, v_found, -1)
          AND (j.lane, j.queue, CASE WHEN octet_length(j.partition_key) <= 500 THEN j.partition_key ELSE md5(j.partition_key) END) <= (p_lane, p_queue, v_found)
        ORDER BY j.lane, j.queue, CASE WHEN octet_length(j.partition_key) <= 500 THEN j.partition_key ELSE md5(j.partition_key) END, j.priority, j.created_at, j.job_id
        LIMIT least(v_room, p_limit - cardinality(v_jobs))
        FOR NO KEY UPDATE SKIP LOCKED);
      v_jobs := v_jobs || v_some;
      v_passed_over := v_passed_over OR v_some = '{}';
      v_turn := v_found;
    END IF;
    v_key := v_found;
    v_behind := 2147483647;
  END LOOP;
  UPDATE {schema}.dl_lanes l SET last_partition = v_turn WHERE l.lane = p_lane AND l.last_partition IS DISTINCT FROM v_turn AND v_turn IS NOT NULL;
  RETURN CASE WHEN v_passed_over THEN v_jobs || NULL::uuid ELSE v_jobs END;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_turns(text, text, int) FROM PUBLIC;

-- Takes units of a supplier, whose row the caller has locked, now. No two calls of a supplier have the same time: their
-- numbers increase with it, whatever the clock does.
CREATE OR REPLACE FUNCTION {schema}.dl_take_units(p_source text, p_units bigint, p_kept_s float8) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
AS $$
DECLARE
  v_n bigint;
  v_at timestamptz;
BEGIN
  UPDATE {schema}.dl_sources s
  SET last_n = s.last_n + p_units, last_at = greatest(clock_timestamp(), s.last_at + interval '1 us'), kept_s = greatest(s.kept_s, p_kept_s)
  WHERE s.source = p_source
  RETURNING s.last_n, s.last_at, s.kept_s INTO v_n, v_at, p_kept_s;
  IF p_kept_s > 0 THEN
    INSERT INTO {schema}.dl_source_calls (source, at, n, cost) VALUES (p_source, v_at, v_n, p_units);
    DELETE FROM {schema}.dl_source_calls WHERE ctid = ANY (ARRAY(
      SELECT c.ctid FROM {schema}.dl_source_calls c
      WHERE c.source BETWEEN p_source AND p_source AND c.at < v_at - make_interval(secs => p_kept_s)
      ORDER BY c.source, c.at LIMIT 100));
  END IF;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_take_units(text, bigint, float8) FROM PUBLIC;

-- Records the units of a claim's starts: one entry for each start, with the lane, its supplier and its cost.
CREATE OR REPLACE FUNCTION {schema}.dl_charge_lanes(p_lanes text[], p_suppliers text[], p_costs int[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
BEGIN
  UPDATE {schema}.dl_lanes l SET batch_left = greatest(l.batch_left - s.starts, 0), idle_since = NULL
  FROM (SELECT u.lane, count(*)::int AS starts FROM unnest(p_lanes) AS u (lane) GROUP BY u.lane) AS s
  JOIN {schema}.dl_tasks t ON t.task = ANY (ARRAY[s.lane]) AND t.batch_size IS NOT NULL
  WHERE l.lane = ANY (ARRAY[s.lane]);
  PERFORM {schema}.dl_take_units(s.source, u.units, coalesce((SELECT max(span) FROM unnest(s.spans_s) AS span), 0) + s.margin_s)
  FROM (SELECT c.supplier, sum(c.cost) AS units FROM unnest(p_suppliers, p_costs) AS c (supplier, cost) WHERE c.cost > 0 GROUP BY 1) AS u
  JOIN {schema}.dl_sources s ON s.source = ANY (ARRAY[u.supplier])
  WHERE cardinality(s.spans_s) > 0 OR s.kept_s > 0;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_charge_lanes(text[], text[], int[]) FROM PUBLIC;
