"""Finds the rows that the database refuses in a batch, and puts the others into the staging table.

It searches by halves, each tried after a savepoint: a refused half is halved again, down to a single row. For each
refused row that takes at most 2 × log2(batch) attempts. If the first half is accepted, the refused rows are in the
second half, which is not tried as a whole. A batch that is accepted has no extra cost.

A savepoint is a subtransaction. The server caches up to 64 of a transaction for all sessions. With more, every session
has to look up, row by row, to which transaction they belong. So a search commits its staged rows every `MAX_TRIES`
attempts.

An error that is not about a row (a lost connection, a full disk, a deadlock, a timeout) is raised as it is, and nothing
more of the batch is staged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs

from dataloader.jobs.errors import Unstorable
from dataloader.store.etl.staging import StagedLines, StagedSegment, aio_stage

MAX_TRIES: Final = 50
"""Maximum number of attempts in one transaction; each may be a subtransaction."""

_SAVEPOINT: Final = "dl_before_rows"


@attrs.frozen
class RefusedRow:
    """Row that the database refuses: its place in the batch, its piece's number, its line, and the error."""

    place: int
    piece: int
    line: StagedLines
    error: str


@attrs.frozen
class RefusedPiece:
    """Rows that the database refuses together: the place of the first, their number, their pieces' numbers, the error.

    `line` is the first of them, which may be a good one.
    """

    place: int
    rows: int
    pieces: Sequence[int]
    line: StagedLines
    error: str


@attrs.frozen
class _Span:
    """Rows of the batch from `first` to before `end`; `is_rest`: the second half of refused rows."""

    first: int
    end: int
    is_rest: bool

    def halves(self) -> list[_Span]:
        """Return both halves, the second one first, so that the first is on top of the stack."""
        middle = (self.first + self.end) // 2
        return [_Span(middle, self.end, is_rest=True), _Span(self.first, middle, is_rest=False)]

    def __len__(self) -> int:
        return self.end - self.first


@attrs.define(eq=False)
class RefusedSearch:
    """Search in a refused batch for the rows that caused the refusal.

    After `most_in_a_row` refused rows in a row, further rows are tried together, in the largest pieces that are left,
    until a piece is accepted. `refused` has the found rows in their order, `unsearched` the pieces that were refused
    together. The caller must update `staged`.
    """

    segment: StagedSegment
    pieces: Sequence[tuple[int, StagedLines]]
    most_in_a_row: int
    staged: int = 0
    refused: list[RefusedRow] = attrs.field(init=False, factory=list)
    unsearched: list[RefusedPiece] = attrs.field(init=False, factory=list)
    _requests: list[int] = attrs.field(init=False)
    _rows: list[tuple[int, StagedLines]] = attrs.field(init=False)
    _todo: list[_Span] = attrs.field(init=False)
    _in_a_row: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self._requests = [request for request, _ in self.pieces]
        # Each row with the number of its piece.
        self._rows = [(piece, line) for piece, (_, lines) in enumerate(self.pieces) for line in lines.cut(1, 1)]
        whole = _Span(0, len(self._rows), is_rest=True)
        self._todo = whole.halves() if len(whole) > 1 else [whole]

    @property
    def is_over(self) -> bool:
        """Return whether all rows are staged or refused."""
        return not self._todo

    @property
    def settled(self) -> int:
        """Number of rows that are staged or refused by now."""
        return self.staged + len(self.refused) + sum(one.rows for one in self.unsearched)

    async def aio_go_on(self, connection: Any) -> int:
        """Make up to `MAX_TRIES` attempts (asyncio-flavored), in the caller's transaction; return the staged rows.

        Raises the errors of `aio_stage`, except `Unstorable`.
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
        """Put the rows into the staging table, or none of them; return their number."""
        rows = self._rows[span.first : span.end]
        try:
            await aio_stage(connection, self.segment, [(self._requests[piece], line) for piece, line in rows])
        except Unstorable as error:
            await connection.execute(f"ROLLBACK TO {_SAVEPOINT}")
            told = str(error)
            if len(span) == 1:
                told = told.removeprefix("line 1, ").removeprefix("line 1: ")
                self.refused.append(RefusedRow(span.first, *rows[0], told))
                self._in_a_row += 1
            elif self._in_a_row < self.most_in_a_row:
                self._todo += span.halves()
            else:
                pieces = sorted({piece for piece, _ in rows})
                _, first_line = rows[0]
                self.unsearched.append(RefusedPiece(span.first, len(span), pieces, first_line, told))
            return 0
        await connection.execute(f"RELEASE {_SAVEPOINT}; SAVEPOINT {_SAVEPOINT}")
        self._in_a_row = 0
        # The second half is then known to be refused. Only a single row is tried, to get its error.
        if not span.is_rest and len(self._todo[-1]) > 1:
            self._todo += self._todo.pop().halves()
        return len(span)
