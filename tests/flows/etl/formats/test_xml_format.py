"""XML: elements become flat records, in every encoding, and dangerous XML is refused."""

from __future__ import annotations

import io

import pytest

from dataloader.flows.etl.formats.xml_format import MAX_DEPTH, MAX_GROWTH, MAX_RECORD, Xml
from dataloader.flows.etl.sources.source import SourceError

pytestmark = pytest.mark.requirement("S7")

RATES = """<?xml version="1.0" encoding="windows-1251"?><ValCurs Date="25.04.2020" name="Market">
<Valute ID="R01235"><NumCode>840</NumCode><Name>Доллар США</Name><Value>74,7163</Value></Valute>
<Valute ID="R01375"><NumCode>156</NumCode><Name>Китайский юань &amp; другие</Name><Value/></Valute></ValCurs>"""


def parse(format_, body: bytes, charset: str | None = None):
    return format_.parse(io.BytesIO(body), charset).records


def test_attributes_and_texts_of_an_element_are_one_record():
    assert parse(Xml("Valute"), RATES.encode("windows-1251")) == [
        {"ID": "R01235", "NumCode": "840", "Name": "Доллар США", "Value": "74,7163"},
        {"ID": "R01375", "NumCode": "156", "Name": "Китайский юань & другие", "Value": ""},
    ]


def test_an_element_that_is_nil_has_no_value():
    body = b"""<r xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" xmlns:o="urn:o">
    <i><a xsi:nil="true"/><b xsi:nil="1"></b><c xsi:nil="false"/><d o:nil="true"/><e nil="true"/><f/></i>
    <i><a/><a xsi:nil="true"/><b xsi:nil="true">x</b></i></r>"""
    one, two = parse(Xml("i"), body)
    assert {name: one[name] for name in "abcdef"} == {"a": None, "b": None, "c": "", "d": "", "e": "", "f": ""}
    assert (two["a"], two["b"]) == (["", None], "x")


def test_a_record_inherits_the_attributes_it_is_to_have():
    records = parse(Xml("Valute", inherit=["Date"]), RATES.encode("windows-1251"))
    assert [record["Date"] for record in records] == ["25.04.2020", "25.04.2020"]
    with pytest.raises(SourceError, match="inherit: no parent of Valute has an attribute Day"):
        parse(Xml("Valute", inherit=["Day"]), RATES.encode("windows-1251"))


def test_the_encoding_of_a_format_precedes_that_of_the_document_and_the_source():
    body = RATES.encode("windows-1251")
    assert parse(Xml("Valute"), body, "utf-8")[0]["Name"] == "Доллар США"
    lying = RATES.replace("windows-1251", "utf-8").encode("windows-1251")
    assert parse(Xml("Valute", encoding="windows-1251"), lying)[0]["Name"] == "Доллар США"
    silent = RATES.partition("?>")[2].encode("koi8-r")
    assert parse(Xml("Valute"), silent, "koi8-r")[0]["Name"] == "Доллар США"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "gb18030"])
def test_encodings_that_the_parser_does_not_know_are_read(encoding):
    body = RATES.replace("windows-1251", encoding.removesuffix("-sig")).encode(encoding)
    assert parse(Xml("Valute"), body)[0]["Name"] == "Доллар США"


def test_nested_elements_have_dotted_names_and_repeated_ones_are_lists():
    body = b"""<r xmlns="urn:x"><item n="1"><owner id="7"><name> A </name></owner><tag>x</tag><tag>y</tag><tag>z</tag>
    <empty/><item>inner</item></item><item>only text</item></r>"""
    assert parse(Xml("item"), body) == [
        {"n": "1", "owner.id": "7", "owner.name": "A", "tag": ["x", "y", "z"], "empty": "", "item": "inner"},
        {"text": "only text"},
    ]


def test_an_item_can_be_named_by_the_end_of_its_path():
    body = b"""<Envelope><Cube><Cube time="2026-04-13"><Cube currency="USD" rate="1.1"/>
    <Cube currency="JPY" rate="160"/></Cube></Cube></Envelope>"""
    assert parse(Xml("Cube/Cube/Cube", inherit=["time"]), body) == [
        {"time": "2026-04-13", "currency": "USD", "rate": "1.1"},
        {"time": "2026-04-13", "currency": "JPY", "rate": "160"},
    ]


LAUGHS = b"""<?xml version="1.0"?><!DOCTYPE l [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>
<l><item>&b;</item></l>"""
FILE = b"""<!DOCTYPE l [<!ENTITY f SYSTEM "file:///etc/passwd">]><l><item>&f;</item></l>"""
PARAMETER = b"""<!DOCTYPE l [<!ENTITY % p "x">]><l><item>1</item></l>"""
DEFAULTS = b"""<!DOCTYPE l [<!ATTLIST item a CDATA "default">]><l><item/></l>"""
NOTHING = b"""<!DOCTYPE l [ ]><l><item/></l>"""
OUTSIDE = b"""<!DOCTYPE l SYSTEM "http://127.0.0.1:9/l.dtd"><l><item>&unknown;</item></l>"""


