"""Access to PostgreSQL: an asyncio loop, the bridge between it and Trio, connections, the driver's errors."""
