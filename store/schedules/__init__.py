"""Schedules in the database: their rows, and the tick that adds the jobs that are due."""
