"""The domain: jobs, their states, outcomes, retry policies, the task registry, errors. Pure.

Nothing here knows of the database, the web or the supervisor; everything else imports this.
"""
