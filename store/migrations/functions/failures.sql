-- What failed, in groups: by the task and the first line of the error, with what differs from job to job left out.
-- The rule stands here alone. To change it means new names, another column and another index: `error_group` of rows that are
-- there was made by these functions.

-- The first line of an error, 1,000 characters at most; '' if there is none.
CREATE OR REPLACE FUNCTION {schema}.dl_error_line(p_error text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
  SELECT rtrim(split_part(ltrim(left(coalesce(p_error, ''), 1000), E' \t\r\n'), E'\n', 1), E' \t\r')
$$;
REVOKE ALL ON FUNCTION {schema}.dl_error_line(text) FROM PUBLIC;

-- The same with quoted texts as … and words that have a digit as #. By bytes of ASCII alone, so that it means the same in every
-- locale. A quotation mark between letters is an apostrophe. What stands in brackets, or behind = , ; is a word of its own.
CREATE OR REPLACE FUNCTION {schema}.dl_error_group(p_error text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
  SELECT left(regexp_replace(
    regexp_replace(
      {schema}.dl_error_line(p_error) COLLATE "C",
      $re$(?<![a-zA-Z0-9])(?:'[^']*'|"[^"]*"|`[^`]*`)(?![a-zA-Z0-9])|«[^»]*»|“[^”]*”$re$, '…', 'g'),
    $re$[^][(){}<>=,;"'`…\s]*[0-9][^][(){}<>=,;"'`…\s]*$re$, '#', 'g'), 300) COLLATE "default"
$$;
REVOKE ALL ON FUNCTION {schema}.dl_error_group(text) FROM PUBLIC;

-- A row is written that is, or becomes, one that failed or waits for a retry, whoever writes it: its group is a column, so that
-- an index counts the jobs of a group without reading them. A run that failed gets its line in dl_errors.
-- With its owner's rights: a foreign role may write dl_jobs without a right on what is used here. So it does nothing for any
-- other table.
CREATE OR REPLACE FUNCTION {schema}.dl_jobs_failing() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF TG_RELID <> '{schema}.dl_jobs'::regclass THEN
    RAISE EXCEPTION 'dl_jobs_failing is a trigger of dl_jobs alone';
  END IF;
  NEW.error_group := CASE WHEN NEW.error IS NOT NULL OR NEW.status <> 'queued'
                          THEN hashtextextended(NEW.task || E'\n' || {schema}.dl_error_group(NEW.error), 0) END;
  -- Not a job that snoozed or was given back after an earlier error: that attempt does not count. Nor one that another service
  -- gives back because its key is held, and which counts its attempt: its error stays as it was.
  IF TG_OP = 'UPDATE' AND OLD.status = 'running' AND NEW.error_group IS NOT NULL AND NEW.attempt >= OLD.attempt
     AND (NEW.status <> 'queued' OR OLD.claimed_by IS NOT NULL OR NEW.error IS DISTINCT FROM OLD.error) THEN
    INSERT INTO {schema}.dl_errors (at, job_id, task, queue, attempt, worker, status, error_group, error)
    VALUES (statement_timestamp(), NEW.job_id, NEW.task, NEW.queue, NEW.attempt, OLD.claimed_by, NEW.status, NEW.error_group,
            left(coalesce(NEW.error, ''), 4000));
  END IF;
  RETURN NEW;
END $$;
REVOKE ALL ON FUNCTION {schema}.dl_jobs_failing() FROM PUBLIC;
