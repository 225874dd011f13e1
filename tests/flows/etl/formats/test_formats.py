"""Reading of bodies as records: nothing is lost or guessed, and errors name what is broken."""

from __future__ import annotations

import io
import time
import tracemalloc
import zipfile
from decimal import Decimal

import pytest

from dataloader.flows.etl.formats.content import MAX_BROKEN
from dataloader.flows.etl.formats.csv_format import Csv
from dataloader.flows.etl.formats.json_format import Json, JsonLines
from dataloader.flows.etl.formats.json_items import items_at
from dataloader.flows.etl.formats.packed_format import Zip
from dataloader.flows.etl.sources.source import SourceError

pytestmark = pytest.mark.requirement("S7")


def parse(format_, body: bytes, charset: str | None = None):
    return format_.parse(io.BytesIO(body), charset).whole()


def test_the_list_of_a_document_is_found_by_its_path():
    body = b'{"data": {"items": [{"id": 1}, {"id": 2}], "total": 2}}'
    found = parse(Json("data.items"), body)
    assert found.records == [{"id": 1}, {"id": 2}]
    assert found.document["data"]["total"] == 2


@pytest.mark.parametrize(
    ("body", "records"),
    [
        (b'[{"id": 1}]', [{"id": 1}]),
        (b'{"id": 1}', [{"id": 1}]),
        (b"[]", []),
        (b"null", []),
        (b'\xef\xbb\xbf[{"id": 1}]', [{"id": 1}]),
    ],
)
def test_without_a_path_the_document_is_the_list_or_one_record(body, records):
    assert parse(Json(), body).records == records


def test_numbers_keep_every_digit():
    body = b'[{"a": 0.1, "b": 12345678901234567890.123456789, "c": 1e400, "d": 123456789012345678901234567890, "e": 7}]'
    [record] = parse(Json(), body).records
    assert record["a"] == Decimal("0.1")
    assert record["b"] == Decimal("12345678901234567890.123456789")
    assert record["c"] == Decimal("1e400")
    assert record["d"] == 123456789012345678901234567890
    assert type(record["e"]) is int


@pytest.mark.parametrize(
    ("body", "is_read"),
    [
        (b'[{"a": NaN, "b": "' + b"x" * 2**20 + b'"}, {}]', True),
        (b'[{"a": NaN, "b": "' + b'\\"' * 20_000, False),
    ],
    ids=["long", "endless"],
)
def test_json_search_in_a_long_text_is_linear_in_time_and_memory(body, is_read):
    began = time.thread_time()
    tracemalloc.start()
    try:
        assert (items_at(body, ()) is not None) == is_read
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # A search that restarts at each character keeps a hundred bytes for each; one from each quote takes many seconds.
    assert peak < 3 * len(body)
    assert time.thread_time() - began < 2


def test_a_missing_path_is_an_error_with_the_existing_names():
    with pytest.raises(SourceError, match=r"path: there is no data\.items in an object with data, total") as caught:
        parse(Json("data.items"), b'{"data": {"rows": []}, "total": 0}')
    assert not caught.value.is_retryable


def test_a_path_to_something_else_is_an_error():
    with pytest.raises(SourceError, match="path: data is a string, not a list or an object"):
        parse(Json("data"), b'{"data": "none"}')


def test_null_at_a_path_is_no_record():
    assert parse(Json("data"), b'{"data": null}').records == []


def test_a_part_of_a_list_that_is_no_object_is_broken_and_the_rest_goes_on():
    found = parse(Json(), b'[{"id": 1}, 5, "x", {"id": 2}]')
    assert found.records == [{"id": 1}, {"id": 2}]
    assert [(one.key, one.error, one.sample) for one in found.broken] == [
        ("item 2", "a number, not an object", "5"),
        ("item 3", "a string, not an object", '"x"'),
    ]


UNREADABLE = (
    b'{"id": "\\ud800"}',
    b'{"id": "\xff"}',
    b'{"id": NaN}',
    b'{"id": 1,}',
    b'{"\xff": 1}',
    b'{"id": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
    b'{"id": ' + b"1" * 5_000 + b"}",
    b'{"id": -1e' + b"9" * 30 + b"}",
)


@pytest.mark.requirement("E10")
@pytest.mark.parametrize("item", UNREADABLE, ids=range(len(UNREADABLE)))
@pytest.mark.parametrize("around", [b"[%b]", b'{"data": {"sum": [1, "]"], "items": [%b], "next": "}"}}'])
def test_an_item_that_is_no_json_is_broken_and_the_others_of_its_list_are_read(item, around):
    good = [b'{"id": 1, "a": "[\\"{,"}', b' {"id": 2, "b": [{}, []]}']
    found = parse(Json("data.items" if b"data" in around else ""), around % b",".join([good[0], item, good[1]]))
    assert found.records == [{"id": 1, "a": '["{,'}, {"id": 2, "b": [{}, []]}]
    [broken] = found.broken
    assert broken.key == "item 2"
    if b"data" in around:
        assert found.document["data"]["next"] == "}"


