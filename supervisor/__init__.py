"""Brings a process to life: settings, the tree of actors, restarts, drain, signals, embedding, logs."""
