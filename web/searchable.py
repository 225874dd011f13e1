"""Check of metadata that a reader searches for."""

from __future__ import annotations

from typing import TypeVar

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.secrets.masking import mask

T = TypeVar("T")


def searchable(metadata: T) -> T:
    """Return metadata that may be searched for. Masked values are refused, since a search would reveal them.

    Raises `BadRequest`.
    """
    if mask(metadata) != metadata:
        raise BadRequest("metadata", "contains a secret name or value, which cannot be searched for")
    return metadata
