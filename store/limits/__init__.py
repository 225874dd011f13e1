"""Limits of tasks and suppliers in the database: what processes declare, and what operators put in its place."""
