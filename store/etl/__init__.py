"""SQL of loads: staging tables, merges, and the records of runs."""
