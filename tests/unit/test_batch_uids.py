"""Uids of pulled batches: each is unique within its node, whatever the sources call their batches."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from bson import Int64, ObjectId
from hypothesis import given
from hypothesis import strategies as st

from flowkit.adapters.artifacts import check_uid
from flowkit.adapters.batch_uids import BadBatchUid, qualified, uid_text
from flowkit.limits import BATCH_UID_CHARS, ID_CHARS

uids = st.text(alphabet=st.sampled_from("ab@%/ 4ü0") | st.characters(), max_size=8)
sources = st.text(alphabet=st.sampled_from("uv@%/.") | st.characters(), min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("uid", "source", "expected"),
    [
        ("b1", "u", "b1"),
        ("b1", "v", "b1@v"),
        ("b1@v", "u", "b1%40v@u"),
        ("b1@v", "v", "b1%40v@v"),
        ("a/b c", "u", "a/b c"),
        ("a/b c", "x.y-z_~", "a%2Fb%20c@x.y-z_~"),
        ("é", "ü", "%C3%A9@%C3%BC"),
        ("100%", "u", "100%"),
        ("100%", "v", "100%25@v"),
    ],
)
def test_uids_of_the_first_source_are_kept_and_others_are_qualified(
    uid: str, source: str, expected: str
) -> None:
    assert qualified(uid, source, first="u") == expected


@given(st.lists(st.tuples(uids, sources), max_size=12, unique=True), sources)
def test_no_two_batches_get_the_same_uid(pairs: list[tuple[str, str]], first: str) -> None:
    assert len({qualified(uid, source, first=first) for uid, source in pairs}) == len(pairs)


@given(uids, sources, sources)
def test_uid_of_a_batch_is_deterministic(uid: str, source: str, first: str) -> None:
    assert qualified(uid, source, first=first) == qualified(uid, source, first=first)


def test_renamed_uid_that_would_be_too_long_becomes_its_hash() -> None:
    source = "s" * ID_CHARS
    fits, longer = "b" * (BATCH_UID_CHARS - len(source) - 1), "é" * BATCH_UID_CHARS
    assert qualified(fits, source, first="u") == f"{fits}@{source}"
    assert [len(qualified(uid, source, first="u")) for uid in (f"{fits}b", longer)] == [40, 40]


def test_longest_uid_is_accepted_and_a_longer_one_is_named() -> None:
    check_uid("u" * BATCH_UID_CHARS)
    with pytest.raises(BadBatchUid, match=r"^batch uid 'u{79}…' has 501 characters, more than 500"):
        check_uid("u" * (BATCH_UID_CHARS + 1))


@pytest.mark.parametrize(
    ("uid", "problem"),
    [
        ("__final__", "batch uid '__final__' is reserved for the metrics of finalize"),
        ("a\0b", r"batch uid 'a\\x00b' contains a NUL character"),
        ("\ud800", r"batch uid '\\ud800' contains half of a surrogate pair"),
        ("", "a batch uid is empty"),
        (5, "a batch uid is an int"),
    ],
)
def test_uid_that_identifies_no_batch_is_refused_and_that_of_another_program_replaced(
    uid: Any, problem: str
) -> None:
    with pytest.raises(BadBatchUid, match=f"^{problem}"):
        check_uid(uid)
    check_uid(uid_text(uid))


OTHER_TYPES: list[Any] = [
    *(5, Int64(5), 5.0, True, None, "", b"5", ObjectId("5" * 24), datetime(2024, 1, 1, tzinfo=UTC)),
    *([5], {"a": 5}, {"a": {"b": [5]}}),
]


def test_text_uid_is_unchanged() -> None:
    assert uid_text("b1") == "b1"


def test_uids_of_other_types_become_distinct_texts() -> None:
    texts = [uid_text(uid) for uid in [*OTHER_TYPES, "5"]]
    assert len(set(texts)) == len(texts)
    assert all(texts)
    assert texts == [uid_text(uid) for uid in [*OTHER_TYPES, "5"]]
