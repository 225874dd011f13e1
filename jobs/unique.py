"""Unique tasks: which jobs are the same, and the effect of a request for one of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, Literal, get_args

import attrs

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.keys import KeySpec, check_key_spec

Duplicates = Literal["waiting", "open", "update"]
"""Effect of a request whose key belongs to a job that has not ended.

waiting: a waiting job covers the request; if the job runs, one more is added, which starts when that one ends. open: a
running job covers it, too. update: as waiting, but the waiting job is changed to the request.
"""


@attrs.frozen(kw_only=True)
class Uniqueness:
    """Uniqueness of a task's jobs. `BadRequest` names the setting that is not allowed.

    `key` is True (jobs with equal args are the same), names of fields, or a template. With `keep_time` an update does
    not change the time at which a job is due. `when_running="cancel"` asks the running job to stop, since a newer one
    waits. With `after_error="delay"` the newer job waits for the retry delay if the running one fails.
    """

    key: Literal[True] | KeySpec
    duplicates: Duplicates = "waiting"
    keep_time: bool = False
    when_running: Literal["cancel"] | None = None
    after_error: Literal["delay"] | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse invalid values."""
        for name, value, allowed in (
            ("duplicates", self.duplicates, get_args(Duplicates)),
            ("when_running", self.when_running, (None, "cancel")),
            ("after_error", self.after_error, (None, "delay")),
        ):
            if value not in allowed:
                raise BadRequest(name, f"must be {' or '.join(map(str, allowed))}, not {value!r:.60}")
        if self.duplicates != "update":
            for name in _OF_UPDATES:
                if getattr(self, name):
                    raise BadRequest(name, 'needs duplicates="update"')

    def check_fields(self, known: Collection[str] | None) -> None:
        """Raise `BadRequest` for a key with fields that args does not have; with `known` None any field is allowed."""
        if self.key is not True:
            check_key_spec("unique", self.key, known)

    def settings(self) -> dict[str, Any]:
        """Return the settings that the database stores, as JSON."""
        given = {name: getattr(self, name) for name in _OF_UPDATES if getattr(self, name)}
        return {"key": self.key, "duplicates": self.duplicates} | given


_OF_UPDATES: Final = ("keep_time", "when_running", "after_error")


def uniqueness_of(unique: bool | str | Sequence[str], **settings: Any) -> Uniqueness | None:  # noqa: FBT001 - as users write it
    """Return the uniqueness of a task's declaration, or None if its jobs are not unique. None settings are ignored.

    Raises `BadRequest`.
    """
    given = {name: value for name, value in settings.items() if value not in {None, False}}
    if unique is False:
        if given:
            raise BadRequest(next(iter(given)), "needs unique")
        return None
    if not isinstance(unique, bool | str | Sequence):
        raise BadRequest("unique", f"must be True, field names or a template, not {unique!r:.60}")
    key: Any = unique if isinstance(unique, bool | str) else tuple(unique)
    return Uniqueness(key=key, **given)
