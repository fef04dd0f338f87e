"""Values that pass the check can be encoded for MongoDB; rejected ones cannot, or exceed a limit."""

from __future__ import annotations

from typing import Any

import bson
import pytest
from bson.dbref import DBRef
from bson.errors import BSONError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.property_examples import examples

from flowkit.limits import DOCUMENT_LEVELS
from flowkit.validation import storable
from flowkit.validation.storable import storage_problems

TEXTS = st.text(st.characters(), max_size=4)
ANY_TEXTS = st.text(st.one_of(st.characters(), st.sampled_from(["\0", "\ud800", "\udfff", "ä"])), max_size=4)
INTEGERS = st.one_of(
    st.integers(),
    st.sampled_from(
        [2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**31, 2**31 - 1, -(2**31), -(2**31) - 1, 10**4_000]
    ),
)
LEAVES = st.one_of(st.none(), st.booleans(), INTEGERS, st.floats(), ANY_TEXTS)
KEYS = st.one_of(TEXTS, ANY_TEXTS, st.integers(0, 3), st.none())
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=12),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
    ),
    max_leaves=12,
)


def encoded(document: dict[Any, Any]) -> bytes | None:
    """Return the document as the driver sends it; None if the driver cannot encode it."""
    try:
        return bson.encode(document)
    except (BSONError, OverflowError, UnicodeError, TypeError):
        return None


@settings(max_examples=examples(100))
@given(document=st.dictionaries(TEXTS, VALUES, max_size=3))
@example(document={"a": 10**4_000})
@example(document={"a": {"b": [1, {"c\0": 1}]}})
@example(document={"\ud800": 1})
def test_check_accepts_exactly_what_the_driver_can_encode(document: dict[str, Any]) -> None:
    problems, sent = storage_problems(document), encoded(document)
    assert bool(problems) == (sent is None), problems
    if sent is not None:
        assert storable._DocumentSearch().measure(document, None, 1) == len(sent)
    assert all(problem.isprintable() and len(problem) < 400 for problem in problems)


REFERENCE: dict[str, Any] = {"$ref": "#/a", "$id": "b", "more": 1}


def test_an_object_that_drivers_read_as_a_reference_is_named() -> None:
    assert isinstance(bson.decode(bson.encode({"a": REFERENCE}))["a"], DBRef)
    [problem] = storage_problems({"params": {"a": [REFERENCE]}})
    assert problem == (
        'params.a[0] has the keys "$ref" and "$id", which MongoDB\'s drivers read as a reference to a document '
        "(DBRef): rename one of them"
    )


@pytest.mark.parametrize("held", [{"$ref": "#/a"}, {"$ref": 5, "$id": 1}, {"$id": 1}])
def test_an_object_that_drivers_read_as_it_is_may_have_such_keys(held: dict[str, Any]) -> None:
    assert bson.decode(bson.encode({"a": held})) == {"a": held}
    assert storage_problems({"params": {"a": held}}) == []


def test_the_schema_of_the_params_may_have_references() -> None:
    assert storage_problems({"graph": {"params_schema": REFERENCE}}) == []


def nested(levels: int, *, of_lists: bool) -> Any:
    """Return a number of nested objects or lists."""
    value: Any = 1
    for _ in range(levels):
        value = [value] if of_lists else {"k": value}
    return value


@pytest.mark.parametrize("of_lists", [True, False])
def test_document_has_at_most_a_hundred_levels(*, of_lists: bool) -> None:
    assert storage_problems({"params": nested(DOCUMENT_LEVELS - 1, of_lists=of_lists)}) == []
    [problem] = storage_problems({"params": nested(DOCUMENT_LEVELS, of_lists=of_lists)})
    assert problem.startswith("params")
    assert "is nested deeper than the 100 levels that MongoDB stores" in problem
    assert storage_problems({"params": nested(50_000, of_lists=of_lists)}) == [problem]


def test_circular_reference_is_rejected_as_too_deep() -> None:
    endless: dict[str, Any] = {}
    endless["a"] = [endless]
    [problem] = storage_problems(endless)
    assert "nested deeper" in problem


def test_document_over_the_limit_is_rejected_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    document = {"params": {"text": "x" * 100}, "graph": {}}
    size = len(bson.encode(document))
    monkeypatch.setattr(storable, "DOCUMENT_BYTES", size)
    assert storage_problems(document) == []
    monkeypatch.setattr(storable, "DOCUMENT_BYTES", size - 1)
    [problem] = storage_problems(document)
    assert f"params, graph make a document of {size} bytes, more than MongoDB's {size - 1}" in problem


@pytest.mark.parametrize(
    ("params", "reported"),
    [
        ({"n": [2**63]}, ["params.n[0] is 9223372036854775808", "64-bit", "pass it as a string"]),
        ({"n": -(2**63) - 1}, ["params.n is -9223372036854775809", "64-bit"]),
        ({"n": 10**5_000}, ["params.n is an integer of 16,610 bits", "64-bit"]),
        ({"a": {"b\0c": 1}}, [r"params.a.b\x00c has a key with NUL (\x00)", "rename the key"]),
        ({"a": ["x\ud800"]}, ["params.a[0] contains '\\ud800', half of a surrogate pair", "replace"]),
        ({"\udfff": 1}, ["params.\\udfff contains '\\udfff'", "surrogate"]),
        ({"a": {1: 2}}, ["params.a.1 has the key 1, an int", "must be strings"]),
        ({"a": {3}}, ["params.a is a set", "use strings, numbers"]),
    ],
)
def test_problem_contains_the_path_and_the_remedy(params: Any, reported: list[str]) -> None:
    [problem] = storage_problems({"params": params})
    assert [part for part in reported if part not in problem] == []


def test_problem_in_a_graph_names_the_node() -> None:
    graph = {"nodes": [{"node_id": "a"}, {"node_id": "b", "io": {"input_inline": {"id": 2**64}}}]}
    [problem] = storage_problems({"params": {}, "graph": graph})
    assert problem.startswith("node 'b': graph.nodes[1].io.input_inline.id is 18446744073709551616, beyond")


def test_at_most_eleven_problems_are_kept() -> None:
    assert len(storage_problems({"params": [2**64] * 1_000})) == 11
