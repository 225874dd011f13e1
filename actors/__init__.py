"""One actor a file. Each is `async def run(…, *, task_status)` and is started by the tree in supervisor/tree.py.

Actors share only the values of recorder_messages.py, wake.py and job_runs.py; otherwise they do not import each other.
None opens a nursery that outlives a call.
"""
