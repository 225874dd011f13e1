"""Rows of durable processes: what is asked of them, their steps, and what readers see."""
