"""Finds the rows that the database refuses in a batch, and stages the others (E10).

By halves, each tried behind a savepoint of one transaction: a half that is refused is halved again, until a row stands
alone. For each refused row that takes at most 2 × log2(batch) tries: if the first half is taken, what is refused is in
the second, which is not tried whole. A batch that is taken costs nothing of this.

What the database says of itself and not of a row (a connection that is gone, a full disk, a deadlock, a timeout) is
raised as it is, and nothing of the batch is staged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs

from dataloader.jobs.errors import Unstorable
from dataloader.store.etl_tables import Lines, Segment, aio_stage

_SAVEPOINT: Final = "dl_before_rows"


@attrs.frozen
class RefusedRow:
    """A row that the database does not take: its place in the batch, its piece's number, its line, and why."""

    place: int
    piece: int
    line: Lines
    error: str


@attrs.frozen
class Apart:
    """What became of a batch: how many rows are staged, and which were refused, in their order.

    `is_given_up`: too many in a row were refused; those behind them were not tried.
    """

    staged: int
    refused: Sequence[RefusedRow]
    is_given_up: bool


async def aio_stage_apart(
    connection: Any, segment: Segment, pieces: Sequence[tuple[int, Lines]], most_in_a_row: int
) -> Apart:
    """Stage a batch that was refused, but for the rows it was refused for (asyncio-flavoured).

    In the caller's transaction. It gives up when more than `most_in_a_row` rows were refused with none taken between
    them. Raises what `aio_stage` raises, but for `Unstorable`.
    """
    rows = [(piece, line) for piece, (_, lines) in enumerate(pieces) for line in lines.cut(1, 1)]
    search = _Search(connection, segment, pieces, rows, most_in_a_row)
    await connection.execute(f"SAVEPOINT {_SAVEPOINT}")
    if len(rows) > 1:
        await search.halve(0, len(rows))
    else:
        await search.attempt(0, 1)
    await connection.execute(f"RELEASE {_SAVEPOINT}")
    return Apart(search.staged, search.refused, search.is_given_up)


@attrs.define(eq=False)
class _Search:
    """A search under way. Each of the `rows` has the number of its piece."""

    connection: Any
    segment: Segment
    pieces: Sequence[tuple[int, Lines]]
    rows: Sequence[tuple[int, Lines]]
    most_in_a_row: int
    staged: int = 0
    refused: list[RefusedRow] = attrs.field(factory=list)
    _in_a_row: int = 0

    @property
    def is_given_up(self) -> bool:
        """No more rows are tried."""
        return self._in_a_row > self.most_in_a_row

    async def attempt(self, first: int, end: int) -> bool:
        """Stage the rows from `first` to before `end`, or those of them that are taken; tells whether all are."""
        if self.is_given_up:
            return False
        try:
            span = [(self.pieces[piece][0], line) for piece, line in self.rows[first:end]]
            await aio_stage(self.connection, self.segment, span)
        except Unstorable as error:
            await self.connection.execute(f"ROLLBACK TO {_SAVEPOINT}")
            if end - first > 1:
                await self.halve(first, end)
            else:
                told = str(error).removeprefix("line 1, ").removeprefix("line 1: ")
                self.refused.append(RefusedRow(first, *self.rows[first], told))
                self._in_a_row += 1
            return False
        await self.connection.execute(f"RELEASE {_SAVEPOINT}; SAVEPOINT {_SAVEPOINT}")
        self.staged += end - first
        self._in_a_row = 0
        return True

    async def halve(self, first: int, end: int) -> None:
        """Stage what is taken of rows that were refused together."""
        middle = (first + end) // 2
        is_first_taken = await self.attempt(first, middle)
        # Then it is known of the second half that it is refused. A row alone is asked for an error of its own.
        if is_first_taken and end - middle > 1:
            await self.halve(middle, end)
        else:
            await self.attempt(middle, end)
