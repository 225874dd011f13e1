"""A run of a load: its task, its pipeline, its progress, its end."""
