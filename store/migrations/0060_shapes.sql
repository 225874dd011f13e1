-- Statements about all workers read these values: a row of another shape is refused to the program that writes it.
-- NOT VALID: rows that are there belong to former processes.
DO $$ BEGIN
  ALTER TABLE dl_workers ADD CONSTRAINT dl_workers_shapes CHECK (
    jsonb_typeof(queues) = 'object'
    AND NOT jsonb_path_exists(queues, 'strict $.* ? (!(@.type() == "number" && @ >= 0 && @ <= 1000000 && @.floor() == @))', '{}', true)
    AND coalesce(jsonb_typeof(only_tasks), 'object') = 'object'
    AND NOT coalesce(jsonb_path_exists(only_tasks, 'strict $.* ? (@.type() != "array")', '{}', true), false)
    AND NOT coalesce(jsonb_path_exists(only_tasks, 'strict $.*[*] ? (@.type() != "string")', '{}', true), false)
    AND array_position(tasks, NULL) IS NULL) NOT VALID;
EXCEPTION WHEN duplicate_object THEN NULL;
END $$;
