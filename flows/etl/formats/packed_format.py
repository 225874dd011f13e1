"""Formats around another format: zip archives, and bodies compressed by gzip or xz.

Bodies are unpacked in pieces and up to a limit, because a small body can unpack to gigabytes. archives.py reads
archives as sets of files, with one request for each member.
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
# Errors of the standard library for a truncated or damaged archive.
DAMAGED: Final = (EOFError, OSError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)


@attrs.frozen
class Zip:
    """Members of a zip archive, one after the other by name.

    Args:
        inner: format of the members.
        member: members to read, by a pattern with `*` and `?` for the whole path in the archive.
        max_bytes: maximum unpacked bytes of all members together.
    """

    inner: Format
    member: str = attrs.field(default="*", validator=option_checks.nonempty_text)
    max_bytes: int = attrs.field(default=GIB, validator=option_checks.whole_from(1))

    @property
    def reports_errors(self) -> bool:
        """Return the value of the inner format."""
        return self.inner.reports_errors

    @property
    def has_end(self) -> bool:
        """Return True: a truncated archive cannot be unpacked."""
        return True

    def parse(self, stream: IO[bytes], charset: str | None) -> Content:
        """Return the records of all members. Raises `SourceError` for a damaged archive, or if no member matches."""
        whole = Content()
        left = self.max_bytes
        try:
            # The directory is at the end, so a stream without seek (an archive in an archive) is read first.
            with zipfile.ZipFile(stream if stream.seekable() else io.BytesIO(stream.read())) as archive:
                names = members_of(archive, self.member)
                for name in names:
                    with archive.open(name) as member:
                        unpacked, counter = bounded(member, left, f"the archive, at {name},")
                        content = self.inner.parse(unpacked, charset).whole()
                        left = counter.left
                    _join_member(whole, content, name if len(names) > 1 else "")
        except DAMAGED as error:
            raise SourceError(f"the zip archive is damaged: {text_or_name(error)}", is_retryable=True) from error
        except NotImplementedError as error:
            raise SourceError(
                f"the zip archive cannot be unpacked: {text_or_name(error)}", is_retryable=False
            ) from error
        return whole


@attrs.frozen
class Compressed:
    """Body compressed by gzip or xz, recognized by its first bytes.

    Many servers declare a compressed file as a transfer encoding, so that it arrives unpacked. That is read as well.

    Args:
        inner: format of the unpacked body.
        max_bytes: maximum unpacked bytes.
    """

    inner: Format
    max_bytes: int = attrs.field(default=GIB, validator=option_checks.whole_from(1))

    @property
    def reports_errors(self) -> bool:
        """Return the value of the inner format."""
        return self.inner.reports_errors

    @property
    def has_end(self) -> bool:
        """Return True: a truncated body cannot be unpacked."""
        return True

    def for_unpacked(self, body: bytes) -> Format:
        """Return the format of a body that was unpacked in transfer: the inner one, unless it is still compressed."""
        return self.inner if decompressor(body[: len(XZ)]) is None else self

    def parse(self, stream: IO[bytes], charset: str | None) -> Content:
        """Return the records of the unpacked body. Raises `SourceError` if it is damaged, or neither gzip nor xz."""
        body = stream if stream.seekable() else io.BytesIO(stream.read())
        start = body.tell()
        opener = decompressor(body.read(len(XZ)))
        if opener is None:
            raise SourceError("the body is not compressed with gzip or xz", is_retryable=False)
        body.seek(start)
        try:
            with opener(body) as unpacking:
                unpacked, _ = bounded(unpacking, self.max_bytes, "the body")
                return self.inner.parse(unpacked, charset).whole()
        except DAMAGED as error:
            raise SourceError(f"the compressed body is damaged: {text_or_name(error)}", is_retryable=True) from error


def members_of(archive: zipfile.ZipFile, pattern: str) -> list[str]:
    """Return the files that match a pattern, sorted. Raises `SourceError` if there are none, or one is encrypted."""
    files = {info.filename: info for info in archive.infolist() if not info.is_dir()}
    chosen = sorted(fnmatch.filter(files, pattern))
    if not chosen:
        there = ", ".join(list(files)[:10]) or "nothing"
        raise SourceError(f"the archive has no file that matches {pattern}; its files: {there}", is_retryable=False)
    for name in chosen:
        if files[name].flag_bits & 1:
            raise SourceError(f"{name} in the archive is encrypted, which is not supported", is_retryable=False)
    return chosen


def decompressor(beginning: bytes) -> Callable[[IO[bytes]], IO[bytes]] | None:
    """Return a function that unpacks a stream with this beginning; None if it is neither gzip nor xz."""
    if beginning.startswith(GZIP):
        return lambda stream: cast("IO[bytes]", gzip.GzipFile(fileobj=stream))
    if beginning.startswith(XZ):
        return lambda stream: cast("IO[bytes]", lzma.LZMAFile(stream))
    return None


def text_or_name(error: Exception) -> str:
    """Return the text of an error, or its name if the text is empty."""
    return str(error) or type(error).__name__


def _join_member(whole: Content, part: Content, name: str) -> None:
    """Add a member's content. `name`, if there are several members, precedes the keys of broken parts."""
    whole.records += part.records
    whole.unsure += part.unsure
    for broken in part.broken:
        whole.add_broken(f"{name} {broken.key}".lstrip(), broken.error, broken.sample)
    whole.document = part.document
