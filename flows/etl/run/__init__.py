"""Runs of loads: task, pipeline, progress, end."""
