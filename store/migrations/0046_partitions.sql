-- Of a task with max_running_per_partition at most so many jobs of one partition_key are in work. last_partition is the key that had
-- the last turn: the next is that of the next key that waits, in their order.
ALTER TABLE dl_tasks ADD COLUMN IF NOT EXISTS max_running_per_partition int;
ALTER TABLE dl_lanes ADD COLUMN IF NOT EXISTS last_partition text;
