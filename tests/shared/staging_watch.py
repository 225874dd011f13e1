"""Watches in the database how a load stages its rows: by triggers on each new staging table."""

from __future__ import annotations

import json
from typing import Any

import attrs

INSTALL = """
CREATE SEQUENCE staging_tries;
CREATE TABLE staged_batches (number bigserial, rows int);
CREATE FUNCTION before_staging() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  PERFORM nextval('staging_tries');
  {before}
  RETURN NULL;
END $$;
CREATE FUNCTION after_staging() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  INSERT INTO staged_batches (rows) SELECT count(*) FROM new_rows;
  RETURN NULL;
END $$;
CREATE FUNCTION watch_staging() RETURNS event_trigger LANGUAGE plpgsql AS $$ DECLARE made record; BEGIN
  FOR made IN SELECT object_identity AS name FROM pg_event_trigger_ddl_commands()
              WHERE object_type = 'table' AND object_identity LIKE '%dl_stage_%' LOOP
    EXECUTE format('CREATE TRIGGER before_staging BEFORE INSERT ON %s
                    FOR EACH STATEMENT EXECUTE FUNCTION before_staging()', made.name);
    EXECUTE format('CREATE TRIGGER after_staging AFTER INSERT ON %s REFERENCING NEW TABLE AS new_rows
                    FOR EACH STATEMENT EXECUTE FUNCTION after_staging()', made.name);
  END LOOP;
END $$;
CREATE EVENT TRIGGER watch_staging ON ddl_command_end WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION watch_staging();
"""


@attrs.frozen
class StagingWatch:
    """Watch of one database; `before` are statements of PL/pgSQL that run before the rows of each COPY."""

    database: Any
    before: str = ""

    def __attrs_post_init__(self) -> None:
        self.database.psql(INSTALL.replace("{before}", self.before))

    def rows(self) -> list[int]:
        """Return the number of rows of each staged batch."""
        sql = "SELECT coalesce(json_agg(rows ORDER BY number), '[]') FROM staged_batches"
        return json.loads(self.database.psql(sql))

    def tries(self) -> int:
        """Return the number of sent batches, including refused ones."""
        return int(self.database.psql("SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM staging_tries"))
