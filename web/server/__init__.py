"""Hypercorn's server on Trio: listening sockets, connections, bodies, and what is refused before the app."""
