"""Requests to sources: one at a time, within the source's limits, retried where that may help."""
