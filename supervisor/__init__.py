"""Runtime of a process: settings, the tree of actors, restarts, drain, signals, embedding, logs."""
