"""Domain: jobs, their states, outcomes, retry policies, the task registry, errors. Pure.

This package does not depend on the database, the web or the supervisor; all other packages import it.
"""
