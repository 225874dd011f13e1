-- What tells a step to the outside: an identity that no number of this database decides, so that a restore can't give it out again.
--   dl_process_tasks.ident         of a client's request: random; of a step's: a hash of that step's ident and of what it asks for
--   dl_processes.timer_ident       that of the timer that waits; a try again keeps it
--   dl_processes.running_ident     that of the step that runs
--   dl_process_outbox.ident        what a delivery is known by: a hash of its step's ident and of what it tells
-- NULL: written by a program of an earlier release, which knows the step by its task's number.
ALTER TABLE dl_process_tasks ADD COLUMN IF NOT EXISTS ident uuid;
ALTER TABLE dl_process_tasks ALTER COLUMN ident SET DEFAULT gen_random_uuid();
ALTER TABLE dl_processes ADD COLUMN IF NOT EXISTS timer_ident uuid;
ALTER TABLE dl_processes ADD COLUMN IF NOT EXISTS running_ident uuid;
ALTER TABLE dl_process_outbox ADD COLUMN IF NOT EXISTS ident uuid;
ALTER TABLE dl_process_outbox ALTER COLUMN ident SET DEFAULT gen_random_uuid();
