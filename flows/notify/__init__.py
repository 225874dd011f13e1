"""The tasks that tell operators of failures: by a webhook, or by a command (S6)."""
