"""Formats around another format: what is packed into a zip archive, or compressed by gzip or xz.

Unpacked piece by piece and within a limit: a small body can unpack to gigabytes. archives.py reads archives as sets of
files, with one request for each member.
"""

from __future__ import annotations

import fnmatch
import gzip
import io
import lzma
import zipfile
import zlib
from collections.abc import Callable
from typing import IO, Final, cast

import attrs

from dataloader.flows.etl.declare import option_checks
from dataloader.flows.etl.formats.content import GIB, Content, Format, bounded
from dataloader.flows.etl.sources.source import SourceError

GZIP: Final = b"\x1f\x8b"
XZ: Final = b"\xfd7zXZ\x00"
# What the standard library raises for an archive that is cut or changed.
DAMAGED: Final = (EOFError, OSError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)


@attrs.frozen
class Zip:
    """The members of a zip archive, one after the other by name.

    Args:
        inner: the format of the members.
        member: which of them, by a pattern with `*` and `?` for the whole path in the archive.
        max_bytes: how much they may unpack to, all together.
    """

    inner: Format
    member: str = attrs.field(default="*", validator=option_checks.text)
    max_bytes: int = attrs.field(default=GIB, validator=option_checks.whole(1))

    @property
    def reports_errors(self) -> bool:
        """As the inner format."""
        return self.inner.reports_errors

    @property
    def has_end(self) -> bool:
        """True: an archive that was cut off can't be unpacked."""
        return True

    def parse(self, stream: IO[bytes], charset: str | None) -> Content:
        """The records of all members. Raises `SourceError` for a damaged archive, or one without such a member."""
        whole = Content()
        left = self.max_bytes
        try:
            # The directory is at the end, so a stream that can't be moved in (an archive in an archive) is read first.
            with zipfile.ZipFile(stream if stream.seekable() else io.BytesIO(stream.read())) as archive:
                names = members_of(archive, self.member)
                for name in names:
                    with archive.open(name) as member:
                        unpacked, counter = bounded(member, left, f"the archive, at {name},")
                        content = self.inner.parse(unpacked, charset).whole()
                        left = counter.left
                    _join(whole, content, name if len(names) > 1 else "")
        except DAMAGED as error:
            raise SourceError(f"the zip archive is damaged: {words(error)}", is_retryable=True) from error
        except NotImplementedError as error:
            raise SourceError(f"the zip archive can't be unpacked: {words(error)}", is_retryable=False) from error
        return whole


@attrs.frozen
class Compressed:
    """A body compressed by gzip or xz, told apart by its first bytes.

    Many servers label a compressed file as compressed for the transport, so that it comes unpacked; that is read, too.

    Args:
        inner: the format of what is in it.
        max_bytes: how much it may unpack to.
    """

    inner: Format
    max_bytes: int = attrs.field(default=GIB, validator=option_checks.whole(1))

    @property
    def reports_errors(self) -> bool:
        """As the inner format."""
        return self.inner.reports_errors

    @property
    def has_end(self) -> bool:
        """True: a body that was cut off can't be unpacked."""
        return True

    def for_unpacked(self, body: bytes) -> Format:
        """The format of a body that was unpacked on its way: the inner one, unless it is still compressed."""
        return self.inner if decompressor(body[: len(XZ)]) is None else self

    def parse(self, stream: IO[bytes], charset: str | None) -> Content:
        """The records of what is in it. Raises `SourceError` for what is neither, or damaged."""
        body = stream if stream.seekable() else io.BytesIO(stream.read())
        start = body.tell()
        opener = decompressor(body.read(len(XZ)))
        if opener is None:
            raise SourceError("the body is compressed neither by gzip nor by xz", is_retryable=False)
        body.seek(start)
        try:
            with opener(body) as unpacking:
                unpacked, _ = bounded(unpacking, self.max_bytes, "the body")
                return self.inner.parse(unpacked, charset).whole()
        except DAMAGED as error:
            raise SourceError(f"the compressed body is damaged: {words(error)}", is_retryable=True) from error


def members_of(archive: zipfile.ZipFile, pattern: str) -> list[str]:
    """The files in it that a pattern takes, sorted. Raises `SourceError` if there are none, or one is encrypted."""
    files = {info.filename: info for info in archive.infolist() if not info.is_dir()}
    chosen = sorted(fnmatch.filter(files, pattern))
    if not chosen:
        there = ", ".join(list(files)[:10]) or "nothing"
        raise SourceError(f"the archive has no file that matches {pattern}; it has {there}", is_retryable=False)
    for name in chosen:
        if files[name].flag_bits & 1:
            raise SourceError(f"{name} in the archive is encrypted, which is not supported", is_retryable=False)
    return chosen


def decompressor(beginning: bytes) -> Callable[[IO[bytes]], IO[bytes]] | None:
    """What unpacks a stream that begins so; None if it is compressed by neither gzip nor xz."""
    if beginning.startswith(GZIP):
        return lambda stream: cast("IO[bytes]", gzip.GzipFile(fileobj=stream))
    if beginning.startswith(XZ):
        return lambda stream: cast("IO[bytes]", lzma.LZMAFile(stream))
    return None


def words(error: Exception) -> str:
    """What an error says, or its name if it says nothing."""
    return str(error) or type(error).__name__


def _join(whole: Content, part: Content, name: str) -> None:
    """Add what a member holds; `name` is said with what is broken, where there are several."""
    whole.records += part.records
    whole.unsure += part.unsure
    for broken in part.broken:
        whole.add_broken(f"{name} {broken.key}".lstrip(), broken.error, broken.sample)
    whole.document = part.document
