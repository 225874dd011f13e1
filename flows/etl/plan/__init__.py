"""Plan of a run: its segments and their contents."""
