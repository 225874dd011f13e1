-- The tasks that a process knows; NULL: a program that does not tell.
ALTER TABLE dl_workers ADD COLUMN IF NOT EXISTS tasks text[];
