"""Requests to sources: one at a time, within the source's limits, again where that may help."""
