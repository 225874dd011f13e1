"""Jobs that go through stages: each stage is a task, and one job moves from one to the next.

`Tasks.stages` declares them. What a stage's handler returns moves its job on, in the transaction that ends the run
(`Step.MOVE`), so that a stage may run again after a crash, and none is left out.
"""

from __future__ import annotations

from typing import Final

import attrs

from dataloader.jobs.errors import BadRequest

MAX_MOVES: Final = 1_000
"""How often one job moves: stages that move back and forth for ever are stopped by that."""
MIN_STAGES: Final = 2


class MoveRefused(BadRequest):
    """A stage's handler asked for a move that is not possible: the job fails for good."""


@attrs.frozen
class Stages:
    """The stages of jobs called `name`: their names in order, each that of a task `name.stage`."""

    name: str
    order: tuple[str, ...]

    @property
    def first_task(self) -> str:
        """The task of the first stage."""
        return self.task_of(self.order[0])

    def task_of(self, stage: str) -> str:
        """The task of a stage."""
        return f"{self.name}.{stage}"

    def stage_of(self, task: str) -> str:
        """The stage that a task is; the name of the whole stands for the first one."""
        return self.order[0] if task == self.name else task.removeprefix(f"{self.name}.")

    def task_after(self, task: str) -> str | None:
        """The task of the stage that follows; None after the last one."""
        place = self.order.index(self.stage_of(task)) + 1
        return None if place == len(self.order) else self.task_of(self.order[place])

    def task_to(self, stage: object) -> str:
        """The task of the stage that a handler names. Raises `MoveRefused` if there is no such stage."""
        if stage not in self.order:
            raise MoveRefused("Next.to", f"must be a stage of {self.name} ({', '.join(self.order)}), not {stage!r:.60}")
        return self.task_of(str(stage))
