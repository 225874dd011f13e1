"""Libraries on top of the queue, for application code. libraries.py lists them."""
