"""Where records come from: HTTP interfaces, files and archives, buckets.

base.py is what a pipeline asks of any of them. http.py, files.py and s3.py are the sources; formats.py, markup.py and
packed.py turn a body into records; pages.py walks from page to page; hints.py reads how long a source wants to be left
alone. Nothing here knows of queues, pauses, retries or the database.
"""
