"""A long text that is masked again is not searched again; the remembered data is bounded and has no secret."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloader.jobs.secrets.long_texts import LONG, LongTexts
from dataloader.jobs.secrets.masking import _LONG_TEXTS, mask, mask_text
from dataloader.jobs.secrets.secrets_in_text import secrets_in

pytestmark = pytest.mark.requirement("Q16")

SECRET = "Kn4ry-hunter2"


@attrs.define
class Search:
    """Counts the texts that are searched."""

    searched: list[str] = attrs.field(factory=list)

    def __call__(self, text: str) -> list[tuple[int, int]]:
        self.searched.append(text)
        return secrets_in(text)


def long_text(number: int = 0, secrets: int = 1) -> str:
    return f"text {number} " + f"password={SECRET} " * secrets + "x" * LONG


def test_a_long_text_is_searched_once_and_masked_the_same_each_time() -> None:
    search = Search()
    known = LongTexts(search)
    text = long_text(secrets=100)
    found = [list(known.secrets_in(text)) for _ in range(3)]
    assert found == [secrets_in(text)] * 3
    assert len(found[0]) == 100
    assert search.searched == [text]
    assert [list(known.secrets_in("x" * LONG)) for _ in range(2)] == [[], []]
    assert len(search.searched) == 2


def test_mask_text_keeps_long_texts_alone() -> None:
    text, before = long_text(7, secrets=3), len(_LONG_TEXTS._found)
    shown = [mask_text(text), mask_text(text), mask({"a": [text]})["a"][0]]  # type: ignore[index]
    assert shown == [text.replace(SECRET, "***")] * 3
    assert len(_LONG_TEXTS._found) == before + 1
    mask_text(f"password={SECRET} ".ljust(LONG, "x"))
    assert len(_LONG_TEXTS._found) == before + 1


@settings(deadline=None)
@given(st.text(), st.text())
def test_texts_that_differ_at_all_are_different_texts(one: str, other: str) -> None:
    known = LongTexts(lambda text: [(0, ord(char)) for char in text])
    for _ in range(2):
        assert [end for _, end in known.secrets_in(one)] == [ord(char) for char in one]
        assert [end for _, end in known.secrets_in(other)] == [ord(char) for char in other]


def test_surrogates_and_all_other_characters_may_be_in_a_long_text() -> None:
    text = f"\ud800 \udcff \x00 𐀀 {long_text()}"
    assert [mask_text(text) for _ in range(2)] == [text.replace(SECRET, "***")] * 2


def test_the_texts_that_were_asked_for_last_are_kept_within_the_bound() -> None:
    search = Search()
    known = LongTexts(search, most_bytes=4_000)
    texts = [long_text(number, secrets=20) for number in range(12)]
    for text in texts:
        known.secrets_in(text)
        known.secrets_in(texts[0])
        assert known.held_bytes <= 4_000
    assert search.searched.count(texts[0]) == 1
    kept = len(known._found)
    assert 2 <= kept < 12
    search.searched.clear()
    for text in (texts[0], *texts[-1:-kept:-1]):
        known.secrets_in(text)
    assert search.searched == []
    known.secrets_in(texts[1])
    assert search.searched == [texts[1]]


def test_a_text_with_more_secrets_than_the_bound_allows_displaces_no_others() -> None:
    search = Search()
    known = LongTexts(search, most_bytes=4_000)
    for text in (long_text(1), long_text(2, secrets=1_000), long_text(1)):
        known.secrets_in(text)
    assert len(search.searched) == 2
    assert len(known._found) == 1


def test_neither_a_text_nor_a_secret_is_kept() -> None:
    known = LongTexts(secrets_in)
    known.secrets_in(long_text(secrets=5))
    [(digest, places)] = known._found.items()
    assert (len(digest), len(places), places.typecode) == (32, 10, "I")
    other = LongTexts(secrets_in)
    other.secrets_in(long_text(secrets=5))
    assert digest not in other._found  # each process has its own key


def test_a_text_that_two_threads_search_at_the_same_time_is_kept_once() -> None:
    both = threading.Barrier(2)

    def find(_: str) -> list[tuple[int, int]]:
        both.wait(60)
        return [(0, 1)]

    known = LongTexts(find)
    in_threads(2, lambda _: known.secrets_in("a text"))
    assert (len(known._found), known.held_bytes) == (1, bytes_of(known))


def test_threads_that_ask_for_texts_get_what_is_in_them() -> None:
    known = LongTexts(lambda text: [(0, int(text))], most_bytes=900)
    wrong: list[int] = []

    def ask(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(20_000):
            number = chance.randrange(20)
            if [*known.secrets_in(str(number))] != [(0, number)]:
                wrong.append(number)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        in_threads(4, ask)
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
    assert known.held_bytes == bytes_of(known) <= 900


def in_threads(number: int, work: Callable[[int], object]) -> None:
    """Call `work` in several threads; fail if one of them fails."""
    with ThreadPoolExecutor(number) as threads:
        assert len(list(threads.map(work, range(number)))) == number


def bytes_of(known: LongTexts) -> int:
    return sum(len(places) * places.itemsize + 400 for places in known._found.values())
