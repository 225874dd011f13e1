"""Roles of callers: what an API token allows."""

from __future__ import annotations

import enum


class Role(enum.IntEnum):
    """What a token allows; each role includes those before it."""

    READ = 1
    OPERATE = 2
    ADMIN = 3
