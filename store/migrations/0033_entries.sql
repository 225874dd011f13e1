-- Queues of a process from which it takes jobs of some tasks alone, with those tasks: {"hr": ["employee"]}; NULL: there are none.
ALTER TABLE dl_workers ADD COLUMN IF NOT EXISTS only_tasks jsonb;
-- The version that the request which made the job, or has changed it last, carried; NULL: it carried none.
ALTER TABLE dl_jobs ADD COLUMN IF NOT EXISTS requested_version float8;
