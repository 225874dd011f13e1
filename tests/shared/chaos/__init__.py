"""Long mixed run under faults: `just chaos [seconds]`. See __main__.py."""
