-- Sign-ins of the pages that have ended by a sign-out, by the hash of their cookie, until they would have ended by themselves.
CREATE TABLE IF NOT EXISTS dl_ended_sessions (
  session bytea PRIMARY KEY,
  until timestamptz NOT NULL
);
