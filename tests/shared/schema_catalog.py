"""Catalog entries of our schema in a database, as lines of text by which two databases can be compared.

The order of columns is left out: it differs between databases with different histories, and nothing depends on it.
"""

from __future__ import annotations

from typing import Any, Final

CATALOG: Final = """
WITH ours AS (
  SELECT c.* FROM pg_class c WHERE c.relnamespace = current_schema()::regnamespace
)
SELECT jsonb_build_array('relation', c.relname, c.relkind, c.relpersistence, c.relreplident, c.reloptions, c.relacl,
                         c.relowner::regrole, obj_description(c.oid, 'pg_class'))::text AS line
FROM ours c
UNION ALL
SELECT jsonb_build_array('column', c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,
                         pg_get_expr(d.adbin, d.adrelid), a.attidentity, a.attgenerated, a.attstorage,
                         a.attcompression, a.attcollation::regcollation, a.attacl,
                         -- From 15.20 on, the server numbers columns there.
                         (SELECT array_agg(o) FROM unnest(a.attoptions) AS o WHERE NOT starts_with(o, 'pg_attver=')),
                         a.attislocal, col_description(c.oid, a.attnum))::text
FROM ours c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
WHERE c.relkind <> 'i'
UNION ALL
SELECT jsonb_build_array('constraint', c.relname, k.conname, pg_get_constraintdef(k.oid))::text
FROM ours c JOIN pg_constraint k ON k.conrelid = c.oid
UNION ALL
SELECT jsonb_build_array('index', pg_get_indexdef(i.indexrelid), i.indisvalid, i.indisready, i.indisprimary,
                         i.indisunique, i.indisreplident, i.indisclustered)::text
FROM ours c JOIN pg_index i ON i.indrelid = c.oid
UNION ALL
SELECT jsonb_build_array('sequence', c.relname, s.seqtypid::regtype, s.seqstart, s.seqincrement, s.seqmin, s.seqmax,
                         s.seqcycle, s.seqcache, d.refobjid::regclass, a.attname)::text
FROM ours c JOIN pg_sequence s ON s.seqrelid = c.oid
LEFT JOIN pg_depend d ON d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.deptype IN ('a', 'i')
LEFT JOIN pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
UNION ALL
SELECT jsonb_build_array('trigger', c.relname, t.tgname, pg_get_triggerdef(t.oid), t.tgenabled,
                         obj_description(t.oid, 'pg_trigger'))::text
FROM ours c JOIN pg_trigger t ON t.tgrelid = c.oid AND NOT t.tgisinternal
UNION ALL
SELECT jsonb_build_array('function', p.oid::regprocedure, pg_get_functiondef(p.oid), p.proacl, p.proowner::regrole,
                         obj_description(p.oid, 'pg_proc'))::text
FROM pg_proc p WHERE p.pronamespace = current_schema()::regnamespace AND p.prokind = 'f'
UNION ALL
SELECT jsonb_build_array('type', t.typname, t.typtype, t.typacl,
                         (SELECT array_agg(e.enumlabel ORDER BY e.enumsortorder) FROM pg_enum e
                          WHERE e.enumtypid = t.oid))::text
FROM pg_type t
WHERE t.typnamespace = current_schema()::regnamespace AND t.typrelid = 0 AND t.typelem = 0
"""


async def schema_lines(raw: Any) -> set[str]:
    """Return a line for each object of our schema, with its definition, rights and comment."""
    rows = await raw.fetch(CATALOG)
    lines = {row["line"] for row in rows}
    assert len(lines) == len(rows)
    return lines
