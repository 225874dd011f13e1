"""Bodies that run in processes of their own: the guard and the wrapper in the child, and the supervisor's side of it.

service ──control── guard ── body       `guard.py`: the body's parent; kills it at its deadline, with all it started
   └──────data──────────────── ┘        `body.py`: imports the user's module and calls the function, job after job
"""
