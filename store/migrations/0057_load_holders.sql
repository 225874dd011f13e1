-- Which run may write a load's table: one at a time, however its runs are started. A holder counts while its job runs with its token.
CREATE TABLE IF NOT EXISTS dl_load_holders (
  load text PRIMARY KEY,
  run_id uuid NOT NULL,
  token bigint NOT NULL,
  since timestamptz NOT NULL DEFAULT now()
);
