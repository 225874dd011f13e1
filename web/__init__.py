"""HTTP side of a process: a Quart app over a services object, on Hypercorn's Trio server; and a client of one.

The supervisor needs only `create_app(services)` and `serve_web(app, socket, …)`. No module here imports the supervisor.
http_performer.py needs neither Quart nor Trio.
"""
