"""The page on the shared tables has each column of a migrated database, with its type and default."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tables.md"
COLUMNS = """
SELECT a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, coalesce(pg_get_expr(d.adbin, d.adrelid), '')
FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE a.attrelid = %s::regclass AND a.attnum > 0 AND NOT a.attisdropped
"""


@pytest.mark.parametrize("table", ["dl_jobs", "dl_job_events"])
def test_the_page_has_every_column_of_the_table(database, table):
    [section] = re.findall(rf"^## {table}\n(.*?)(?:^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    columns = section.split("| column |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in columns.splitlines()[2:]]
    with psycopg.connect(database.dsn) as connection:
        connection.execute("SET search_path TO public")
        found = connection.execute(COLUMNS, [table]).fetchall()
    assert sorted(row[:3] for row in rows) == sorted(
        [f"`{name}`", f"`{kind}`{'' if is_required else ', null'}", f"`{default}`" if default else ""]
        for name, kind, is_required, default in found
    )
    assert all(meaning and writer for *_, meaning, writer in rows)


def test_the_first_columns_are_those_of_the_published_description():
    document = (PAGE.parents[1] / "store" / "migrations" / "0001_document.sql").read_text()
    [body] = re.findall(r"CREATE TABLE IF NOT EXISTS dl_jobs \(\n(.*?)\n  CONSTRAINT", document, re.DOTALL)
    published = re.findall(r"^  (\w+) ", body, re.MULTILINE)
    [section] = re.findall(r"^## dl_jobs\n(.*?)^## ", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)[: len(published)] == published
    assert f"The first {len(published)} columns" in section
