"""Writes rows to staging tables, and merges them into their targets."""
