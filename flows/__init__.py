"""Libraries on top of the queue, for application code: etl/ (pipelines). libraries.py lists them."""
