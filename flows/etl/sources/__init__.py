"""Where records come from: HTTP interfaces, files and archives, buckets.

source.py is what a pipeline asks of any of them. http.py, files.py and s3.py are the sources; pagination.py walks from
page to page; retry_after.py reads how long a service wants to be left alone. Nothing here knows of queues, pauses,
retries or the database. What turns a body into records is in formats/.
"""
