"""Limits of tasks and suppliers in the database: declared by processes, and overridden by operators."""
