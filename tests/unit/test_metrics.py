"""Metrics are stored as external workers would send them. The error for a value that cannot be stored locates it."""

from __future__ import annotations

import json
import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any
from uuid import UUID

import bson
import pytest
from bson import ObjectId
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from flowkit.adapters.metrics import BadMetrics, BatchTooLarge, storable
from flowkit.limits import BATCH_META_BYTES


class Color(Enum):
    RED = "red"


class Level(IntEnum):
    LOW = 1


@dataclass
class Row:
    price: Decimal


class Model(BaseModel):
    at: datetime


NOON = datetime(2026, 1, 31, 12, 0, 0, 250, tzinfo=UTC)

CONVERTED: list[tuple[Any, Any]] = [
    (NOON, "2026-01-31T12:00:00.000250Z"),
    (NOON.replace(microsecond=0), "2026-01-31T12:00:00Z"),
    (NOON.astimezone(timezone(timedelta(hours=2))), "2026-01-31T14:00:00.000250+02:00"),
    (NOON.replace(tzinfo=None), "2026-01-31T12:00:00.000250"),
    (date(2026, 1, 31), "2026-01-31"),
    (time(12, 30), "12:30:00"),
    (timedelta(seconds=90), "PT1M30S"),
    (UUID(int=5), "00000000-0000-0000-0000-000000000005"),
    (Decimal("1.50"), "1.50"),
    (b"abc", "abc"),
    (bytearray(b"abc"), "abc"),
    ({3}, [3]),
    (frozenset(["a"]), ["a"]),
    ((1, (2, 3)), [1, [2, 3]]),
    (deque([1]), [1]),
    ((n for n in range(2)), [0, 1]),
    (OrderedDict(a=1), {"a": 1}),
    (Color.RED, "red"),
    (Level.LOW, 1),
    (math.nan, None),
    (math.inf, None),
    ([-math.inf, 1.5], [None, 1.5]),
    (Path("/data"), "/data"),
    (Row(Decimal(2)), {"price": "2"}),
    (Model(at=NOON), {"at": "2026-01-31T12:00:00.000250Z"}),
    (
        {1: "a", 2.5: "b", None: "d", Color.RED: "e"},
        {"1": "a", "2.5": "b", "None": "d", "red": "e"},
    ),
    ({"a.b": 1, "$set": {"$inc": 2}, "": 3}, {"a.b": 1, "$set": {"$inc": 2}, "": 3}),
    (2**63 - 1, 2**63 - 1),
    (-(2**63), -(2**63)),
]


def test_metrics_are_converted_to_json() -> None:
    for given_value, stored in CONVERTED:
        converted, size = storable("metrics", {"value": {"nested": [given_value]}})
        assert converted == {"value": {"nested": [stored]}}
        assert size == len(bson.encode(converted))
        assert json.loads(json.dumps(converted)) == converted


def refusal(metrics: Any) -> str:
    with pytest.raises(BadMetrics) as caught:
        storable("metrics of batch 'b1'", metrics)
    text = str(caught.value)
    assert text.startswith("metrics of batch 'b1'")
    return text


class Opaque:
    """A value that JSON cannot express."""


REFUSED: list[tuple[Any, list[str]]] = [
    ({"rows": [{"n": 1}, {"n": 2**63}]}, ["rows[1].n", "64-bit", "as a string"]),
    ({"n": -(2**63) - 1}, ["n is an integer outside"]),
    ({"n": 10**400}, ["n is an integer outside"]),
    ({"a": {"b": (1, Opaque())}}, ["a.b[1]", "Opaque", "no JSON form"]),
    ({"id": ObjectId()}, ["id is of type bson.objectid.ObjectId"]),
    ({"range": range(3)}, ["range is of type range"]),
    ({"call": print}, ["call is of type builtin_function_or_method"]),
    ({"a": {"b\0c": 1}}, ["a has the key 'b\\x00c'", "NUL", "rename"]),
    ({"b\0c": 1}, ["the top level has the key 'b\\x00c'"]),
    ({"a": {Opaque(): 1}}, ["a has the key", "Opaque"]),
    ({"a": b"\xff"}, ["a is not valid UTF-8", "base64"]),
    ({"a": ["\ud800"]}, ["a[0] is not valid UTF-8"]),
    ({"a": [{"$ref": "b", "$id": 1}]}, ['a[0] has the keys "$ref" and "$id"', "rename one"]),
    ({"$ref": "b", "$id": 1}, ['the top level has the keys "$ref" and "$id"']),
    ([1], ["must be an object, not list"]),
    (None, ["must be an object, not NoneType"]),
]


@pytest.mark.parametrize(("metrics", "reported"), REFUSED)
def test_value_that_cannot_be_stored_is_rejected_with_its_path(metrics: Any, reported: list[str]) -> None:
    text = refusal(metrics)
    assert [part for part in reported if part not in text] == []


def test_integers_with_thousands_of_digits_are_rejected_as_values_and_keys() -> None:
    huge = 10**5000
    assert "n is an integer outside" in refusal({"n": huge})
    assert "n has the key '<int>'" in refusal({"n": {huge: Opaque()}})


def test_circular_reference_is_rejected() -> None:
    loop: dict[str, Any] = {"list": []}
    loop["list"].append({"back": loop})
    assert "list[0].back contains itself" in refusal(loop)


def test_repeated_value_is_not_a_circular_reference() -> None:
    shared = [1]
    assert storable("metrics", {"a": shared, "b": shared})[0] == {"a": [1], "b": [1]}


def test_excessive_nesting_is_rejected() -> None:
    deep: dict[str, Any] = {}
    for _ in range(2_000):
        deep = {"k": deep}
    assert "more than 98 levels deep" in refusal(deep)


def test_limit_applies_to_the_stored_form() -> None:
    short = "x" * (BATCH_META_BYTES // 2)
    storable("metrics", {"text": short})
    with pytest.raises(
        BatchTooLarge, match=r"^metrics of batch 'b1' are 8,\d{3},\d{3} bytes, more than 8,000,000"
    ):
        storable("metrics of batch 'b1'", {"text": short, "bytes": short.encode()})


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.datetimes(timezones=st.none() | st.just(UTC))
    | st.decimals()
    | st.uuids()
    | st.just(Opaque()),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.integers() | st.none(), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=5), anything, max_size=4))
def test_any_metrics_are_stored_as_json_or_rejected(metrics: dict[str, Any]) -> None:
    try:
        converted, _ = storable("metrics", metrics)
    except BadMetrics:
        return
    assert bson.decode(bson.encode(converted)) == converted == json.loads(json.dumps(converted))
    assert storable("metrics", converted)[0] == converted
