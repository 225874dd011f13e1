"""Admin pages under `/ui`: HTML that the server renders, one file per subject.

A page is declared like a route of the API (page_routes.py) and returns a `Page`: a template of templates/ and its
values. It reads and writes through `Jobs`, `Schedules` and `Limits`, and through reads of store/ that only pages use.
site.py lists all pages and the menu.
"""
