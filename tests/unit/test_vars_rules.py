"""The effects of an operation on existing variables, and its conflicts with them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from bson import Decimal128, Int64
from tests.unit.vars_changes import SECRET, nested, refusal

from flowkit.adapters.vars import changes, rules

Tree = dict[str, Any]
SET, INCR, UNSET = (
    changes.setting({"a.b.c": SECRET}),
    changes.incrementing("a.b.c", 1),
    changes.unsetting(["a.b.c"], None),
)
SCALARS = [None, True, 0, 1.5, "", SECRET, b"x"]

# --- conflicts --------------------------------------------------------------------------------------------------


def test_missing_variable_is_no_conflict() -> None:
    variables: Any
    for change in [SET, INCR, UNSET]:
        for variables in [{}, {"a": {}}, {"a": {"b": {}}}, {"a": {"x": 1}, "b": 5}]:
            assert rules.conflict(variables, change) is None


@pytest.mark.parametrize("change", [SET, INCR], ids=["set", "incr"])
def test_set_or_incr_below_a_value_is_a_conflict(change: changes.VarsChange) -> None:
    held: Any
    for above in ["a", "a.b"]:
        for held in [*SCALARS, [], [{}]]:
            problem = rules.conflict(nested(above, held), change) or ""
            assert problem.startswith(f"coordinator.vars.{above} holds ")
            assert problem.endswith(", so it cannot contain coordinator.vars.a.b.c")
            assert SECRET not in problem


@pytest.mark.parametrize("above", ["a", "a.b"])
def test_unset_below_a_value_has_no_effect_and_inside_a_list_is_a_conflict(above: str) -> None:
    assert [rules.conflict(nested(above, held), UNSET) for held in SCALARS] == [None] * len(SCALARS)
    for held in ([], [SECRET], [{"c": SECRET}]):
        problem = rules.conflict(nested(above, held), UNSET) or ""
        assert problem.startswith(f"coordinator.vars.{above} holds a list")


def test_any_leaf_can_be_replaced_or_removed() -> None:
    held: Any
    for held in [*SCALARS, [], {}, {"d": 1}]:
        assert rules.conflict(nested("a.b.c", held), SET) is None
        assert rules.conflict(nested("a.b.c", held), UNSET) is None


@pytest.mark.parametrize("held", [0, -1.5, Int64(7), Decimal128("1.5"), float("inf")], ids=repr)
def test_number_can_be_incremented(held: object) -> None:
    assert rules.conflict(nested("a.b.c", held), INCR) is None


def test_incrementing_a_value_that_is_not_a_number_is_a_conflict() -> None:
    for held in [None, True, False, "", "5", SECRET, b"5", [], [1], {}, {"d": 1}]:
        problem = rules.conflict(nested("a.b.c", held), INCR) or ""
        assert problem.startswith("coordinator.vars.a.b.c holds ")
        assert problem.endswith(", not a number")
        assert SECRET not in problem


MOST, LEAST = 2**63 - 1, -(2**63)


@pytest.mark.parametrize(
    ("held", "by", "fits"),
    [
        (MOST - 1, 1, True),
        (MOST, 1, False),
        (LEAST + 1, -1, True),
        (LEAST, -1, False),
        (0, MOST, True),
        (1, MOST, False),
        (Int64(MOST), 1, False),
        (MOST, -MOST, True),
        (MOST, 1.0, True),
        (float(MOST), 1, True),
    ],
)
def test_integer_sum_stays_within_64_bits(held: float, by: float, *, fits: bool) -> None:
    problem = rules.conflict({"n": held}, changes.incrementing("n", by))
    assert problem == (None if fits else "coordinator.vars.n would exceed 64 bits")


def test_error_names_the_conflicting_one_of_several_paths() -> None:
    change = changes.setting({"x": 1, "y.z": 2, "v.w": 3})
    problem = rules.conflict({"x": {"deep": 1}, "y": 5, "v": {}}, change) or ""
    assert problem.startswith("coordinator.vars.y holds ")


# --- effects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        (changes.setting({"a.b": 1, "c": [2]}), {}, {"a": {"b": 1}, "c": [2]}),
        (changes.setting({"a.b": 1}), {"a": {"b": {"x": 1}, "c": 2}}, {"a": {"b": 1, "c": 2}}),
        (changes.setting({"a.b": {"x": 1}}), {"a": {"b": {"y": 2}}}, {"a": {"b": {"x": 1}}}),
        (changes.merging({"a": {"b": {"x": 1}}}), {"a": {"b": {"y": 2}}}, {"a": {"b": {"x": 1, "y": 2}}}),
        (changes.incrementing("a.n", 2), {}, {"a": {"n": 2}}),
        (changes.incrementing("a.n", 0.5), {"a": {"n": 2}}, {"a": {"n": 2.5}}),
        (changes.incrementing("n", False), {"n": 2}, {"n": 2}),
        (changes.incrementing("n", 1), {"n": Decimal128("1.5")}, {"n": Decimal128("2.5")}),
        (
            changes.unsetting(["a.b", "c", "d.e"], None),
            {"a": {"b": 1}, "c": {"x": 1}, "d": 5},
            {"a": {}, "d": 5},
        ),
        (changes.NOTHING, {"a": 1}, {"a": 1}),
    ],
)
def test_change_returns_the_new_variables_without_changing_the_old_ones(
    change: changes.VarsChange, before: Tree, after: Tree
) -> None:
    untouched = copy.deepcopy(before)
    assert rules.changed(before, change) == after
    assert before == untouched


@pytest.mark.parametrize(
    ("held", "by", "bits"),
    [
        (5, 1, 32),
        (2**31 - 1, 1, 64),
        (Int64(5), 1, 64),
        (5, 2**31, 64),
        (-(2**31), 2**31, 64),
        (2**40, 1 - 2**40, 64),
    ],
)
def test_sum_has_the_size_that_mongodb_gives_it(held: int, by: int, bits: int) -> None:
    after = rules.changed({"n": held}, changes.incrementing("n", by))
    assert after == {"n": held + by}
    assert changes.size(after) == changes.size({}) + 3 + bits // 8


def test_result_shares_no_objects_with_its_arguments() -> None:
    given, before = {"a": [1]}, {"b": {"c": [2]}}
    after = rules.changed(before, changes.setting({"x.y": given}))
    given["a"].append(3)
    after["b"]["c"].append(4)
    assert after == {"x": {"y": {"a": [1]}}, "b": {"c": [2, 4]}}
    assert before == {"b": {"c": [2]}}


# --- size of everything -----------------------------------------------------------------------------------------

LIMIT = 1_000_000


def of_bytes(count: int, key: str = "a") -> Tree:
    """Return variables of this many BSON bytes, in one text."""
    tree = {key: "x" * (count - changes.size({key: ""}))}
    assert changes.size(tree) == count
    return tree


def setting_bytes(count: int) -> changes.VarsChange:
    """Return a change that adds this many bytes, including the overhead next to other variables, as a text
    under `b`.
    """
    return changes.VarsChange(operation="set", sets={"b": "x" * (count - 8)})


def test_all_variables_together_have_at_most_a_million_bytes() -> None:
    for brought in (2_000, 60_000):
        variables = of_bytes(LIMIT - brought)
        rules.size_after(variables, setting_bytes(brought))
        text = refusal(rules.size_after, variables, setting_bytes(brought + 1))
        assert text.startswith(
            "vars.set: the task's variables would have 1,000,001 bytes, more than 1,000,000"
        )


def test_variables_that_are_too_large_can_shrink_but_not_grow() -> None:
    variables = {**of_bytes(LIMIT + 500_000), "b": "x" * 3_000}
    rules.size_after(variables, changes.setting({"b": "x" * 2_000}))
    rules.size_after(variables, changes.setting({"b": "y" * 3_000}))
    assert "bytes" in refusal(rules.size_after, variables, changes.setting({"b": "x" * 3_001}))


# --- empty objects ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "empty"),
    [
        ({}, {}),
        ({"a": 1, "b": {"c": None}}, {}),
        ({"a": {}}, {"a": {}}),
        ({"a": {"b": {}, "c": {"d": {}}}}, {"a": {"b": {}, "c": {"d": {}}}}),
        ({"a": {"b": {}, "c": 1}}, {"a.b": {}}),
        ({"a": {"b": {"c": {"d": {}}}, "e": {"f": 1, "g": {}}}}, {"a.b": {"c": {"d": {}}}, "a.e.g": {}}),
        ({"a": [], "b": [{}], "c": "", "d": 0}, {}),
    ],
)
def test_pruning_removes_the_topmost_objects_without_a_leaf(variables: Tree, empty: Tree) -> None:
    assert rules.empty_objects(variables) == empty
