"""Formats, which make records of a body: one file for each format. content.py has the contract of a format.

Formats are values without state, so that several threads can use one source concurrently. They know nothing of
requests, windows or the database.
"""
