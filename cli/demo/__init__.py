"""Command `demo`. User code is in tasks.py, the tasks, and in program.py, which enqueues their jobs.

command.py runs both. screen.py shows the progress, results.py the results.
"""
