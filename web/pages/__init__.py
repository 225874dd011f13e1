"""The admin pages under `/ui`: HTML that the server renders, one file a subject.

A page is declared like a route of the API (page_routes.py) and returns a `Page`: a template of templates/ and its
values. It reads and writes by `Jobs`, `Schedules` and `Limits`, and by the reads of store/ that serve pages alone.
site.py lists all pages and the menu.
"""
