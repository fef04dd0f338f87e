"""Operations on task variables: the forms of their arguments, and the resulting changes."""

from __future__ import annotations

import copy
import math
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import pytest
from tests.unit.vars_changes import SECRET, refusal

from flowkit.adapters.vars import changes

# --- set --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "leaves"),
    [
        ({}, {}),
        ({"kv": {}}, {}),
        ({"a": 1}, {"a": 1}),
        ({"kv": {"a": 1}}, {"a": 1}),
        ({"a": None, "b": [1, {"c": 2}]}, {"a": None, "b": [1, {"c": 2}]}),
        ({"kv": {"a": {"b": {"c": 1}, "d": 2}}}, {"a.b.c": 1, "a.d": 2}),
        ({"a": {"b": 1}, "c.d": 2, "e": 3}, {"a.b": 1, "c.d": 2, "e": 3}),
        ({"kv": {"a": {"b": 1}, "a.c": 2, "d": 3}}, {"a.b": 1, "a.c": 2, "d": 3}),
        ({"a": MappingProxyType({"b": MappingProxyType({"c": 1})})}, {"a.b.c": 1}),
    ],
)
def test_set_accepts_dotted_and_nested_keys_together(given: dict[str, Any], leaves: dict[str, Any]) -> None:
    change = changes.setting(given)
    assert (change.operation, change.sets, change.block_sensitive) == ("set", leaves, False)
    assert (change.adds, change.removes) == ({}, ())


@pytest.mark.parametrize(
    "whole", [{}, {"c": {"d": 1}}, {"$c": 1, "d.e": {"": 2}}, {"c": {str(n): n for n in range(300)}}]
)
def test_set_stores_a_dict_under_a_dotted_key_as_one_value(whole: dict[str, Any]) -> None:
    change = changes.setting({"kv": {"a.b": whole}})
    assert change.sets == {"a.b": whole}
    assert change.paths == ["coordinator.vars.a.b"]


@pytest.mark.parametrize("given", [{"a": {}}, {"a": {"b": {}, "c": {"d": {}}}}, {"kv": {"a": {}}}])
def test_object_without_leaves_sets_nothing(given: dict[str, Any]) -> None:
    assert changes.setting(given).paths == changes.merging(given).paths == []


@pytest.mark.parametrize(
    ("given", "leaves"),
    [
        ({"kv": {"a": 1}, "b": 2}, {"a": 1}),
        ({"kv": {}, "b": 2}, {}),
        ({"kv": {"kv": {"a": 1}}}, {"kv.a": 1}),
        ({"kv": 5}, {"kv": 5}),
        ({"kv": [1], "b": 2}, {"kv": [1], "b": 2}),
        ({"kv.a": 1}, {"kv.a": 1}),
        ({"data": {"a": 1}}, {"data.a": 1}),
    ],
)
def test_set_uses_only_kv_if_it_is_a_dict(given: dict[str, Any], leaves: dict[str, Any]) -> None:
    assert changes.setting(given).sets == leaves


# --- merge ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "leaves"),
    [
        ({}, {}),
        ({"data": {}}, {}),
        ({"data": {"a": {"b": 1}}}, {"a.b": 1}),
        ({"kv": {"a": {"b": 1}}}, {"a.b": 1}),
        ({"a": {"b": 1, "c": {"d": None}}, "e": [2]}, {"a.b": 1, "a.c.d": None, "e": [2]}),
        ({"data": {"a": 1}, "kv": {"b": 2}, "c": 3}, {"a": 1}),
        ({"kv": {"b": 2}, "c": 3}, {"b": 2}),
        ({"data": {"kv": {"a": 1}}}, {"kv.a": 1}),
        ({"data": MappingProxyType({"a": MappingProxyType({"b": 1})})}, {"a.b": 1}),
    ],
)
def test_merge_uses_data_or_else_kv_or_else_all_keywords(
    given: dict[str, Any], leaves: dict[str, Any]
) -> None:
    change = changes.merging(given)
    assert (change.operation, change.sets, change.block_sensitive) == ("merge", leaves, False)
    assert (change.adds, change.removes) == ({}, ())


def test_merge_rejects_what_is_not_a_mapping() -> None:
    for wrapper in ["data", "kv"]:
        for wrong in [None, 5, SECRET, [("a", SECRET)], {SECRET}]:
            text = refusal(changes.merging, {wrapper: wrong, "a": 1})
            assert f"{wrapper!r} must be a mapping, not {type(wrong).__name__}" in text


@pytest.mark.parametrize("given", [{"a.b": SECRET}, {"a": {"b.c": SECRET}}, {"a": {"b": {".": SECRET}}}])
def test_merge_rejects_a_dot_in_any_key(given: dict[str, Any]) -> None:
    for form in (given, {"data": given}, {"kv": given}):
        assert "holds '.'" in refusal(changes.merging, form)


# --- block_sensitive --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("operation", ["setting", "merging"])
@pytest.mark.parametrize("wrapper", [None, "kv", "data"])
def test_block_sensitive_takes_effect_and_is_never_stored(
    operation: str, wrapper: str | None, *, block: bool
) -> None:
    rule = getattr(changes, operation)
    if operation == "setting" and wrapper == "data":
        wrapper = "kv"
    data = {"a": {"b": 1}}
    forms: list[dict[str, Any]] = [{**data, "block_sensitive": block}]
    if wrapper:
        forms = [{wrapper: data, "block_sensitive": block}, {wrapper: {**data, "block_sensitive": block}}]
    for given in forms:
        change = rule(given)
        assert (change.sets, change.block_sensitive) == ({"a.b": 1}, block)