@pytest.mark.requirement("E10")
@pytest.mark.parametrize(
    "cut",
    [
        b'[{"id": NaN}, {"id": 1}',
        b'[{"id": NaN}, {"id": 1}}',
        b'[{"id": NaN}, {"id": "1]',
        b"[NaN] x",
        b'[{"a": NaN} {}]',
    ],
)
def test_a_list_that_is_cut_or_does_not_fit_together_is_not_read_item_by_item(cut):
    with pytest.raises(SourceError, match="this is not JSON") as caught:
        parse(Json(), cut)
    assert caught.value.is_retryable


@pytest.mark.parametrize("body", [b"<html>busy</html>", b"", b'[{"id": 1}', b"[" * 100_000, b'"\xff"'], ids=range(5))
def test_an_answer_that_is_not_json_is_a_retryable_error(body):
    with pytest.raises(SourceError, match="this is not JSON") as caught:
        parse(Json(), body)
    assert caught.value.is_retryable


def test_a_document_can_say_that_the_request_failed():
    format_ = Json("data", errors=lambda document: document["message"] if document["code"] else None)
    assert format_.reports_errors
    assert parse(format_, b'{"code": 0, "message": "", "data": [{}]}').records == [{}]
    with pytest.raises(SourceError, match=r"the answer reports an error: token=\*\*\* ended") as caught:
        parse(format_, b'{"code": 1001, "message": "token=abcdef ended", "data": null}')
    assert caught.value.is_retryable


def test_a_document_in_another_encoding_is_read_in_it():
    body = '[{"name": "Рубль"}]'.encode("windows-1251")
    assert parse(Json(), body, "windows-1251").records == [{"name": "Рубль"}]


@pytest.mark.parametrize("path", ["data..items", ".", "data.", None, 5])
def test_a_path_that_is_none_is_refused_when_it_is_declared(path):
    with pytest.raises(ValueError, match=r"path: must be names separated by dots, "):
        Json(path)


def test_each_line_is_a_record_and_a_broken_one_is_named():
    found = parse(JsonLines(), b'{"id": 1}\n\n{"id": 2\r\n[3]\n{"id": 0.5}')
    assert found.records == [{"id": 1}, {"id": Decimal("0.5")}]
    assert [one.key for one in found.broken] == ["line 3", "line 4"]
    assert found.broken[0].sample == '{"id": 2'


def test_a_header_line_names_the_columns():
    found = parse(Csv(), b'\xef\xbb\xbfname,count\r\n"Smith, J.",2\r\n"two\nlines",\r\n')
    assert found.records == [{"name": "Smith, J.", "count": "2"}, {"name": "two\nlines", "count": ""}]
    assert found.broken == []


def test_without_a_header_line_the_columns_are_declared():
    found = parse(Csv(columns=["name", "sex", "count"]), b"Isabella,F,22934\nSophia,F,20648\n")
    assert found.records[0] == {"name": "Isabella", "sex": "F", "count": "22934"}
    assert len(found.records) == 2


def test_rows_with_more_or_fewer_cells_are_broken_and_named_by_their_line():
    found = parse(Csv(), b"a,b,c\n1,2,3\n1,2\n\n1,2,3,4\n4,5,6\n")
    assert found.records == [{"a": "1", "b": "2", "c": "3"}, {"a": "4", "b": "5", "c": "6"}]
    assert [(one.key, one.error, one.sample) for one in found.broken] == [
        ("line 3", "2 cells, not 3", "1,2"),
        ("line 5", "4 cells, not 3", "1,2,3,4"),
    ]


def test_a_row_with_bytes_that_are_no_text_is_broken_and_the_rest_goes_on():
    found = parse(Csv(), b"a,b\n1,\xff\xfe\n2,\xc3\xa9\n")
    assert found.records == [{"a": "2", "b": "é"}]
    assert [(one.key, one.error) for one in found.broken] == [
        ("line 2", "bytes that are invalid in the file's encoding")
    ]
    assert found.broken[0].sample == "1,��"


def test_blank_lines_before_the_first_row_count_for_nothing_however_many_they_are():
    lines = 200_000
    tracemalloc.start()
    try:
        found = parse(Csv(columns=["a"]), b"\n" * lines + b"1\n2,3\n")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.records == [{"a": "1"}]
    assert [one.key for one in found.broken] == [f"line {lines + 2}"]
    assert peak < 10 * lines  # a list of them has eight bytes for each, and each line has fifty
    with pytest.raises(SourceError, match=r"an HTML page, beginning with .*<html>"):
        parse(Csv(columns=["a"]), b"\n \n<html>\n")


def test_a_quote_in_the_wrong_place_breaks_its_row_only():
    found = parse(Csv(), b'a,b\n1,"x"y\n2,z\n')
    assert found.records == [{"a": "2", "b": "z"}]
    assert found.broken[0].key == "line 2"


