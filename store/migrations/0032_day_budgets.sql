-- Budgets by day: where spans_s[i] is 0, units[i] count from midnight to midnight of zones[i].
ALTER TABLE dl_sources ADD COLUMN IF NOT EXISTS zones text[] NOT NULL DEFAULT '{}';
