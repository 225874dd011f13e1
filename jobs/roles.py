"""Roles of callers: the rights of an API token."""

from __future__ import annotations

import enum


class Role(enum.IntEnum):
    """Rights of a token; each role includes the previous ones."""

    READ = 1
    OPERATE = 2
    ADMIN = 3