@pytest.mark.parametrize(("outside", "inside"), [(True, False), (False, True), (True, True)])
def test_block_sensitive_of_either_the_keyword_or_kv_is_sufficient(*, outside: bool, inside: bool) -> None:
    given = {"kv": {"a": 1, "block_sensitive": inside}, "block_sensitive": outside}
    assert changes.setting(given).block_sensitive
    assert changes.merging(given).block_sensitive


@pytest.mark.parametrize("wrong", [SECRET, 1, [True]])
@pytest.mark.parametrize("operation", ["setting", "merging"])
def test_block_sensitive_is_read_as_a_boolean(operation: str, wrong: object) -> None:
    rule = getattr(changes, operation)
    for given in ({"a": 1, "block_sensitive": wrong}, {"kv": {"a": 1, "block_sensitive": wrong}}):
        assert "block_sensitive must be true or false" in refusal(rule, given)


def test_nested_variable_can_be_named_block_sensitive() -> None:
    assert changes.merging({"a": {"block_sensitive": 5}}).sets == {"a.block_sensitive": 5}


# --- incr -------------------------------------------------------------------------------------------------------


def test_incr_accepts_any_finite_64_bit_number() -> None:
    for by, amount in [
        (1, 1),
        (-7, -7),
        (0, 0),
        (0.5, 0.5),
        (-1.25, -1.25),
        (1.7e308, 1.7e308),
        (5e-324, 5e-324),
        (True, 1),
        (False, 0),
        (2**63 - 1, 2**63 - 1),
        (-(2**63) + 1, -(2**63) + 1),
        (-(2**63), -(2**63)),
        (float(2**63), float(2**63)),
    ]:
        change = changes.incrementing("a.b", by)
        assert (change.operation, change.sets, change.removes) == ("incr", {}, ())
        assert change.adds == {"a.b": amount}
        assert type(change.adds["a.b"]) is type(amount)


def test_incr_rejects_what_is_not_a_number() -> None:
    for wrong in [None, "1", SECRET, [1], {"n": 1}, 1j, b"1", Decimal(1), Fraction(1, 2)]:
        text = refusal(changes.incrementing, "a", wrong)
        assert f"must be int or float, not {type(wrong).__name__}" in text


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_incr_rejects_what_is_not_finite(wrong: float) -> None:
    assert "must be finite" in refusal(changes.incrementing, "a", wrong)


@pytest.mark.parametrize(
    "wrong",
    [2**63, -(2**63) - 1, pytest.param(10**400, id="huge"), pytest.param(-(10**400), id="-huge")],
)
def test_incr_rejects_whole_numbers_beyond_64_bits(wrong: int) -> None:
    assert "64 bits" in refusal(changes.incrementing, "a", wrong)


# --- unset ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paths", "keys", "removed"),
    [
        ([], None, ()),
        ([], [], ()),
        (["a", "b.c"], None, ("a", "b.c")),
        ([], ["a", "b.c"], ("a", "b.c")),
        (["a"], ("b",), ("a", "b")),
        ([], {"a"}, ("a",)),
        ([], {"a": 1}, ("a",)),
        ([], (key for key in "ab"), ("a", "b")),
        ([], [7, 2.5, None], ("7", "2.5", "None")),
        (["a", "a"], ["a"], ("a",)),
    ],
)
def test_unset_accepts_paths_and_keys(paths: list[Any], keys: Any, removed: tuple[str, ...]) -> None:
    change = changes.unsetting(paths, keys)
    assert (change.operation, change.sets, change.adds) == ("unset", {}, {})
    assert change.removes == removed


@pytest.mark.parametrize("wrong", [SECRET, b"a", 7, 1.5])
def test_unset_rejects_keys_that_are_not_an_iterable_of_strings(wrong: object) -> None:
    assert f"not {type(wrong).__name__}" in refusal(changes.unsetting, ["a"], wrong)


# --- description of a change ------------------------------------------------------------------------------------


def test_paths_are_full_and_sorted() -> None:
    change = changes.setting({"b": 1, "a": {"z": 1, "c": 2}, "a.b": 3})
    assert change.paths == [f"coordinator.vars.{path}" for path in ("a.b", "a.c", "a.z", "b")]
    assert changes.incrementing("b.a", 1).paths == ["coordinator.vars.b.a"]
    assert changes.unsetting(["b", "a.c"], ["a.b"]).paths == [
        f"coordinator.vars.{path}" for path in ("a.b", "a.c", "b")
    ]


def test_ancestors_are_the_paths_that_must_be_objects() -> None:
    assert changes.setting({"a": {"b": {"c": 1}}, "a.d": 2, "e": 3}).ancestors == ["a", "a.b"]
    assert changes.incrementing("a.b.c", 1).ancestors == ["a", "a.b"]
    assert changes.unsetting(["a"], None).ancestors == []


def test_arguments_are_not_changed() -> None:
    given = {"kv": {"a": {"b": [1]}, "c.d": {"e": 1}, "block_sensitive": True}}
    before = copy.deepcopy(given)
    changes.setting(given)
    assert given == before
    merged = {"data": {"a": {"b": [1]}, "block_sensitive": True}}
    before = copy.deepcopy(merged)
    changes.merging(merged)
    assert merged == before
