"""State of a load: how far it has come, as its next run reads it.

A state is an object with a `kind`. `{"kind": "window", "upto": …}`: all data before the timestamp `upto` is in the
table. `{"kind": "checkpoint", "state": …}`: the last `Checkpoint` of a function that yields rows. A commit moves the
state in the transaction of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import attrs

from dataloader.jobs.errors import BadRequest
from dataloader.store.etl.target_table import literal

WINDOW: Final = "window"
CHECKPOINT: Final = "checkpoint"

_READ: Final = "SELECT state, run_id FROM dl_load_state WHERE load = $1"
# A run over days long past does not move the state back.
_MOVE: Final = """
INSERT INTO dl_load_state AS s (load, state, run_id) VALUES ($1, $2, $3)
ON CONFLICT (load) DO UPDATE SET state = excluded.state, run_id = excluded.run_id, moved_at = now()
WHERE s.state ->> 'kind' <> 'window' OR excluded.state ->> 'kind' <> 'window'
   OR (s.state ->> 'upto')::timestamptz < (excluded.state ->> 'upto')::timestamptz
"""


@attrs.frozen
class LoadState:
    """State of a load, and the run that set it."""

    state: Mapping[str, Any]
    run_id: UUID

    def of_kind(self, load: str, kind: str) -> Mapping[str, Any]:
        """Return the state. Raises `BadRequest` if it is of another kind: the load was declared in another way."""
        if self.state["kind"] != kind:
            raise BadRequest(
                f"load {load}",
                f"its state must be of the kind {kind}, not {self.state['kind']}; to load it from its beginning, run:"
                f" DELETE FROM dl_load_state WHERE load = {literal(load)}",
            )
        return self.state

    def watermark(self, load: str) -> datetime:
        """Return the timestamp before which all data is loaded. Raises `BadRequest` as `of_kind` does."""
        return datetime.fromisoformat(self.of_kind(load, WINDOW)["upto"])


def checkpoint_state(state: object) -> dict[str, Any]:
    """Return the state of a load whose function has yielded a checkpoint with `state`."""
    return {"kind": CHECKPOINT, "state": state}


def window_state(upto: datetime) -> dict[str, Any]:
    """Return the state of a load with windows that has loaded all data before `upto`."""
    return {"kind": WINDOW, "upto": upto.isoformat()}


async def aio_load_state(connection: Any, load: str) -> LoadState | None:
    """Return a load's state (asyncio-flavored); None before its first segment was committed."""
    row = await connection.fetchrow(_READ, load)
    return None if row is None else LoadState(row["state"], row["run_id"])


async def aio_move_state(connection: Any, load: str, state: Mapping[str, Any], run_id: UUID) -> None:
    """Set a load's state (asyncio-flavored), in the transaction of a commit."""
    await connection.execute(_MOVE, load, state, run_id)
