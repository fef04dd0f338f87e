"""Texts for users: valid UTF-8, suggestions of names, types with their articles, lists of names, durations."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from tests.processor_time import at_most

from flowkit.text import (
    clean,
    did_you_mean,
    format_duration,
    kind_of,
    names,
    one_line,
    prefix,
    shorten,
    suggestion,
    truncate,
    truncate_start,
    truncate_utf8,
)

KNOWN = ("extract", "count")


@pytest.mark.parametrize("name", ["extrct", "Extract"])
def test_the_most_similar_name_is_suggested(name: str) -> None:
    assert did_you_mean(name, KNOWN, otherwise="known: all") == "did you mean 'extract'?"
    assert suggestion(name, KNOWN) == "; did you mean 'extract'?"


def test_a_name_is_compared_with_those_of_many_that_share_a_half() -> None:
    many = [f"partition-{number:06}-{'x' * 150}" for number in range(20_000)]
    assert did_you_mean("extrct", [*many, *KNOWN]) == "did you mean 'extract'?"
    with at_most(1):
        assert did_you_mean(many[7] + "y", many) == f"did you mean {many[7]!r}?"


@pytest.mark.parametrize("name", ["", "zzz", 7, None])
def test_without_a_similar_name_the_other_sentence_is_returned(name: object) -> None:
    assert did_you_mean(name, KNOWN, otherwise="known: all") == "known: all"
    assert did_you_mean(name, KNOWN) == ""
    assert suggestion(name, KNOWN) == ""


@pytest.mark.parametrize(
    ("value", "kind"),
    [({}, "a dict"), (1, "an int"), (OrderedDict(), "an OrderedDict"), (None, "a NoneType")],
)
def test_the_article_fits_the_name_of_the_type(value: Any, kind: str) -> None:
    assert kind_of(value) == kind


def test_lone_surrogates_become_escapes() -> None:
    assert clean("a\ud800b") == "a\\ud800b"
    assert clean("ü") == "ü"


@pytest.mark.parametrize(
    ("count", "listed"),
    [
        (0, ""),
        (1, "n0"),
        (2, "n0 or n1"),
        (4, "n0, n1, n2 or n3"),
        (5, "n0, n1, n2 and 2 more"),
        (2_003, "n0, n1, n2 and 2,000 more"),
    ],
)
def test_list_names_a_few_and_counts_the_others(count: int, listed: str) -> None:
    assert names([f"n{i}" for i in range(count)], last=" or ") == listed


def test_long_names_are_shortened_in_a_list() -> None:
    assert names(["x" * 40, "y" * 41]) == f"{'x' * 40} and {'y' * 39}…"


SPANS: list[tuple[float, str]] = [
    (0.0512, "0.0512 s"),
    (1, "1 s"),
    (2.5, "2.5 s"),
    (59.99, "60 s"),
    (119, "119 s"),
    (120, "2 min"),
    (125, "2 min 5 s"),
    (599.7, "10 min"),
    (3_599.7, "1 h"),
    (5_400, "1 h 30 min"),
    (86_399, "1 d"),
    (100_000, "1 d 3 h"),
    (31_536_000, "365 d"),
]


@pytest.mark.parametrize("seconds, reported", SPANS)
def test_duration_is_shown_in_its_two_largest_units(seconds: float, reported: str) -> None:
    assert format_duration(seconds) == reported


@pytest.mark.parametrize(("chars", "kept"), [(6, "abcdef"), (5, "abcd…"), (1, "…"), (0, "")])
def test_a_truncated_text_keeps_within_its_limit(chars: int, kept: str) -> None:
    assert truncate("abcdef", chars) == kept


@pytest.mark.parametrize(("limit", "kept"), [(6, "äöü"), (5, "ä…"), (3, "…"), (2, "")])
def test_a_text_is_truncated_to_bytes(limit: int, kept: str) -> None:
    assert truncate_utf8("äöü", limit) == kept


@pytest.mark.parametrize(("chars", "kept"), [(6, "abcdef"), (5, "…cdef"), (1, "…")])
def test_a_text_is_truncated_at_its_start(chars: int, kept: str) -> None:
    assert truncate_start("abcdef", chars) == kept


def test_a_prefix_is_valid_text_of_at_most_its_length() -> None:
    assert prefix("ab\ud800cd", 5) == r"ab\ud"
    assert prefix("abc", 2) == "ab"


def test_a_shortened_text_is_one_line() -> None:
    assert one_line(" a \n b\t") == "a b"
    assert shorten("a\n bcdef", 5) == "a bc…"
