"""Parsing: responses to records, records to rows."""
