-- Which history of the database this is: one row, which a service writes when the server or the database is another than before, after a
-- restore or the promotion of a standby. It informs: no guarantee depends on it, since a restore of the tables alone changes nothing here.
--   id                           random; a service that finds another one than before starts anew
--   system, timeline, database   of the server, of its write-ahead log, and the database's oid
CREATE TABLE IF NOT EXISTS dl_history (
  one boolean PRIMARY KEY DEFAULT true CHECK (one),
  id uuid NOT NULL DEFAULT gen_random_uuid(),
  system bigint NOT NULL,
  timeline text NOT NULL,
  database bigint NOT NULL,
  changed_at timestamptz NOT NULL DEFAULT now()
);
