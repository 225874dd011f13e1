"""Archives as sets of files: names and contents of their members (tar, also compressed by gzip or xz, and zip).

Nothing is written to disk. Links and devices in an archive are ignored. All functions block, so call them in threads.

A compressed tar archive is one stream. Listing its members unpacks all of it once, and reading a member unpacks
everything before it. So an open archive remembers its position: reading the members in the order of `list_members`
takes only one more pass. Only a member before the position, such as one that is read again after a failure, starts from
the beginning. (If the archive were opened for each member, n members would take n² / 2 steps.)

tarfile reads the description of a member into memory as a whole while it holds the GIL, and older versions of it take
quadratic time for digits there (CVE-2024-6232). So the size and the number of such headers are limited.
"""

from __future__ import annotations

import fnmatch
import os
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import IO, Any, Final, Self, cast

from dataloader.flows.etl.formats.content import bounded
from dataloader.flows.etl.formats.packed_format import DAMAGED, XZ, decompressor, members_of, text_or_name
from dataloader.flows.etl.sources.links import open_inside
from dataloader.flows.etl.sources.source import SourceError
from dataloader.jobs.logger import get_logger

log = get_logger(__name__)

MAX_HEADER: Final = 10_240
"""Maximum bytes of an extended header of a tar archive: two paths of Linux's maximum length, and some more."""
MAX_MEMBERS: Final = 100_000
"""Maximum members of an archive. An empty member has 512 bytes in a tar archive, which compression may reduce to
one."""
_ZIP: Final = b"PK"
_EXTENDED: Final = frozenset(
    {tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK}
)
# ValueError and RecursionError: tarfile raises them for numbers of many digits and for long chains of headers.
_BROKEN: Final = (*DAMAGED, tarfile.TarError, ValueError, RecursionError)
_FIXED: Final[Mapping[tuple[int, int], int]] = {(3, 11): 10, (3, 12): 6}
"""First release of a Python version whose tarfile reads headers in linear time. All later versions do."""


class _Header(tarfile.TarInfo):
    """Header of a member, refused before the data that it announces is read."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Read the block of a header. Raises `SourceError` if it announces too much, and for sparse files."""
        info = super().frombuf(buf, encoding, errors)
        if info.type in _EXTENDED and not 0 <= info.size <= MAX_HEADER:
            raise SourceError(
                f"the archive has an extended header of {info.size:,} bytes, more than the limit of {MAX_HEADER:,}",
                is_retryable=False,
            )
        if info.type == tarfile.GNUTYPE_SPARSE:
            raise _sparse()
        return info

    def _proc_gnusparse_10(self, *_args: Any) -> None:
        # tarfile calls this for a file whose map, of any length, is in its data. test_archives.py checks the method's
        # name.
        raise _sparse()


def _sparse() -> SourceError:
    return SourceError("the archive has a sparse file, which is not supported", is_retryable=False)


@cache
def warn_of_old_python(version: tuple[int, ...] = sys.version_info[:3]) -> None:
    """Warn once if this Python's tarfile can block the process for a while on a hostile header."""
    first = _FIXED.get((version[0], version[1]), 0)
    if version[2] < first:
        log.warning(
            "tarfile of this Python is slow with hostile headers (CVE-2024-6232); update Python",
            python=".".join(map(str, version)),
            fixed=f"{version[0]}.{version[1]}.{first}",
        )


def list_members(path: Path, pattern: str, max_bytes: int, folders: Sequence[Path] | None = None) -> list[str]:
    """Return the names of the files in an archive that match a pattern, in the best order for reading.

    Args:
        path: path of the archive.
        pattern: pattern with `*` and `?` for the whole path in the archive.
        max_bytes: maximum unpacked bytes of all members together.
        folders: the archive must be in one of these folders; None allows any place.

    Raises:
        SourceError: the archive cannot be read, is damaged, or unpacks to more; no member matches, or a name occurs
            twice.
    """
    with Archive(path, max_bytes=max_bytes, folders=folders) as archive:
        names = fnmatch.filter(archive.names(), pattern)
    if not names:
        raise SourceError(f"{path}: the archive has no file that matches {pattern}", is_retryable=False)
    if len(set(names)) < len(names):
        raise SourceError(f"{path}: the archive has two files with the same name", is_retryable=False)
    return names


