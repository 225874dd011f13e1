"""Declared keys of a task's jobs: a template, `"rates:{year}"`, or names of fields, `("source", "year")`.

The database builds the key itself (`dl_key`), so that every way to enqueue a job gives the same one.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import MAX_KEY, check_name

KeySpec = str | tuple[str, ...]

_FIELD: Final = re.compile(r"\{([^{}]*)\}")


def check_key_spec(name: str, spec: KeySpec, known: Collection[str] | None) -> None:
    """Raise `BadRequest` unless `spec` is valid for setting `name`. `known` has the args' fields; None allows any."""
    if isinstance(spec, str):
        check_name(name, spec, MAX_KEY)
        fields = _FIELD.findall(spec)
        if re.search("[{}]", _FIELD.sub("", spec)) or "" in fields:
            raise BadRequest(name, f"must have fields as {{year}} and no other braces, not {spec!r}")
    else:
        fields = list(spec)
        if not fields or not all(isinstance(field, str) and field for field in fields):
            raise BadRequest(name, f"must have at least one field name, not {spec!r}")
    for field in fields:
        if known is not None and field not in known:
            raise BadRequest(name, f"has the unknown field {field!r}; fields of args: {', '.join(known)}")
