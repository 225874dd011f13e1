"""Hypercorn's server on Trio: listening sockets, connections, bodies, and refusals before the app."""
