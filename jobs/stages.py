"""Jobs with stages: each stage is a task, and one job moves from one to the next.

`Tasks.stages` declares them. The return value of a stage's handler moves its job on, in the transaction that ends the
run (`Step.MOVE`). So a stage may run again after a crash, and none is skipped.
"""

from __future__ import annotations

from typing import Final

import attrs

from dataloader.jobs.errors import BadRequest

MAX_MOVES: Final = 1_000
"""Maximum number of moves of one job, which stops endless moves back and forth."""
MIN_STAGES: Final = 2


class MoveRefused(BadRequest):
    """A stage's handler asked for a move that is not possible: the job fails for good."""


@attrs.frozen
class Stages:
    """Stages of jobs called `name`: their names in order. Each stage's task is `name.stage`."""

    name: str
    order: tuple[str, ...]

    @property
    def first_task(self) -> str:
        """Task of the first stage."""
        return self.task_of(self.order[0])

    def task_of(self, stage: str) -> str:
        """Return the task of a stage."""
        return f"{self.name}.{stage}"

    def stage_of(self, task: str) -> str:
        """Return the stage of a task; the name of the whole means the first stage."""
        return self.order[0] if task == self.name else task.removeprefix(f"{self.name}.")

    def task_after(self, task: str) -> str | None:
        """Return the task of the following stage, or None after the last one."""
        place = self.order.index(self.stage_of(task)) + 1
        return None if place == len(self.order) else self.task_of(self.order[place])

    def task_to(self, stage: object) -> str:
        """Return the task of the stage that a handler names. Raises `MoveRefused` if there is no such stage."""
        if stage not in self.order:
            raise MoveRefused("Next.to", f"must be a stage of {self.name} ({', '.join(self.order)}), not {stage!r:.60}")
        return self.task_of(str(stage))
