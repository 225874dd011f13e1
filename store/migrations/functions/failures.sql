-- Groups of failures: by the task and the first line of the error, without the parts that differ from job to job.
-- The rule is defined only here. A change of it needs new names, another column and another index: the `error_group` of
-- existing rows was computed by these functions.

-- The first line of an error, at most 1,000 characters; '' if there is none.
CREATE OR REPLACE FUNCTION {schema}.dl_error_line(p_error text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
  SELECT rtrim(split_part(ltrim(left(coalesce(p_error, ''), 1000), E' \t\r\n'), E'\n', 1), E' \t\r')
$$;
REVOKE ALL ON FUNCTION {schema}.dl_error_line(text) FROM PUBLIC;

-- The same with quoted texts as … and words that have a digit as #. Only bytes of ASCII count, so that the result is
-- the same in every locale. A quotation mark between letters is an apostrophe. Text in brackets, or after = , ; is a
-- separate word.
CREATE OR REPLACE FUNCTION {schema}.dl_error_group(p_error text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
  SELECT left(regexp_replace(
    regexp_replace(
      {schema}.dl_error_line(p_error) COLLATE "C",
      $re$(?<![a-zA-Z0-9])(?:'[^']*'|"[^"]*"|`[^`]*`)(?![a-zA-Z0-9])|«[^»]*»|“[^”]*”$re$, '…', 'g'),
    $re$[^][(){}<>=,;"'`…\s]*[0-9][^][(){}<>=,;"'`…\s]*$re$, '#', 'g'), 300) COLLATE "default"
$$;
REVOKE ALL ON FUNCTION {schema}.dl_error_group(text) FROM PUBLIC;
