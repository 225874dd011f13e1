-- A source for `p_lease_s` seconds, or how long to wait, and what for. The row's lock makes one of all who ask at once the
-- first. Budgets: at most p_requests[i] in any p_spans_s[i] seconds. A call counts until a span after its end, since nobody
-- knows when in between it arrived; who gives the source back says when that was, until then it is the end of the lease.
CREATE OR REPLACE FUNCTION {schema}.dl_source_take(
  p_source text, p_holder bigint, p_lease_s float8, p_requests int[], p_spans_s float8[],
  OUT wait_s float8, OUT waits_for text
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_source {schema}.dl_sources;
  v_now timestamptz;
  v_call timestamptz;
  v_until timestamptz;
BEGIN
  SELECT * INTO v_source FROM {schema}.dl_sources WHERE source = p_source FOR UPDATE;
  IF NOT FOUND THEN
    INSERT INTO {schema}.dl_sources (source) VALUES (p_source) ON CONFLICT DO NOTHING;
    SELECT * INTO v_source FROM {schema}.dl_sources WHERE source = p_source FOR UPDATE;
  END IF;
  v_now := clock_timestamp();
  v_until := v_now;
  IF v_source.holder = p_holder THEN
    -- The answer to its first question was lost: it is the same call.
    DELETE FROM {schema}.dl_source_calls WHERE source = p_source AND at = v_source.held_until;
  ELSIF v_source.held_until > v_until THEN
    v_until := v_source.held_until;
    waits_for := 'request';
  END IF;
  IF v_source.free_at > v_until THEN
    v_until := v_source.free_at;
    waits_for := v_source.waits_for;
  END IF;
  FOR i IN 1 .. cardinality(p_requests) LOOP
    SELECT at INTO v_call FROM {schema}.dl_source_calls WHERE source = p_source ORDER BY at DESC OFFSET p_requests[i] - 1 LIMIT 1;
    v_call := v_call + make_interval(secs => p_spans_s[i]);
    IF v_call > v_until THEN
      v_until := v_call;
      waits_for := 'budget';
    END IF;
  END LOOP;
  wait_s := extract(epoch FROM v_until - v_now);
  IF waits_for IS NULL THEN
    v_source.kept_s := greatest(v_source.kept_s, (SELECT max(span) FROM unnest(p_spans_s) AS span));
    UPDATE {schema}.dl_sources
    SET holder = p_holder, held_until = v_now + make_interval(secs => p_lease_s), kept_s = v_source.kept_s
    WHERE source = p_source;
    IF v_source.kept_s > 0 THEN
      INSERT INTO {schema}.dl_source_calls (source, at) VALUES (p_source, v_now + make_interval(secs => p_lease_s));
      DELETE FROM {schema}.dl_source_calls WHERE source = p_source AND at < v_now - make_interval(secs => v_source.kept_s);
    END IF;
  END IF;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_source_take(text, bigint, float8, int[], float8[]) FROM PUBLIC;
