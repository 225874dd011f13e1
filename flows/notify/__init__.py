"""Tasks that notify operators of failures, by a webhook or a command."""
