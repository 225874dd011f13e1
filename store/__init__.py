"""The only room with SQL and asyncpg: the bridge to it, the migrations, and one file a concern.

Functions are Trio-flavored and take the `Database` (or a `Session`) first; their asyncio-flavored inner halves are
named `_aio_…`, run wholly inside one crossing, and never see a Trio primitive.
"""
