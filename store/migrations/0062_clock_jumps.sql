-- When the database's clock was last found to have jumped ahead, by that clock. A lease that was renewed before counts for its whole length
-- from then on: the clock that has ended it is another one than that by which it was granted.
ALTER TABLE dl_history ADD COLUMN IF NOT EXISTS clock_jumped_at timestamptz;
