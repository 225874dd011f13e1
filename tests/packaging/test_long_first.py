"""Order in which the tests of `just test-rest` begin."""

from __future__ import annotations

from pathlib import Path

import attrs
import long_first


@attrs.frozen
class Item:
    """A test of a file; the long ones have capital letters."""

    name: str
    path: Path = Path("a.py")


def is_long(item):
    return item.name.isupper()


def names(items):
    return "".join(item.name for item in items)


def test_each_workers_part_begins_with_the_long_tests_of_a_file():
    items = [*map(Item, "abcdAef"), Item("B", Path("b.py")), Item("C", Path("b.py")), *map(Item, "ghi")]
    assert names(long_first.shared_out(items, 2, is_long)) == "Aabcde" + "BCfghi"


def test_one_process_begins_with_all_long_tests_and_loses_none():
    items = [*map(Item, "abA"), Item("B", Path("b.py")), Item("c")]
    assert names(long_first.shared_out(items, 1, is_long)) == "ABabc"


def test_long_tests_are_kept_when_they_are_more_than_a_workers_part():
    items = [Item(name, Path("b.py")) for name in "ABC"] + [Item("d")]
    assert names(long_first.shared_out(items, 3, is_long)) == "ABCd"
