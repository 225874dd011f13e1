"""Sessions of the admin pages ended by a sign-out, for all processes: the cookie alone does not show the sign-out."""

from __future__ import annotations

from typing import Any, Final

from dataloader.store.connection.bridge import Database

_END: Final = """
INSERT INTO dl_ended_sessions (session, until) VALUES ($1, now() + make_interval(secs => $2)) ON CONFLICT DO NOTHING
"""
_HAS_ENDED: Final = "SELECT EXISTS (SELECT FROM dl_ended_sessions WHERE session = $1)"


async def end_session(database: Database, session: bytes, *, lasts_s: float) -> None:
    """Record that a session has ended. `session` is its hash; its cookie would be accepted for `lasts_s` seconds."""
    await database.write(_aio_end_session, session, lasts_s)


async def has_ended(database: Database, session: bytes) -> bool:
    """Return whether a sign-out, in any process, has ended the session."""
    return await database.run(_aio_has_ended, session)


async def _aio_end_session(connection: Any, session: bytes, lasts_s: float) -> None:
    await connection.execute(_END, session, lasts_s)


async def _aio_has_ended(connection: Any, session: bytes) -> bool:
    return bool(await connection.fetchval(_HAS_ENDED, session))