class Archive:
    """Open archive, for use by one thread at a time."""

    def __init__(self, path: Path, *, max_bytes: int, folders: Sequence[Path] | None = None) -> None:
        """Open nothing until the first call. The archive must be in one of the `folders`, if given."""
        self._folders = folders
        self._path = path
        self._max_bytes = max_bytes
        self._files = ExitStack()
        self._zip: zipfile.ZipFile | None = None
        self._tar: tarfile.TarFile | None = None
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. The next call opens them again."""
        self._zip = self._tar = None
        self._files.close()

    def names(self) -> list[str]:
        """Return the names of all files, in the archive's order (of a zip archive sorted). Raises `SourceError`."""
        try:
            self._open()
            if self._zip is not None:
                return self._names_of_zip(self._zip)
            return [info.name for info in self._members()]
        except _BROKEN as error:
            raise self._damaged(error) from error

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Return the bytes of a member. Raises `SourceError` if it is missing or has more than `max_bytes`."""
        try:
            if self._zip is None and self._tar is None:
                self._open()
            return self._read_zip(name, max_bytes) if self._zip is not None else self._read_tar(name, max_bytes)
        except _BROKEN as error:
            self.close()
            raise self._damaged(error) from error

    def _names_of_zip(self, archive: zipfile.ZipFile) -> list[str]:
        names = members_of(archive, "*")
        if len(names) > MAX_MEMBERS:
            raise self._too_many()
        # Members may share their bytes. None unpacks to more than its announced size.
        if sum(archive.NameToInfo[name].file_size for name in names) > self._max_bytes:
            raise SourceError(
                f"{self._path}: unpacks to more than the limit of {self._max_bytes:,} bytes", is_retryable=False
            )
        return names

    def _members(self) -> Iterator[tarfile.TarInfo]:
        """Yield the files of the tar archive from the current position on."""
        archive = cast("tarfile.TarFile", self._tar)
        while (info := archive.next()) is not None:
            cast("Any", archive).members.clear()  # tarfile keeps all members otherwise
            self._count += 1
            if self._count > MAX_MEMBERS:
                raise self._too_many()
            if info.isreg():
                yield info

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
            for info in self._members():
                if info.name == name:
                    member = cast("tarfile.TarFile", self._tar).extractfile(info)
                    return self._whole(cast("IO[bytes]", member), name, max_bytes)
        raise self._missing(name)

    def _whole(self, member: IO[bytes], name: str, max_bytes: int) -> bytes:
        unpacked, _ = bounded(member, max_bytes, f"{self._path}: {name}")
        return unpacked.read()

    def _open(self) -> None:
        """Open the archive at its beginning."""
        self.close()
        self._count = 0
        stream = self._files.enter_context(open_inside(self._path, self._folders))
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
        self._tar = self._files.enter_context(
            tarfile.open(fileobj=bound, mode="r|", tarinfo=_Header)  # noqa: SIM115 - the stack closes it
        )

    def _check_end(self, stream: IO[bytes]) -> None:
        """Check for the zero blocks at a tar archive's end: tarfile accepts a truncated archive without them."""
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - tarfile.BLOCKSIZE))
        if size < tarfile.BLOCKSIZE or any(stream.read()):
            raise tarfile.ReadError("it is not an archive, or its end is missing")
        stream.seek(0)

    def _too_many(self) -> SourceError:
        return SourceError(
            f"{self._path}: the archive has more than the limit of {MAX_MEMBERS:,} members", is_retryable=False
        )

    def _missing(self, name: str) -> SourceError:
        return SourceError(f"{self._path}: {name} is no longer in the archive", is_retryable=False)

    def _damaged(self, error: Exception) -> SourceError:
        return SourceError(f"{self._path}: the archive cannot be read: {text_or_name(error)}", is_retryable=True)
