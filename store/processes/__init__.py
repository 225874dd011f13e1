"""Rows of durable processes: requests, steps, and reads."""
