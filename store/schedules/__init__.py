"""Schedules in the database: their rows, and the tick that adds the due jobs."""
