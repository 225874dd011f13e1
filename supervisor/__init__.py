"""Brings the product to life: settings, the tree of actors, restarts, drain, signals, embedding, command line, logs."""
