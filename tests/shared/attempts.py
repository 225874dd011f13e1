"""Steps of a job that use up an attempt."""

from __future__ import annotations

from typing import Final

from dataloader.jobs.states import Step

USES_ATTEMPT: Final[dict[Step, bool]] = {
    Step.FAIL: True,
    Step.RETRY: True,
    Step.EXPIRE: True,
    Step.LOSE: True,
    Step.SUCCEED: True,
    Step.CANCEL: True,
    Step.SNOOZE: False,
    Step.RETURN: False,
    Step.CLOSE: False,
    Step.PARK: False,
}
"""A claim adds an attempt. A step that uses none subtracts it again."""
