"""The only room with SQL, asyncpg and trio_asyncio: the bridge, the migrations, and one file a concern.

Functions are Trio-flavoured and take the `Database` (or a `Session`) first; their asyncio-flavoured inner halves are
named `_aio_…`, run wholly inside one crossing, and never see a Trio primitive.
"""
