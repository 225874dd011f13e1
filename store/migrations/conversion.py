"""Conversion of a database that a program from before the first release has migrated; removed with that release.

The schema is made by fewer files now. A database that has all former files has the same schema: only its list of
migrations is rewritten, and functions that no program calls any more are dropped. Earlier programs that run continue.
Those that start on a converted database refuse, since they would apply their own files again.
"""

from __future__ import annotations

from typing import Final

from dataloader.jobs.errors import SchemaError

FILES: Final = frozenset(
    (1, 2, 4, 5, *range(7, 27), 28, *range(30, 34), 37, 40, 41, *range(46, 59), 60, 61, 62, 63),
)
"""Numbers of the former files. Some databases also have files 3 and 6, which were replaced by the functions."""
CONVERTED_TO: Final = 7
"""Last of the files that replace the former ones."""
NAME: Final = "conversion to the files of the first release"
_LAST_COMMIT: Final = "a8a2567"
_FIRST_FUNCTIONS: Final = 53
"""Number of the functions of the first program with the new files."""
_FUNCTIONS: Final = (
    "dl_claim",
    "dl_claim_jobs",
    "dl_claim_runs",
    "dl_process_ask",
    "dl_process_ask_many",
    "dl_process_begin",
    "dl_process_commit",
    "dl_process_forget_ident",
    "dl_process_settle",
    "dl_process_take_back",
    "dl_process_tried_by_ident",
    "dl_units_left",
)
"""Functions that only older programs have called."""
_TOO_OLD: Final = (
    f"too old for this version; stop all services and migrate it with the commit {_LAST_COMMIT} of dataloader first"
)


def is_former(files: dict[int, str]) -> bool:
    """Return whether a list of migrations, names by numbers, was written by a program from before the first release."""
    return files.get(2) == "columns"


def check_convertible(files: dict[int, str], place: str) -> None:
    """Check whether the schema, which `place` describes, can be converted. Raises `SchemaError` if it is too old."""
    if not files.keys() >= FILES:
        raise SchemaError(f"the database's schema is at {place}, {_TOO_OLD}")


def conversion_script(notes: list[str]) -> str:
    """Return the statement that converts the database, if it is a former one.

    Args:
        notes: the statements that record the files of the first release.
    """
    listed = ";\n  ".join(notes)
    return f"""DO $conversion$
DECLARE
  v_function text;
BEGIN
  IF NOT EXISTS (SELECT FROM dl_migrations WHERE number = 2 AND name = 'columns') THEN
    RETURN;
  ELSIF NOT (SELECT array_agg(number) @> '{{{", ".join(map(str, sorted(FILES)))}}}' FROM dl_migrations) THEN
    RAISE EXCEPTION 'the database''s schema is {_TOO_OLD}';
  END IF;
  -- No function of another role.
  FOR v_function IN
    SELECT p.oid::regprocedure
    FROM pg_class c JOIN pg_proc p ON p.pronamespace = c.relnamespace AND p.proowner = c.relowner
    WHERE c.oid = 'dl_jobs'::regclass AND p.proname = ANY ('{{{", ".join(_FUNCTIONS)}}}')
  LOOP
    EXECUTE format('DROP FUNCTION %s', v_function);
  END LOOP;
  -- A program from before the first release that starts now refuses.
  UPDATE dl_function_sets SET oldest = greatest(oldest, {_FIRST_FUNCTIONS});
  DELETE FROM dl_migrations;
  {listed};
END $conversion$"""
