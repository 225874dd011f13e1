"""Archives as sets of files: their members' names, and each member's bytes (tar, plain or by gzip or xz, and zip).

Nothing is written to disk; links and devices in an archive are ignored. All functions block: they are for threads.

A compressed tar archive is one stream. To know its members is to unpack all of it once, and a member can be had only by
unpacking all that is before it. So an open archive remembers where it stands: members that are asked for in the order
of the archive, as `list_members` gives them, cost one more pass in all. Only one that lies behind, such as one that is
asked for again after a failure, starts from the beginning. (Opened anew for each, n members would cost n² / 2.)
"""

from __future__ import annotations

import fnmatch
import os
import tarfile
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Final, Self, cast

from dataloader.flows.etl.formats.content import bounded
from dataloader.flows.etl.formats.packed_format import DAMAGED, XZ, decompressor, members_of, words
from dataloader.flows.etl.sources.source import SourceError

_ZIP: Final = b"PK"
_BROKEN: Final = (*DAMAGED, tarfile.TarError)


def list_members(path: Path, pattern: str, max_bytes: int) -> list[str]:
    """The names of the files in an archive that a pattern takes, in the order in which they are read best.

    Args:
        path: the archive.
        pattern: with `*` and `?`, for the whole path in the archive.
        max_bytes: how much all members may unpack to.

    Raises:
        SourceError: the archive can't be read, is damaged, or unpacks to more; it has no such member, or one twice.
    """
    with Archive(path, max_bytes=max_bytes) as archive:
        names = fnmatch.filter(archive.names(), pattern)
    if not names:
        raise SourceError(f"{path}: the archive has no file that matches {pattern}", is_retryable=False)
    if len(set(names)) < len(names):
        raise SourceError(f"{path}: the archive has a file of the same name twice", is_retryable=False)
    return names


class Archive:
    """An open archive. One thread at a time uses it."""

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        """Nothing is opened before the first call."""
        self._path = path
        self._max_bytes = max_bytes
        self._files = ExitStack()
        self._zip: zipfile.ZipFile | None = None
        self._tar: tarfile.TarFile | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close what is open; the next call opens it again."""
        self._zip = self._tar = None
        self._files.close()

    def names(self) -> list[str]:
        """All files in it, in its order (a zip archive's by name). Raises `SourceError`."""
        try:
            self._open()
            if self._zip is not None:
                return members_of(self._zip, "*")
            return [info.name for info in cast("tarfile.TarFile", self._tar) if info.isreg()]
        except _BROKEN as error:
            raise self._damaged(error) from error

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """The bytes of a member. Raises `SourceError` if there is none, or it has more than `max_bytes`."""
        try:
            if self._zip is None and self._tar is None:
                self._open()
            return self._read_zip(name, max_bytes) if self._zip is not None else self._read_tar(name, max_bytes)
        except _BROKEN as error:
            self.close()
            raise self._damaged(error) from error

    def _read_zip(self, name: str, max_bytes: int) -> bytes:
        archive = cast("zipfile.ZipFile", self._zip)
        if name not in archive.NameToInfo:
            raise self._missing(name)
        with archive.open(name) as member:
            return self._whole(member, name, max_bytes)

    def _read_tar(self, name: str, max_bytes: int) -> bytes:
        for is_second_try in (False, True):
            if is_second_try:
                self._open()
            for info in iter(cast("tarfile.TarFile", self._tar).next, None):
                if info.name == name and info.isreg():
                    member = cast("tarfile.TarFile", self._tar).extractfile(info)
                    return self._whole(cast("IO[bytes]", member), name, max_bytes)
        raise self._missing(name)

    def _whole(self, member: IO[bytes], name: str, max_bytes: int) -> bytes:
        unpacked, _ = bounded(member, max_bytes, f"{self._path}: {name}")
        return unpacked.read()

    def _open(self) -> None:
        """Open it, at its beginning."""
        self.close()
        stream = self._files.enter_context(self._path.open("rb"))
        beginning = stream.read(len(XZ))
        stream.seek(0)
        if beginning.startswith(_ZIP):
            self._zip = self._files.enter_context(zipfile.ZipFile(stream))
            return
        opener = decompressor(beginning)
        unpacking: IO[bytes] = stream if opener is None else self._files.enter_context(opener(stream))
        if opener is None:
            self._check_end(stream)
        bound, _ = bounded(unpacking, self._max_bytes, f"{self._path}:")
        self._tar = self._files.enter_context(tarfile.open(fileobj=bound, mode="r|"))  # noqa: SIM115 - the stack closes it

    def _check_end(self, stream: IO[bytes]) -> None:
        """Check for the zero blocks at a tar archive's end: tarfile alone takes an archive without them as complete."""
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - tarfile.BLOCKSIZE))
        if size < tarfile.BLOCKSIZE or any(stream.read()):
            raise tarfile.ReadError("it is no archive, or its end is missing")
        stream.seek(0)

    def _missing(self, name: str) -> SourceError:
        return SourceError(f"{self._path}: there is no {name} in the archive any more", is_retryable=False)

    def _damaged(self, error: Exception) -> SourceError:
        return SourceError(f"{self._path}: the archive can't be read: {words(error)}", is_retryable=True)