@pytest.mark.parametrize("body", [LAUGHS, FILE, PARAMETER, DEFAULTS, NOTHING, OUTSIDE])
def test_a_document_with_declarations_or_entities_of_its_own_is_refused(body):
    with pytest.raises(SourceError, match=r"(declarations|entities), which are not allowed") as caught:
        parse(Xml("item"), body)
    assert not caught.value.is_retryable


def test_a_document_type_that_declares_nothing_is_allowed():
    body = b"""<!DOCTYPE l SYSTEM "http://127.0.0.1:9/l.dtd"><l><item>1</item></l>"""
    assert parse(Xml("item"), body) == [{"text": "1"}]


ATTRIBUTE = b'<r a="' + b"x" * 100_000 + b'">' + b"<i/>" * 1_000 + b"</r>"
NAMES = b"<r><i>" + b"<n9>" * 90 + b"".join(b"<a%d/>" % n for n in range(60_000)) + b"</n9>" * 90 + b"</i></r>"
LONG = b"<r><i><" + b"n" * 1_001 + b"/></i></r>"
DEEP = b"<r><i>" + b"<" + b"n" * 300 + b"><" + b"n" * 300 + b"><" + b"n" * 300 + b"><" + b"n" * 300 + b"/>"
NAMESPACE = b'<r xmlns="urn:' + b"x" * 1_000 + b'">' + b"<i/>" * 1_000 + b"</r>"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (ATTRIBUTE, f"more than {MAX_GROWTH} times the characters of the document"),
        (NAMES, f"more than {MAX_GROWTH} times the characters of the document"),
        (LONG, "a name has more than the limit of 1,000 characters: 'nnn"),
        (DEEP, "a name has more than the limit of 1,000 characters: 'nnn"),
        (NAMESPACE, "a name has more than the limit of 1,000 characters: 'urn:xxx"),
    ],
    ids=["inherited", "dotted names", "long name", "long dotted name", "namespace"],
)
def test_records_that_are_much_longer_than_their_document_are_refused(body, said):
    with pytest.raises(SourceError, match=said) as caught:
        parse(Xml("i", inherit=["a"] if body is ATTRIBUTE else []), body)
    assert not caught.value.is_retryable


@pytest.mark.slow
def test_a_record_has_a_limit_of_its_own():
    field = b"<a>" + b"x" * (1 << 20) + b"</a>"
    most = (MAX_RECORD >> 20) - 1
    assert len(parse(Xml("i"), b"<r>" + (b"<i>" + field * most + b"</i>") * 2 + b"</r>")) == 2
    with pytest.raises(SourceError, match="a record has more than the limit of 67,108,864 characters"):
        parse(Xml("i"), b"<r><i>" + field * (most + 1) + b"</i></r>")


def test_a_document_that_nests_too_deep_is_refused():
    depth = MAX_DEPTH + 1
    with pytest.raises(SourceError, match=f"nested deeper than the limit of {MAX_DEPTH} levels"):
        parse(Xml("item"), b"<a>" * depth + b"</a>" * depth)
    assert parse(Xml("item"), b"<a>" * MAX_DEPTH + b"</a>" * MAX_DEPTH) == []


@pytest.mark.parametrize("body", [b"", b"<a><item>", b"<html><br></html>", b"not at all"])
def test_truncated_or_invalid_xml_is_a_retryable_error(body):
    with pytest.raises(SourceError, match="this is not well-formed XML") as caught:
        parse(Xml("item"), body)
    assert caught.value.is_retryable


def test_bytes_that_are_no_text_are_an_error():
    with pytest.raises(SourceError, match="the text is not utf-8"):
        parse(Xml("item"), b"<a><item>\xff</item></a>")


def test_an_unknown_or_dangerous_encoding_is_refused():
    for name in (b"klingon", b"zip", b"idna"):
        with pytest.raises(SourceError, match=r"encoding '.*' is unknown"):
            parse(Xml("item"), b'<?xml version="1.0" encoding="' + name + b'"?><a/>')


def test_a_character_that_lies_across_two_pieces_is_whole():
    filler = "я" * 200_001
    [record] = parse(Xml("item"), f"<a><item>{filler}</item></a>".encode())
    assert record == {"text": filler}


@pytest.mark.parametrize("item", ["", "/", "a//b", None])
def test_an_item_without_a_name_is_refused(item):
    with pytest.raises(ValueError, match=r"item: must be an element name, "):
        Xml(item)
