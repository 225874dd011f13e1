"""The only layer with SQL and asyncpg: the bridge to it, the migrations, and one file for each subject.

Functions are Trio-flavored and take the `Database` (or a `Session`) first. Their asyncio-flavored inner halves are
named `_aio_…`, run wholly inside one crossing, and never use a Trio primitive.
"""
