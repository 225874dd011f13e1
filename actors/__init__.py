"""One actor a file. Each is `async def run(…, *, task_status)` and is started by the tree in supervisor/tree.py.

Actors meet through the values of to_record.py, wake.py and job_runs.py; they never import each other's files but for
those, and never open a nursery that outlives a call.
"""
