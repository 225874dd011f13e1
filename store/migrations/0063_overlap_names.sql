-- Overlap policies of schedules have new names.
UPDATE dl_schedules
SET spec = spec || jsonb_build_object('overlap', CASE spec ->> 'overlap' WHEN 'parallel' THEN 'allow' ELSE 'buffer_' || (spec ->> 'overlap') END)
WHERE spec ->> 'overlap' IN ('one', 'all', 'parallel');
