"""The client: concrete methods that build operations and have them performed, by the database or by a service."""
