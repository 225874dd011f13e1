"""Bodies on the workers of a Dask cluster: the same guard and wrapper as of a child process, and a relay between.

service ── scheduler ── Dask worker ── guard ── body
  `clusters.py`: who asks for a place     `on_worker.py`: the Dask task, and what the service asks the worker for
  `remote_child.py`: a child far away     `relay.py`: starts guard and body, and passes on what both say
"""
