"""Texts of errors: valid UTF-8, suggestions of names, types with their articles."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest

from flowkit.text import clean, did_you_mean, error_text, kind_of, suggestion

KNOWN = ("extract", "count")


@pytest.mark.parametrize("name", ["extrct", "Extract"])
def test_the_most_similar_name_is_suggested(name: str) -> None:
    assert did_you_mean(name, KNOWN, otherwise="known: all") == "did you mean 'extract'?"
    assert suggestion(name, KNOWN) == "; did you mean 'extract'?"


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


def test_an_exception_without_a_readable_message_has_a_text() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert error_text(Broken()) == "Broken: its message cannot be read"
    assert error_text(KeyError("source")) == "KeyError: 'source'"
