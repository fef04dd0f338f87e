"""Byte budgets: sizes as UTF-8 JSON, and texts truncated to fit."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.property_examples import examples

from flowkit.text import truncate_utf8
from flowkit.workflows.payloads import (
    json_size,
    largest_cap,
    longest_prefix,
    split_by_size,
    truncate_json,
    truncate_longest,
)

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.text(
    '\\"\nu12é\U0001f600', max_size=60
)
THOROUGH = settings(max_examples=examples(100))


def inner(text: str) -> int:
    """Return the size in bytes of a text's JSON without its quotes."""
    return len(json.dumps(text, ensure_ascii=False).encode()) - 2


@THOROUGH
@given(text=TEXTS, limit=st.integers(0, 200))
def test_truncated_text_fits_and_is_a_prefix_of_the_original(text: str, limit: int) -> None:
    cut = truncate_json(text, limit)
    assert inner(cut) <= limit
    if inner(text) <= limit:
        assert cut == text
    elif limit >= 3:
        assert cut.endswith("…")
        assert text.startswith(cut[:-1])


@THOROUGH
@given(text=TEXTS, limit=st.integers(3, 200))
def test_utf8_is_never_truncated_inside_a_character(text: str, limit: int) -> None:
    cut = truncate_utf8(text, limit)
    assert len(cut.encode()) <= limit
    assert cut == text or (cut.endswith("…") and text.startswith(cut[:-1]))


def test_truncation_wastes_at_most_one_character() -> None:
    assert inner(truncate_json("x" * 100, 50)) == 50
    assert inner(truncate_json("\U0001f600" * 100, 50)) >= 46
    assert inner(truncate_json("\x01" * 100, 50)) >= 44


@pytest.mark.parametrize("room, level", [(1_110, 1_000), (300, 190), (30, 10), (29, 9), (0, 0), (-5, 0)])
def test_longest_texts_are_truncated_first(room: int, level: int) -> None:
    assert largest_cap([10, 100, 1_000], room) == level


@THOROUGH
@given(texts=st.lists(TEXTS | st.none(), max_size=20), room=st.integers(-10, 2_000))
def test_texts_are_truncated_to_their_shared_budget(texts: list[str | None], room: int) -> None:
    cut = truncate_longest(texts, room)
    assert len(cut) == len(texts)
    kept = [text for text in cut if text]
    assert sum(map(inner, kept)) <= max(0, room)
    if sum(inner(text) for text in texts if text) <= room:
        assert cut == texts
    else:
        whole = [inner(after or "") for before, after in zip(texts, cut, strict=True) if before == after]
        translate_errors = [
            inner(after) for before, after in zip(texts, cut, strict=True) if after and before != after
        ]
        assert not whole or not translate_errors or max(whole) <= max(translate_errors) + 6


@THOROUGH
@given(sizes=st.lists(st.integers(1, 50), max_size=40), room=st.integers(1, 60))
def test_parts_contain_everything_in_order_and_fit(sizes: list[int], room: int) -> None:
    parts = list(split_by_size(sizes, int, room))
    assert [size for part in parts for size in part] == sizes
    assert all(part and (sum(part) <= room or len(part) == 1) for part in parts)
    first = longest_prefix(sizes, int, room)
    assert sum(first) <= room
    assert sizes[: len(first)] == first


def test_sizes_equal_those_of_compact_utf8_json() -> None:
    assert json_size({"a": [1, "é"]}) == len('{"a":[1,"é"]}'.encode())
    assert json_size("\ud800") > 0
