"""Style sheet, scripts and icon of the pages: read once, sent under a name that changes with them."""

from __future__ import annotations

import gzip
import hashlib
from http import HTTPStatus
from pathlib import Path
from typing import Final

import attrs

from dataloader.web.problems import ProblemError

_FOLDER: Final = Path(__file__).with_name("static")
_TYPES: Final = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
CACHED: Final = "public, max-age=31536000, immutable"
"""Cache-Control of a file. It never expires, since a changed file has another address."""


@attrs.frozen
class Asset:
    """File as it is sent."""

    data: bytes = attrs.field(repr=False)
    media_type: str
    zipped: bytes = attrs.field(repr=False)
    """The same by gzip. Only these files are compressed: they have neither secrets nor what a client has given."""


def _asset_of(path: Path) -> Asset:
    data = path.read_bytes()
    return Asset(data, _TYPES[path.suffix], gzip.compress(data, mtime=0))


ASSETS: Final = {path.name: _asset_of(path) for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES}
VERSION: Final = hashlib.sha256(b"".join(asset.data for asset in ASSETS.values())).hexdigest()[:12]
"""Version of all files together, since scripts import each other by relative addresses."""


def asset_path(name: str) -> str:
    """Return the path of a file."""
    if name not in ASSETS:
        raise KeyError(name)
    return f"/ui/static/{VERSION}/{name}"


def find_asset(version: str, name: str) -> tuple[Asset, bool]:
    """Return the file, and whether it may be cached: a page of another release asks by another version. Raises 404."""
    asset = ASSETS.get(name)
    if asset is None:
        raise ProblemError(HTTPStatus.NOT_FOUND, "There is no file with this name.")
    return asset, version == VERSION
