"""Archives and compressed bodies: unpacked within limits, and damage is never read as an end."""

from __future__ import annotations

import gzip
import io
import lzma
import random
import zipfile

import pytest

from dataloader.flows.etl.formats.csv_format import Csv
from dataloader.flows.etl.formats.json_format import Json
from dataloader.flows.etl.formats.packed_format import Compressed, Zip
from dataloader.flows.etl.sources.source import SourceError

pytestmark = pytest.mark.requirement("S7")

ROWS = b"a,b\n1,2\n3,4\n"
RECORDS = [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]


def zipped(**members: bytes) -> bytes:
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name.replace("_", "."), content)
    return body.getvalue()


def parse(format_, body: bytes):
    return format_.parse(io.BytesIO(body), None)


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_a_compressed_body_is_read_in_the_format_of_its_content(pack):
    assert parse(Compressed(Csv()), pack(ROWS)).records == RECORDS


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_a_compressed_body_that_was_cut_is_an_error_that_passes(pack):
    whole = pack(random.Random(1).randbytes(100_000))
    with pytest.raises(SourceError, match="the compressed body is damaged") as caught:
        parse(Compressed(Csv(columns=["a"], encoding="latin-1")), whole[:-50])
    assert caught.value.is_retryable


def test_a_body_that_is_not_compressed_is_an_error():
    with pytest.raises(SourceError, match="not compressed with gzip or xz"):
        parse(Compressed(Csv()), ROWS)


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_a_body_that_unpacks_without_end_is_refused_at_the_bound(pack):
    bomb = pack(b"a\n" + b"1\n" * 500_000)
    assert len(bomb) < 10_000
    with pytest.raises(SourceError, match="the body unpacks to more than the limit of 300,000 bytes") as caught:
        parse(Compressed(Csv(), max_bytes=300_000), bomb)
    assert not caught.value.is_retryable


def test_members_of_a_zip_archive_are_read_by_name_and_their_broken_rows_named():
    body = zipped(b_csv=b"a,b\n3,4\n5\n", a_csv=b"a,b\n1,2\n", readme_txt=b"hello")
    found = parse(Zip(Csv(), member="*.csv"), body)
    assert found.records == RECORDS
    assert [(one.key, one.error) for one in found.broken] == [("b.csv line 3", "1 cells, not 2")]


def test_the_bound_of_a_zip_archive_is_for_all_members_together():
    rows = b"a\n" + b"1\n" * 100_000
    assert len(parse(Zip(Csv(), max_bytes=len(rows) * 2), zipped(a_csv=rows, b_csv=rows)).records) == 200_000
    with pytest.raises(SourceError, match=r"the archive, at b\.csv, unpacks to more than"):
        parse(Zip(Csv(), max_bytes=len(rows) * 2 - 1), zipped(a_csv=rows, b_csv=rows))


def test_an_archive_without_the_member_lists_its_members():
    with pytest.raises(SourceError, match=r"the archive has no file that matches \*\.csv; its files: readme") as caught:
        parse(Zip(Csv(), member="*.csv"), zipped(readme_txt=b"hello"))
    assert not caught.value.is_retryable


def test_a_damaged_zip_archive_is_an_error_that_passes():
    whole = zipped(a_csv=ROWS)
    for body in (whole[:-10], b"no archive", whole.replace(whole[40:44], b"\0\0\0\0", 1)):
        with pytest.raises(SourceError, match="the zip archive is damaged") as caught:
            parse(Zip(Csv()), body)
        assert caught.value.is_retryable


def test_an_encrypted_member_is_refused():
    body = bytearray(zipped(a_csv=ROWS))
    body[6] |= 1
    body[body.index(b"PK\x01\x02") + 8] |= 1
    with pytest.raises(SourceError, match=r"a\.csv in the archive is encrypted"):
        parse(Zip(Csv()), bytes(body))


def test_formats_can_be_packed_into_each_other():
    assert parse(Compressed(Zip(Compressed(Csv()))), gzip.compress(zipped(a_gz=gzip.compress(ROWS)))).records == RECORDS


def test_a_packed_document_still_finds_its_next_page_and_its_errors():
    format_ = Compressed(Json("items", errors=lambda document: document.get("error")))
    assert format_.reports_errors
    assert parse(format_, gzip.compress(b'{"items": [], "next": "x"}')).document["next"] == "x"
    with pytest.raises(SourceError, match="the answer reports an error: quota"):
        parse(format_, gzip.compress(b'{"items": [], "error": "quota"}'))


def test_a_bound_below_one_is_refused():
    with pytest.raises(ValueError, match="max_bytes: must be an integer of at least 1, not 0"):
        Compressed(Csv(), max_bytes=0)