def test_a_quote_that_is_never_closed_is_named_not_lost():
    found = parse(Csv(), b'a,b\n1,x\n2,"never\n3,y\n\n4,z\n')
    assert found.records == [{"a": "1", "b": "x"}]
    assert [(one.key, one.sample) for one in found.broken] == [
        ("line 3", '2,"never'),
        ("line 4", "3,y"),
        ("line 6", "4,z"),
    ]


@pytest.mark.parametrize("end", ['4,"z, z"\n', '4",,\n', '4\xff",,\n'], ids=["no-comma", "too-many-cells", "undecoded"])
def test_each_line_that_a_wrong_quote_joins_to_its_row_is_a_broken_record(end):
    found = parse(Csv(), b'a,b\n1,x\n"2,never\n3,y\n' + end.encode("latin-1") + b"5,w\n")
    assert found.records == [{"a": "1", "b": "x"}, {"a": "5", "b": "w"}]
    assert [one.key for one in found.broken] == ["line 3", "line 4", "line 5"]


def test_a_column_without_a_name_is_left_out_and_must_be_empty():
    found = parse(Csv(), b"Date,USD,\n2020-01-02,1.1,\n2020-01-03,1.2,surprise\n")
    assert found.records == [{"Date": "2020-01-02", "USD": "1.1"}]
    assert [(one.key, one.error) for one in found.broken] == [("line 3", "a cell in a column without a name")]


def test_a_header_that_names_a_column_twice_is_an_error():
    with pytest.raises(SourceError, match="the header line names 'a' more than once"):
        parse(Csv(), b"a,b,a\n1,2,3\n")


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("id;größe\n1;10\n".encode("cp1252"), "the header line is not utf-8: id, gr��e; set Csv"),
        ('id;"größe\nin cm"\n1;10\n'.encode("cp1252"), "the header line is not utf-8: id, gr��e\nin cm; set Csv"),
        ("id;n\n1;10\n".encode("utf-16-le"), r"the header line has NUL characters: 'i\\x00d\\x00, "),
    ],
)
def test_a_header_line_that_cannot_be_decoded_is_an_error(body, error):
    with pytest.raises(SourceError, match=error) as caught:
        parse(Csv(delimiter=";"), body)
    assert caught.value.is_retryable


def test_a_zip_member_whose_header_line_cannot_be_decoded_is_an_error():
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a.csv", "id,größe\n1,10\n".encode("cp1252"))
    with pytest.raises(SourceError, match="the header line is not utf-8"):
        parse(Zip(Csv()), packed.getvalue())


def test_a_byte_order_mark_is_no_part_of_the_first_column_in_any_encoding():
    for encoding in ("utf-16-le", "utf-16-be", "utf-32-le", "gb18030"):
        assert parse(Csv(encoding=encoding), "\ufeffid,n\n1,2\n".encode(encoding)).records == [{"id": "1", "n": "2"}]


@pytest.mark.parametrize("encoding", ["cp1252", "iso-8859-1", "windows-1251"])
def test_a_byte_order_mark_of_utf_8_refuses_another_encoding(encoding):
    with pytest.raises(SourceError, match="begins with the byte order mark of UTF-8, but its declared encoding is"):
        parse(Csv(), b"\xef\xbb\xbfid,n\n1,2\n", encoding)


def test_a_file_without_even_a_header_line_is_an_error_that_passes():
    with pytest.raises(SourceError, match="there is no header line") as caught:
        parse(Csv(), b"")
    assert caught.value.is_retryable


def test_the_format_s_encoding_goes_before_the_source_s():
    body = "имя;n\nЖюль;1\n".encode("windows-1251")
    assert parse(Csv(delimiter=";", encoding="cp1251"), body, "utf-8").records == [{"имя": "Жюль", "n": "1"}]
    assert parse(Csv(delimiter=";"), body, "windows-1251").records == [{"имя": "Жюль", "n": "1"}]


def test_a_body_that_is_nearly_all_broken_is_an_error_and_no_list_of_millions():
    refusal = r"more than 10,000 parts are broken, the last one at line 10002: .* check the format"
    with pytest.raises(SourceError, match=refusal):
        parse(Csv(), b"a,b\n" + b"1;2\n" * (MAX_BROKEN + 100))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"delimiter": ""}, "delimiter: must be one character, except a line break, not ''"),
        ({"delimiter": ",,"}, "delimiter: must be one character, except a line break, not ',,'"),
        ({"encoding": "klingon"}, "encoding: must be the name of a character encoding, .*, not 'klingon'"),
        ({"encoding": "zip"}, "encoding: must be .*, not 'zip'"),
        ({"columns": []}, "columns: must be a list of unique names, or None "),
        ({"columns": ["a", "a"]}, "columns: must be a list of unique names, or None "),
        ({"columns": "abc"}, "columns: must be .*, not 'abc'"),
    ],
)
def test_invalid_csv_options_are_refused_at_the_declaration(options, error):
    with pytest.raises(ValueError, match=error):
        Csv(**options)


def test_a_sample_of_a_broken_record_shows_no_secret():
    [one] = parse(Csv(), b"a,b\n1,2,password=hunter2\n").broken
    assert one.sample == "1,2,password=***"
