"""Actors, one per file. Each is `async def run(…, *, task_status)` and is started by the tree in supervisor/tree.py.

Most actors share only values, such as those of job_runs.py, outage.py, recorder_messages.py and wake.py, and do not
import each other. None opens a nursery that outlives a call.
"""
