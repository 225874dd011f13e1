"""The embedded PostgreSQL: a private server in a data directory, with its backup."""
