"""The SQL of loads: staging tables, merges, what runs have done."""
