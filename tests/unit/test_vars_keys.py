"""Keys of task variables: the characters of a segment, and the paths that can exist together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.vars_changes import ON_A_PATH, ON_MANY_PATHS, SECRET, refusal

from flowkit.adapters.vars import changes

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowkit.adapters.vars.changes import VarsChange

BAD_PATHS = ["", ".", "a.", ".a", "a..b", "$a", "a.$b", "$", "a\0b", "a.b\0", "$a.b", "a.b.$c.d"]


@pytest.mark.parametrize("operate", ON_A_PATH.values(), ids=list(ON_A_PATH))
def test_empty_segment_leading_dollar_and_nul_are_rejected(operate: Callable[[str], VarsChange]) -> None:
    for path in BAD_PATHS:
        assert refusal(operate, path).startswith("vars.")


@pytest.mark.parametrize("operate", ON_A_PATH.values(), ids=list(ON_A_PATH))
def test_any_other_text_is_a_valid_segment(operate: Callable[[str], VarsChange]) -> None:
    for path in ["a$", "a.b$c", "0", "a.0", " ", "ä.ö", "a-b", "_id", "a\n", "vars", "set"]:
        assert operate(path).paths == [f"coordinator.vars.{path}"]


BAD_KEYS = ["$x", "", "x\0", 5, None, 1.5, True, b"x", ("x",)]


def test_every_key_of_an_object_is_checked() -> None:
    for key in BAD_KEYS:
        for value in [SECRET, {}, {"b": SECRET}]:
            for rule in (changes.setting, changes.merging):
                for tree in ({key: value}, {"a": {key: value}}, {"a": {"b": {"c": {key: value}}}}):
                    assert refusal(rule, {"kv": tree})


@pytest.mark.parametrize("key", [5, None, b"a", ["a"], ("a", "b"), 1.5], ids=repr)
def test_key_of_incr_and_path_of_unset_must_be_strings(key: Any) -> None:
    assert "non-empty string" in refusal(changes.incrementing, key, 1)
    assert "non-empty string" in refusal(changes.unsetting, [key], None)


@pytest.mark.parametrize("value", [SECRET, {"b": SECRET}], ids=["scalar", "object"])
def test_only_top_level_keys_of_set_can_contain_dots(value: Any) -> None:
    assert changes.setting({"kv": {"x.y": SECRET}}).sets == {"x.y": SECRET}
    assert "holds '.'" in refusal(changes.setting, {"kv": {"a": {"x.y": value}}})


def test_text_that_is_not_unicode_is_not_a_valid_segment() -> None:
    for operate in ON_A_PATH.values():
        refusal(operate, "a.\ud800")


@pytest.mark.parametrize("path", ["a.$b", "a." + "x" * 129])
def test_error_contains_the_full_path_of_an_invalid_segment(path: str) -> None:
    for operate in ON_A_PATH.values():
        assert f"coordinator.vars.{path[:60]}" in refusal(operate, path)


# --- paths that exist together ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outer", "inner", "others"),
    [
        ("a", "a.b", []),
        ("a.b", "a.b.c", ["x", "z.y"]),
        ("a", "a.b", ["a-b", "a b", "ab"]),
        ("a", "a.b.c.d", ["a!"]),
        ("a.b", "a.b.c", ["a.b-c"]),
    ],
)
def test_path_below_another_path_is_rejected(outer: str, inner: str, others: list[str]) -> None:
    for operate in [ON_MANY_PATHS["set, dotted"], *list(ON_MANY_PATHS.values())[3:]]:
        for paths in ([outer, *others, inner], [inner, *others, outer]):
            text = refusal(operate, paths)
            assert f"coordinator.vars.{inner} is below coordinator.vars.{outer};" in text


@pytest.mark.parametrize(
    "tree",
    [
        {"a": {"b": SECRET}, "a.b.c": SECRET},
        {"a.b.c": SECRET, "a": {"b": SECRET}},
        {"a.b": {"c": SECRET}, "a": {"b": {"c": SECRET}}},
        {"a.b": {}, "a.b.c": SECRET},
    ],
)
def test_leaf_of_an_object_below_a_path_is_rejected(tree: dict[str, Any]) -> None:
    assert "coordinator.vars.a.b.c is below coordinator.vars.a.b;" in refusal(changes.setting, tree)


@pytest.mark.parametrize(
    "tree", [{"a": {"b": SECRET}, "a.b": SECRET}, {"a.b": {"c": SECRET}, "a": {"b": SECRET}}]
)
def test_repeated_path_is_rejected(tree: dict[str, Any]) -> None:
    assert "coordinator.vars.a.b is given twice" in refusal(changes.setting, tree)


@pytest.mark.parametrize("paths", [["a", "ab"], ["a.b", "a.c", "b"], ["a.b", "a.bc"], ["a-b", "a.b", "a!"]])
def test_paths_with_a_common_prefix_do_not_overlap(paths: list[str]) -> None:
    assert set(changes.setting(dict.fromkeys(paths, 1)).sets) == set(paths)
    assert set(changes.unsetting(paths, None).removes) == set(paths)
