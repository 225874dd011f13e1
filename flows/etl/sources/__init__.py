"""Sources of records: HTTP APIs, files and archives, buckets.

source.py has the contract of a source. http.py, files.py and s3.py are the sources. pagination.py walks from page to
page. retry_after.py reads the seconds for which a service asks for no request. Sources know nothing of queues, pauses,
retries or the database. formats/ makes records of bodies.
"""
