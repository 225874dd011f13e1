"""One actor a file. Each is `async def run(…, *, task_status)` and is started by the tree in supervisor/tree.py.

Actors meet through the values of recorder_messages.py, wake.py and job_runs.py. They import no others of each other's
files, and never open a nursery that outlives a call.
"""
