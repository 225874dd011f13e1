"""The command `demo`. What a user would write is in tasks.py, the tasks, and in program.py, which enqueues their jobs.

command.py runs both, screen.py and results.py show how it goes and what came of it.
"""
