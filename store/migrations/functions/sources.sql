-- Request slots of suppliers, for loads: one request at a time. With the caller's rights.

-- A supplier's slot for `p_lease_s` seconds, or the seconds to wait, and the reason. The row's lock makes one of
-- several concurrent callers the first. Rate limits, the load's own and the supplier's: at most p_requests[i] in any
-- p_spans_s[i] seconds, including starts of tasks. A request counts until a span after its end, since it is unknown
-- when in between it arrived: while it is in progress as one unit (dl_budgets_left), from then on as a call. If the
-- slot was not returned, the request ended with it, or with the lease of its run, whose token is p_holder: a killed
-- process sends nothing any more.
CREATE OR REPLACE FUNCTION {schema}.dl_source_take(
  p_source text, p_holder bigint, p_lease_s float8, p_requests int[], p_spans_s float8[],
  OUT wait_s float8, OUT waits_for text
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
  v_source {schema}.dl_sources;
  v_now timestamptz;
  v_kept_s float8;
  v_wait_s float8;
BEGIN
  SELECT * INTO v_source FROM {schema}.dl_sources WHERE source = p_source FOR UPDATE;
  IF NOT FOUND THEN
    INSERT INTO {schema}.dl_sources (source) VALUES (p_source) ON CONFLICT DO NOTHING;
    SELECT * INTO v_source FROM {schema}.dl_sources WHERE source = p_source FOR UPDATE;
  END IF;
  SELECT * INTO v_source FROM {schema}.dl_cut_back(v_source);
  v_now := clock_timestamp();
  IF v_source.holder IS NOT NULL AND (v_source.held_until <= v_now OR NOT EXISTS (
    SELECT FROM {schema}.dl_jobs j WHERE j.status = 'running' AND j.token = v_source.holder
      AND (j.lease_expires_at > v_now OR j.lease_expires_at IS NULL OR {schema}.dl_lease_counts(j.heartbeat_at, j.lease_ttl_sec))))
  THEN
    PERFORM {schema}.dl_take_units(p_source, 1, 0);
    UPDATE {schema}.dl_sources SET holder = NULL, held_until = NULL WHERE source = p_source RETURNING * INTO v_source;
  END IF;
  v_now := greatest(clock_timestamp(), v_source.last_at);
  wait_s := 0;
  IF v_source.holder = p_holder THEN
    -- The answer to its first request was lost: it is the same request.
    v_source.holder := NULL;
  ELSIF v_source.held_until > v_now THEN
    wait_s := extract(epoch FROM v_source.held_until - v_now);
    waits_for := 'request';
  END IF;
  IF v_source.free_at > v_now + make_interval(secs => wait_s) THEN
    wait_s := extract(epoch FROM v_source.free_at - v_now);
    waits_for := v_source.waits_for;
  END IF;
  IF v_source.paused AND wait_s < 10 THEN
    wait_s := 10;
    waits_for := 'paused';
  END IF;
  v_wait_s := {schema}.dl_opens_in(v_source.periods, v_source.zone, v_now, v_source.margin_s);
  IF v_wait_s > wait_s THEN
    wait_s := v_wait_s;
    waits_for := 'period';
  END IF;
  v_kept_s := coalesce((SELECT max(span) FROM unnest(p_spans_s || v_source.spans_s) AS span), 0);
  -- If no task starts by it, no start begins later than it was counted.
  IF v_source.units = '{}' THEN
    v_source.margin_s := 0;
  ELSE
    v_kept_s := v_kept_s + v_source.margin_s;
  END IF;
  v_wait_s := (SELECT u.wait_s FROM {schema}.dl_budgets_left(v_source, p_requests || v_source.units, p_spans_s || v_source.spans_s,
    array_fill(NULL::text, ARRAY[cardinality(p_requests)]) || v_source.zones, 1, v_now) AS u);
  IF v_wait_s > wait_s THEN
    wait_s := v_wait_s;
    waits_for := 'budget';
  END IF;
  IF waits_for IS NULL THEN
    UPDATE {schema}.dl_sources
    SET holder = p_holder, held_until = clock_timestamp() + make_interval(secs => p_lease_s), kept_s = greatest(kept_s, v_kept_s)
    WHERE source = p_source;
  END IF;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_source_take(text, bigint, float8, int[], float8[]) FROM PUBLIC;

-- Returns the slot after its request; for p_pause_s seconds, because of p_why, no caller may have it. A pause that the
-- supplier requested is not shortened by the pause after a later request.
CREATE OR REPLACE FUNCTION {schema}.dl_source_give(p_source text, p_holder bigint, p_pause_s float8, p_why text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
  v_until timestamptz;
BEGIN
  PERFORM FROM {schema}.dl_sources WHERE source = p_source AND holder = p_holder FOR UPDATE;
  IF FOUND THEN
    PERFORM {schema}.dl_take_units(p_source, 1, 0);
    v_until := clock_timestamp() + make_interval(secs => p_pause_s);
    UPDATE {schema}.dl_sources
    SET holder = NULL, held_until = NULL, waits_for = CASE WHEN v_until > free_at THEN p_why ELSE waits_for END,
        free_at = greatest(v_until, free_at)
    WHERE source = p_source;
  END IF;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_source_give(text, bigint, float8, text) FROM PUBLIC;

-- For a handler: takes p_units of a supplier's rate limits now, in its periods; otherwise returns the seconds until the
-- next attempt, and the reason. NULL, NULL: the supplier does not exist. most is the limit of its smallest rate limit,
-- margin_s the seconds after which the request may be sent at the latest.
CREATE OR REPLACE FUNCTION {schema}.dl_supplier_take(
  p_source text, p_units int, OUT wait_s float8, OUT why text, OUT most int, OUT margin_s float8
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
  v_source {schema}.dl_sources;
  v_now timestamptz;
BEGIN
  SELECT * INTO v_source FROM {schema}.dl_sources WHERE source = p_source FOR UPDATE;
  IF NOT FOUND THEN
    RETURN;
  END IF;
  SELECT * INTO v_source FROM {schema}.dl_cut_back(v_source);
  v_now := greatest(clock_timestamp(), v_source.last_at);
  most := (SELECT min(u) FROM unnest(v_source.units) AS u);
  margin_s := v_source.margin_s;
  IF v_source.paused THEN
    wait_s := 10;
    why := 'paused';
    RETURN;
  END IF;
  wait_s := {schema}.dl_opens_in(v_source.periods, v_source.zone, v_now, v_source.margin_s);
  IF wait_s > 0 THEN
    why := 'period';
    RETURN;
  END IF;
  wait_s := (SELECT u.wait_s FROM {schema}.dl_budgets_left(v_source, v_source.units, v_source.spans_s, v_source.zones, p_units, v_now) AS u);
  IF wait_s > 0 THEN
    why := 'budget';
  ELSE
    PERFORM {schema}.dl_take_units(p_source, p_units, 0);
  END IF;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_supplier_take(text, int) FROM PUBLIC;
