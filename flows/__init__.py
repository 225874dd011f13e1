"""Libraries on top of the queue, for application code. Empty so far: pipelines and processes will live here."""
