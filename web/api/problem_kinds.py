"""Descriptions of problem types: what has happened, and what a client can do about it."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Final

from msgspec import Struct

from dataloader.jobs.model import about
from dataloader.web.problems import ADDRESS, PROBLEMS, ProblemError
from dataloader.web.routes import Answer, Call, Routes

routes: Final = Routes()


class ProblemKind(Struct, frozen=True):
    """Kind of problem."""

    EXAMPLE: ClassVar[Any] = {"type": f"{ADDRESS}draining", "description": PROBLEMS["draining"]}

    type: Annotated[str, about("`type` of the problem.")]
    description: Annotated[str, about("Cause, and what to do.")]


@routes.add("GET", f"{ADDRESS}<kind>", role=None, answers={200: ProblemKind})
async def show_problem(_call: Call, kind: str) -> Answer:
    """Describe a kind of problem; its address is the `type` of such problems."""
    if kind not in PROBLEMS:
        raise ProblemError(HTTPStatus.NOT_FOUND, f"Unknown kind of problem. The kinds are {', '.join(PROBLEMS)}.")
    return Answer(value=ProblemKind(f"{ADDRESS}{kind}", PROBLEMS[kind]))
