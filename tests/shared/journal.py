"""Event history of a job as steps of the table of transitions."""

from dataloader.jobs.states import Step

STEPS = {
    "picked": Step.CLAIM,
    "done": Step.SUCCEED,
    "failed": Step.FAIL,
    "canceled": Step.CANCEL,
    "lost": Step.LOSE,
    "moved": Step.MOVE,
    "requeue: lock_key": Step.PARK,
    "requeue: operator": Step.REVIVE,
    "requeue: retry": Step.RETRY,
    "requeue: snooze": Step.SNOOZE,
    "requeue: return": Step.RETURN,
    "requeue: period_end": Step.CLOSE,
    "requeue: the claim's reply was lost": Step.RETURN,
    "requeue: lease expired": Step.EXPIRE,
}


def step_of(kind, reason):
    """Return the step of an event; only events that move a job have one."""
    return STEPS[f"requeue: {reason}" if kind == "requeue" else kind]
