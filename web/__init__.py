"""The HTTP side of a process: a Quart app over a services object, on Hypercorn's Trio server; and a client of one.

`create_app(services)` and `serve_web(app, socket, …)` are all that the supervisor needs. Nothing here imports it.
http_performer.py needs neither Quart nor Trio.
"""
