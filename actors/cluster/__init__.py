"""Bodies on the workers of a Dask cluster: the guard and wrapper of a child process, behind a relay.

service ── scheduler ── Dask worker ── guard ── body
  `clusters.py`: requests a thread for a body   `on_worker.py`: the Dask task, and the worker's answers to the service
  `remote_child.py`: a child on a worker        `relay.py`: starts guard and body, and forwards the messages
"""
