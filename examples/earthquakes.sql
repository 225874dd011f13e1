CREATE TABLE quake (
  id text PRIMARY KEY,
  at timestamptz NOT NULL,
  magnitude numeric NOT NULL,
  place text,
  latitude float8 NOT NULL,
  longitude float8 NOT NULL,
  depth_km float8,
  fetched_at timestamptz,
  deleted_at timestamptz
);
CREATE TABLE quake_shaking (id text PRIMARY KEY, felt int, alert text, sources text[] NOT NULL);
