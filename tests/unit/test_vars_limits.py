"""Limits and key rules of task variables, each tested on both sides of the limit."""

from __future__ import annotations

import math
import uuid
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from bson import Binary, Decimal128, ObjectId
from tests.unit.vars_changes import ON_A_PATH, ON_MANY_PATHS, SECRET, nested, refusal

from flowkit.adapters.vars import changes

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowkit.adapters.vars.changes import VarsChange

PREFIX = "coordinator.vars."


def of_segments(count: int) -> str:
    """Return a path with this many segments."""
    return ".".join("s" * count)


def of_characters(count: int) -> str:
    """Return a path with this many characters, including its prefix."""
    rest = count - len(PREFIX)
    segments = ["x" * 99] * (rest // 100)
    return ".".join([*segments, "x" * (rest - 100 * len(segments))])


# --- paths ------------------------------------------------------------------------------------------------------

EDGES: list[tuple[str, str, str]] = [
    (of_segments(14), of_segments(15), "deeper than 14 segments"),
    (of_characters(512), of_characters(513), "longer than 512 characters"),
    ("x" * 128, "x" * 129, "more than 128 characters"),
    ("a." + "x" * 128, "a." + "x" * 129, "more than 128 characters"),
    ("ä" * 128, "ä" * 129, "more than 128 characters"),
]


def test_long_path_has_exactly_the_intended_length() -> None:
    assert [len(PREFIX + of_characters(count)) for count in (512, 513)] == [512, 513]


@pytest.mark.parametrize(("longest", "beyond", "reported"), EDGES)
def test_path_limits_apply_to_every_form(longest: str, beyond: str, reported: str) -> None:
    for operate in ON_A_PATH.values():
        assert operate(longest).paths == [PREFIX + longest]
        assert reported in refusal(operate, beyond)


def test_path_with_the_most_segments_can_have_the_most_characters() -> None:
    longest = ".".join(["x" * 34] * 13 + ["x" * 40])
    assert len(PREFIX + longest) == 512
    for operate in ON_A_PATH.values():
        assert operate(longest).paths == [PREFIX + longest]


@pytest.mark.parametrize("operation", ["setting", "merging"])
@pytest.mark.parametrize(("longest", "beyond", "reported"), EDGES)
def test_path_limits_apply_to_empty_objects(operation: str, longest: str, beyond: str, reported: str) -> None:
    rule = getattr(changes, operation)
    assert rule({"kv": nested(longest, {})}).paths == []
    assert reported in refusal(rule, {"kv": nested(beyond, {})})


def test_endless_nesting_is_rejected() -> None:
    endless: dict[str, Any] = {}
    endless["a"] = endless
    for rule in (changes.setting, changes.merging):
        assert "deeper than 14" in refusal(rule, {"kv": endless})


def test_error_shows_the_truncated_full_path() -> None:
    text = refusal(changes.setting, {of_segments(15): 1})
    assert PREFIX + of_segments(15) in text
    assert len(refusal(changes.setting, {of_characters(100_000): 1})) < 300


# --- number of keys ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operate", ON_MANY_PATHS.values(), ids=list(ON_MANY_PATHS))
def test_operation_has_at_most_256_keys(operate: Callable[[list[str]], VarsChange]) -> None:
    paths = [f"k{n % 7}.x{n}" for n in range(257)]
    assert len(operate(paths[:256]).paths) == 256
    assert "257 keys in one operation, more than 256" in refusal(operate, paths)


def test_repeated_keys_count_once() -> None:
    names = [f"k{n}" for n in range(256)]
    assert len(changes.unsetting(names, names).removes) == 256


# --- values -----------------------------------------------------------------------------------------------------

FULL = 65_536


@pytest.mark.parametrize(
    ("fits", "beyond"),
    [
        ("x" * FULL, "x" * (FULL + 1)),
        ("ä" * (FULL // 2), "ä" * (FULL // 2) + "x"),
        ("\U0001f600" * (FULL // 4), "\U0001f600" * (FULL // 4) + "x"),
        (b"x" * FULL, b"x" * (FULL + 1)),
        (Binary(b"x" * FULL), Binary(b"x" * (FULL + 1))),
    ],
)
@pytest.mark.parametrize("form", ["a.b", "nested"])
def test_text_and_bytes_have_at_most_64_kib(fits: Any, beyond: Any, form: str) -> None:
    def given(value: Any) -> dict[str, Any]:
        return {"kv": {"a.b": value} if form == "a.b" else {"a": {"b": value}}}

    assert changes.setting(given(fits)).sets == {"a.b": fits}
    text = refusal(changes.setting, given(beyond))
    assert "coordinator.vars.a.b has 65,537 bytes, more than 65,536" in text
    if form == "nested":
        assert changes.merging(given(fits)).sets == {"a.b": fits}
        assert "65,537 bytes" in refusal(changes.merging, given(beyond))


@pytest.mark.parametrize("value", [["x" * (FULL + 1)], [0] * FULL, {"k": "x" * (FULL + 1)}])
def test_other_values_have_no_size_limit_of_their_own(value: Any) -> None:
    assert changes.setting({"kv": {"a.b": value}}).sets == {"a.b": value}


def test_value_that_mongodb_can_store_is_unchanged() -> None:
    for value in [
        None,
        True,
        "",
        b"",
        2**63 - 1,
        -(2**63),
        math.inf,
        datetime(2024, 1, 1, tzinfo=UTC),
        ObjectId("0" * 24),
        Decimal128("1.5"),
        [],
        [[{"a": None}]],
    ]:
        assert changes.setting({"a": value}).sets == changes.merging({"a": value}).sets == {"a": value}


class _Own:
    def __repr__(self) -> str:
        return SECRET


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


def test_value_that_mongodb_cannot_store_is_rejected() -> None:
    for value in [
        _Own(),
        {SECRET},
        (each for each in "ab"),
        2**63,
        -(2**63) - 1,
        [SECRET, 2**64],
        Decimal("1.5"),
        1j,
        date(2024, 1, 1),
        uuid.uuid4(),
        f"{SECRET}\ud800",
        [_Own()],
        ENDLESS,
    ]:
        for rule in (changes.setting, changes.merging):
            text = refusal(rule, {"a": {"b": value}})
            assert f"the value of coordinator.vars.a.b, {changes.kind(value)}, cannot be stored" in text


@pytest.mark.parametrize("inner", [{1: SECRET}, {"k\0": SECRET}, {"k": {None: SECRET}}, {"k": {SECRET}}])
def test_dict_stored_as_one_value_must_be_storable_by_mongodb(inner: Any) -> None:
    assert "coordinator.vars.a.b, a dict, cannot be stored" in refusal(changes.setting, {"a.b": inner})


def test_object_that_drivers_read_as_a_reference_is_rejected() -> None:
    text = refusal(changes.setting, {"a.b": [{"$ref": SECRET, "$id": 1}]})
    assert 'coordinator.vars.a.b has the keys "$ref" and "$id"' in text


def lists(levels: int) -> Any:
    """Return this many nested lists."""
    return [lists(levels - 1)] if levels else SECRET


@pytest.mark.parametrize(("path", "levels"), [("a", 97), ("a.b.c", 95)])
def test_nesting_beyond_the_limit_of_mongodb_is_rejected(path: str, levels: int) -> None:
    assert changes.setting({"kv": {path: lists(levels)}}).paths == [PREFIX + path]
    for beyond in (levels + 1, 200):
        text = refusal(changes.setting, {"kv": {path: lists(beyond)}})
        assert f"the value of {PREFIX}{path} is nested deeper than the 100 levels" in text
