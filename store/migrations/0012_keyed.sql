-- Whether a job has a lock_key. Only our own enqueue writes false, for a job that was given none: its lock_key, which the
-- document requires, is its id then, and means nothing. It takes no advisory lock and stands in no index of keys.
ALTER TABLE dl_jobs ADD COLUMN IF NOT EXISTS keyed boolean NOT NULL DEFAULT true;
