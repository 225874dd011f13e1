-- The field `budgets` of suppliers' limits is named `rate_limits`.
UPDATE dl_sources
SET limits = CASE WHEN jsonb_typeof(limits) = 'object' AND limits ? 'budgets'
                  THEN jsonb_build_object('rate_limits', limits -> 'budgets') || (limits - 'budgets') ELSE limits END,
    override = CASE WHEN jsonb_typeof(override) = 'object' AND override ? 'budgets'
                    THEN jsonb_build_object('rate_limits', override -> 'budgets') || (override - 'budgets') ELSE override END
WHERE (jsonb_typeof(limits) = 'object' AND limits ? 'budgets') OR (jsonb_typeof(override) = 'object' AND override ? 'budgets');
