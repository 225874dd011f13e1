"""How a body becomes records: a file for each format; content.py has the contract that a new one meets.

Formats are values without state, so that many threads can use one source at once. Nothing here
knows of requests, windows or the database.
"""
