"""Hostile archives: descriptions of members are bounded before they are read, and so are number and length."""

from __future__ import annotations

import gzip
import io
import resource
import tarfile
import time
import zipfile
from contextlib import suppress

import pytest
from logged import capture_logs

from dataloader.flows.etl.sources.archives import MAX_HEADER, MAX_MEMBERS, Archive, list_members, warn_of_old_python
from dataloader.flows.etl.sources.source import SourceError

pytestmark = pytest.mark.requirement("S7")

GIB = 1 << 30
END = bytes(10_240)


def entry(kind, data=b"", *, name="x", size=None, **more):
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(data) if size is None else size
    for field, value in more.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


def packed(path, *parts):
    with gzip.open(path, "wb", compresslevel=1) as file:
        for part in parts:
            file.write(part)
    return path


def names(path):
    with Archive(path, max_bytes=GIB) as archive:
        return archive.names()


@pytest.mark.parametrize(
    "kind",
    [
        tarfile.XHDTYPE,
        tarfile.XGLTYPE,
        tarfile.SOLARIS_XHDTYPE,
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_LONGLINK,
    ],
)
def test_an_extended_header_over_the_limit_is_refused_before_it_is_read(tmp_path, kind):
    # All of it is announced, but missing: a reader encounters the end first.
    path = packed(tmp_path / "a.tar.gz", entry(kind, size=900 << 20))
    with pytest.raises(
        SourceError, match=r"extended header of 943,718,400 bytes, more than the limit of 10,240"
    ) as caught:
        names(path)
    assert not caught.value.is_retryable


def test_digits_in_a_pax_header_take_no_time(tmp_path):
    for digits in (60_000, MAX_HEADER):  # with 60,000 an old tarfile takes ten seconds
        data = b"9" * digits
        path = packed(tmp_path / "a.tar.gz", entry(tarfile.XHDTYPE, data), entry(tarfile.REGTYPE, b"1"), END)
        began = time.process_time()
        with suppress(SourceError):  # some versions read such a header as an empty one
            names(path)
        assert time.process_time() - began < 3


def test_paths_of_the_longest_length_are_read(tmp_path):
    name = "/".join(["d" * 200] * 20)
    for format_ in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        path = tmp_path / f"{format_}.tar"
        with tarfile.open(path, "w", format=format_) as archive:
            link = tarfile.TarInfo(name + "l")
            link.type, link.linkname = tarfile.SYMTYPE, name
            archive.addfile(link)
            info = tarfile.TarInfo(name)
            info.size = 1
            archive.addfile(info, io.BytesIO(b"1"))
        assert names(path) == [name]


@pytest.mark.parametrize(
    "parts",
    [
        [entry(tarfile.XHDTYPE, b"30 hdrcharset=BINARY\n")] * 3_000,
        [entry(tarfile.XHDTYPE, b"9" * 5_000 + b" path=x\n"), entry(tarfile.REGTYPE, b"1")],
        [entry(tarfile.REGTYPE, size=-1024)],
    ],
    ids=["a chain of headers", "a number of 5,000 digits", "a negative size"],
)
def test_what_tarfile_itself_fails_at_is_an_error_of_the_archive(tmp_path, parts):
    with pytest.raises(SourceError, match="the archive cannot be read"):
        names(packed(tmp_path / "a.tar.gz", *parts, END))


def test_sparse_files_are_refused_in_each_form(tmp_path):
    def record(key, value):
        text = f" {key}={value}\n"
        length = len(text) + 2
        return f"{length}{text}".encode()

    major, minor = record("GNU.sparse.major", "1"), record("GNU.sparse.minor", "0")
    pax = [entry(tarfile.XHDTYPE, major + minor), entry(tarfile.REGTYPE, b"1\n0\n1\n".ljust(512, b"\0") + b"x")]
    for parts in ([entry(tarfile.GNUTYPE_SPARSE)], pax):
        with pytest.raises(SourceError, match="sparse file, which is not supported"):
            names(packed(tmp_path / "a.tar.gz", *parts, END))


@pytest.mark.slow
def test_an_archive_with_too_many_members_is_refused_and_takes_little_memory(tmp_path):
    one = entry(tarfile.DIRTYPE)
    path = packed(tmp_path / "a.tar.gz", one * (MAX_MEMBERS + 1), END)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(SourceError, match="more than the limit of 100,000 members"):
        names(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
    assert names(packed(tmp_path / "b.tar.gz", one * MAX_MEMBERS, END)) == []


def test_a_zip_archive_whose_members_unpack_to_more_together_is_refused(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in "abc":
            archive.writestr(name, b"0" * 1_000_000)
    assert list_members(path, "*", 3_000_000) == ["a", "b", "c"]
    with pytest.raises(SourceError, match="unpacks to more than the limit of 2,999,999 bytes"):
        list_members(path, "*", 2_999_999)


def test_an_old_python_is_warned_of_once():
    for version, warned in (((3, 11, 10), 0), ((3, 13, 0), 0), ((3, 11, 1), 1), ((3, 11, 1), 0), ((3, 12, 5), 1)):
        with capture_logs() as lines:
            warn_of_old_python(version)
        assert len(lines) == warned
