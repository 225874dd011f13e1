-- Moves the waiting jobs of procrastinate (3.x) into dataloader's table, in one transaction, once. Stop procrastinate's
-- workers first, and let a process of dataloader that has the tasks start once before. Both are in this database.
BEGIN;
LOCK TABLE procrastinate_jobs IN SHARE ROW EXCLUSIVE MODE;
SELECT dl_enqueue(
  task_name,
  args,
  queue => queue_name,
  lock_key => lock,
  priority => greatest(0, 100 - priority),         -- procrastinate runs the largest first, dataloader the smallest
  available_at => coalesce(scheduled_at, now()),
  idempotency_key => 'procrastinate ' || id        -- a second run of this script adds nothing
)
FROM procrastinate_jobs
WHERE status = 'todo'
ORDER BY id;
UPDATE procrastinate_jobs SET status = 'cancelled' WHERE status = 'todo';
COMMIT;
