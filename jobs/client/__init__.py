"""Client: methods that build operations and perform them, by the database or by a service."""
