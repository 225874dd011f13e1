"""Where records come from: HTTP interfaces, files and archives, buckets.

source.py has the contract of a source. http.py, files.py and s3.py are the sources; pagination.py walks from page to
page; retry_after.py reads for how long a service wants no request. Nothing here knows of queues, pauses, retries or the
database. formats/ turns bodies into records.
"""
