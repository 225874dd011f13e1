"""Responses become records, records become rows."""
