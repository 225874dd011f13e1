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
