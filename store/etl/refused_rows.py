"""Finds the rows that the database refuses in a batch, and puts the others into the staging table (E10).

By halves, each tried behind a savepoint: a half that is refused is halved again, until a row stands alone. For each
refused row that takes at most 2 × log2(batch) tries: if the first half is taken, what is refused is in the second,
which is not tried whole. A batch that is taken costs nothing of this.

A savepoint is a subtransaction. The server notes 64 of a transaction where every session sees them; with more of them
all sessions have to look up whose they are, row by row. So a search commits what it has staged every `MAX_TRIES` tries.

What the database says of itself and not of a row (a connection that is gone, a full disk, a deadlock, a timeout) is
raised as it is, and nothing more of the batch is staged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs

from dataloader.jobs.errors import Unstorable
from dataloader.store.etl.staging import Lines, StagedSegment, aio_stage

MAX_TRIES: Final = 50
"""Of one transaction, each of which may be a subtransaction."""

_SAVEPOINT: Final = "dl_before_rows"


@attrs.frozen
class RefusedRow:
    """A row that the database does not take: its place in the batch, its piece's number, its line, and why."""

    place: int
    piece: int
    line: Lines
    error: str


@attrs.frozen
class _Span:
    """Rows of the batch from `first` to before `end`; `is_rest`: the second half of rows that were refused."""

    first: int
    end: int
    is_rest: bool

    def halves(self) -> list[_Span]:
        """The second half, below the first one."""
        middle = (self.first + self.end) // 2
        return [_Span(middle, self.end, is_rest=True), _Span(self.first, middle, is_rest=False)]

    def __len__(self) -> int:
        return self.end - self.first


@attrs.define(eq=False)
class RefusedSearch:
    """A search in a batch that was refused, for the rows it was refused for.

    It gives up when more than `most_in_a_row` rows were refused with none taken between them. `refused` are those that
    were found, in their order. `staged` is for the caller to count.
    """

    segment: StagedSegment
    pieces: Sequence[tuple[int, Lines]]
    most_in_a_row: int
    staged: int = 0
    refused: list[RefusedRow] = attrs.field(init=False, factory=list)
    _rows: list[tuple[int, Lines]] = attrs.field(init=False)
    _todo: list[_Span] = attrs.field(init=False)
    _in_a_row: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        # Each row with the number of its piece.
        self._rows = [(piece, line) for piece, (_, lines) in enumerate(self.pieces) for line in lines.cut(1, 1)]
        whole = _Span(0, len(self._rows), is_rest=True)
        self._todo = whole.halves() if len(whole) > 1 else [whole]

    @property
    def is_given_up(self) -> bool:
        """Too many in a row were refused; those behind them are not tried."""
        return self._in_a_row > self.most_in_a_row

    @property
    def was_last_taken(self) -> bool:
        """The last rows that were tried are staged."""
        return self._in_a_row == 0

    @property
    def is_over(self) -> bool:
        """All rows are staged or refused, or the search is given up."""
        return self.is_given_up or not self._todo

    async def aio_go_on(self, connection: Any) -> int:
        """Go on for some tries (asyncio-flavoured), in the caller's transaction; how many rows it staged comes back.

        Raises what `aio_stage` raises, but for `Unstorable`.
        """
        staged = 0
        await connection.execute(f"SAVEPOINT {_SAVEPOINT}")
        for _ in range(MAX_TRIES):
            if self.is_over:
                break
            staged += await self._aio_try(connection, self._todo.pop())
        await connection.execute(f"RELEASE {_SAVEPOINT}")
        return staged

    async def _aio_try(self, connection: Any, span: _Span) -> int:
        """Put the rows into the staging table, or none of them; how many."""
        rows = self._rows[span.first : span.end]
        try:
            await aio_stage(connection, self.segment, [(self.pieces[piece][0], line) for piece, line in rows])
        except Unstorable as error:
            await connection.execute(f"ROLLBACK TO {_SAVEPOINT}")
            if len(span) > 1:
                self._todo += span.halves()
            else:
                told = str(error).removeprefix("line 1, ").removeprefix("line 1: ")
                self.refused.append(RefusedRow(span.first, *rows[0], told))
                self._in_a_row += 1
            return 0
        await connection.execute(f"RELEASE {_SAVEPOINT}; SAVEPOINT {_SAVEPOINT}")
        self._in_a_row = 0
        # Then it is known of the other half that it is refused. A row alone is asked for an error of its own.
        if not span.is_rest and len(self._todo[-1]) > 1:
            self._todo += self._todo.pop().halves()
        return len(span)
