"""Rows go into staging tables, and from there into their targets."""
