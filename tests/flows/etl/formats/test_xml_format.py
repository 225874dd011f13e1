"""XML: elements become flat records, whatever the encoding, and what makes XML dangerous is refused."""

from __future__ import annotations

import io

import pytest

from dataloader.flows.etl.formats.xml_format import MAX_DEPTH, Xml
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


def test_a_record_inherits_the_attributes_it_is_to_have():
    records = parse(Xml("Valute", inherit=["Date"]), RATES.encode("windows-1251"))
    assert [record["Date"] for record in records] == ["25.04.2020", "25.04.2020"]
    with pytest.raises(SourceError, match="inherit: no element around Valute has an attribute Day"):
        parse(Xml("Valute", inherit=["Day"]), RATES.encode("windows-1251"))


def test_the_document_s_own_encoding_goes_before_the_source_s_and_the_format_s_before_both():
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


def test_what_is_deeper_has_a_dotted_name_and_what_comes_twice_is_a_list():
    body = b"""<r xmlns="urn:x"><item n="1"><owner id="7"><name> A </name></owner><tag>x</tag><tag>y</tag><tag>z</tag>
    <empty/><item>inner</item></item><item>only text</item></r>"""
    assert parse(Xml("item"), body) == [
        {"n": "1", "owner.id": "7", "owner.name": "A", "tag": ["x", "y", "z"], "empty": "", "item": "inner"},
        {"text": "only text"},
    ]


def test_an_item_can_be_told_by_the_end_of_its_path():
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
OUTSIDE = b"""<!DOCTYPE l SYSTEM "http://127.0.0.1:9/l.dtd"><l><item>&unknown;</item></l>"""


@pytest.mark.parametrize("body", [LAUGHS, FILE, PARAMETER, OUTSIDE], ids=["laughs", "file", "parameter", "outside"])
def test_a_document_with_entities_of_its_own_is_refused(body):
    with pytest.raises(SourceError, match="entities of its own, which is not allowed") as caught:
        parse(Xml("item"), body)
    assert not caught.value.is_retryable


def test_a_document_that_nests_too_deep_is_refused():
    depth = MAX_DEPTH + 1
    with pytest.raises(SourceError, match=f"nested deeper than the {MAX_DEPTH} allowed"):
        parse(Xml("item"), b"<a>" * depth + b"</a>" * depth)
    assert parse(Xml("item"), b"<a>" * MAX_DEPTH + b"</a>" * MAX_DEPTH) == []


@pytest.mark.parametrize("body", [b"", b"<a><item>", b"<html><br></html>", b"not at all"])
def test_what_is_cut_or_no_xml_passes(body):
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
    with pytest.raises(ValueError, match=r"item: must be an element's name, "):
        Xml(item)
