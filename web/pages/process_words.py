"""Durable process in words: its current step or wait reason, and the names of its tasks."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, Final

import attrs

from dataloader.jobs.secrets.masking import mask_text
from dataloader.store.processes.process_story import MOST_WAITING, ProcessStory
from dataloader.web.pages.formats import at_least

KINDS: Final = {"init": "start", "call": "call", "repair": "repair", "timeout": "timeout", "remove": "removal"}
"""Names of tasks by kind."""


@attrs.frozen(kw_only=True)
class ProcessState:
    """Sentence about a process: `until` when it waits, and a page with details.

    lead: the words before the sentence; is_bad: an operator has to act.
    """

    lead: str
    text: str
    until: datetime | None = None
    path: str | None = None
    name: str | None = None
    label: str | None = None
    is_bad: bool = False


def state_words(story: ProcessStory) -> ProcessState:
    """Return the sentence. It does not depend on the time at which it is read."""
    if story.running is not None:
        return _of_step(story)
    has_work = story.waiting > 0 or story.is_due
    if story.status == "error" and not has_work and story.timer is None:
        text = "repair it, or resume it to try the failed timeout again"
        if story.corrupted_by is None:
            text = "repair it, or resume it to wait for calls"
        return ProcessState(lead="In error:", text=f"{text}.", is_bad=True)
    if has_work:
        return _of_work(story)
    if story.timer is not None:
        what = "The process is removed" if story.timer.kind == "remove" else "Its timeout runs"
        again = f", try {story.timer.attempt + 1}" if story.timer.attempt else ""
        return ProcessState(lead="Waiting for its timer.", text=f"{what}{again}, unless a call arrives first:",
                            until=story.timer.at)  # fmt: skip
    if story.status == "init":
        return ProcessState(lead="Not started:", text="its first step waits for a worker.")
    return ProcessState(lead="Idle:", text="it has no waiting requests and no timer. It continues when it is called.")


def _of_step(story: ProcessStory) -> ProcessState:
    what = what_of(story.running.kind, story.running_method) if story.running else ""
    job = story.wake_up
    path = None if job is None else f"/ui/jobs/{job.job_id}"
    if job is None or job.status != "running":
        text = f"its {what} has lost its worker. The next worker that claims its wake-up job decides how it continues."
        return ProcessState(lead="Interrupted:", text=text, path=path, label="Its wake-up job", is_bad=True)
    worker = "another service" if job.worker is None else mask_text(job.worker)
    if job.is_silent:
        text = f"its {what} runs on {worker}, which sends no heartbeats. The next sweep recovers it."
        return ProcessState(lead="Worker lost:", text=text, path=path, label="Its wake-up job", is_bad=True)
    stops = " A stop was requested." if job.is_stopping else ""
    return ProcessState(lead="Running:", text=f"its {what} on {worker}.{stops}", path=path, label="Its wake-up job")


def _of_work(story: ProcessStory) -> ProcessState:
    calls = f"{at_least(story.waiting, MOST_WAITING)} {'request waits' if story.waiting == 1 else 'requests wait'}"
    work = calls if story.waiting else "its timer is due"
    lead, queue, job = "Why it waits:", f"process.{story.type}", story.wake_up
    serving, name = story.serving, mask_text(story.type)
    at_queue: dict[str, Any] = {"path": "/ui/queue", "name": queue, "label": "Its queue and workers"}
    if job is None or job.status not in {"queued", "running"}:
        text = f"{work}, but it has no wake-up job. Services check for such processes, and add one."
        return ProcessState(lead=lead, text=text, is_bad=True)
    own: dict[str, Any] = {"path": f"/ui/jobs/{job.job_id}", "label": "Its wake-up job"}
    if job.status == "running":
        worker = "another service" if job.worker is None else mask_text(job.worker)
        return ProcessState(lead="Running:", text=f"{work}, and {worker} runs its wake-up job.", **own)
    if serving.paused:
        text = f"{work}, but its queue process.{name} is paused."
        return ProcessState(lead=lead, text=text, is_bad=True, **at_queue)
    if not serving.workers:
        text = f"{work}, but no worker serves the queue process.{name}. Start a program that defines the type."
        return ProcessState(lead=lead, text=text, is_bad=True, **at_queue)
    if not serving.knowing:
        text = f"{work}, but no worker of the queue process.{name} has version {story.version} of the type."
        return ProcessState(lead=lead, text=text, is_bad=True, **at_queue)
    text = f"{work}. A worker claims its wake-up job as soon as it has a free slot."
    return ProcessState(lead="Ready:", text=text, **own)


def what_of(kind: str, method: str | None) -> str:
    """Return a task in one or two words: `call pay`, `timeout`."""
    word = KINDS.get(kind, kind)
    return word if method is None else f"{word} {mask_text(method)}"


def in_line(value: Any) -> str:
    """Return a JSON value on one line."""
    return json.dumps(value, ensure_ascii=False, default=str)
