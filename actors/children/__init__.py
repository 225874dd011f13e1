"""Handlers in child processes: the guard and the wrapper in the child, and the service's side of both.

service ──control── guard ── body       `guard.py`: parent of the body; kills it at its deadline, with all it started
   └──────data──────────────── ┘        `body.py`: imports the user's module and calls the function, job after job
"""
