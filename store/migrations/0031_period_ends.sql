-- What becomes of jobs that run when a work period of their task, or of its supplier, closes: NULL and 'finish': they go on; 'stop': they
-- are stopped and go back to their lane.
ALTER TABLE dl_tasks ADD COLUMN IF NOT EXISTS at_period_end text;
