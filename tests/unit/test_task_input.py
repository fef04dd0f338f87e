"""The valid and invalid inputs of a task."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.graphs import one

from flowkit.errors import GraphError
from flowkit.graph.submission import parse_input
from flowkit.limits import ID_CHARS
from flowkit.text import truncate


def refused(given: object, task_id: str = "t") -> GraphError:
    """Return the error with which an input is rejected."""
    with pytest.raises(GraphError) as caught:
        parse_input(task_id, given)
    return caught.value


@pytest.mark.parametrize("params", [{}, {"a": 1}])
def test_params_and_graph_are_returned_unchanged(params: dict[str, Any]) -> None:
    new = parse_input("t", {"params": params, "graph": one()})
    assert (new.params, new.graph) == (params, one())


@pytest.mark.parametrize("given", [{"graph": {}}, {"graph": {}, "params": None}])
def test_params_are_optional(given: dict[str, Any]) -> None:
    assert parse_input("t", given).params == {}


def test_graph_is_not_validated() -> None:
    assert parse_input("t", {"graph": {"nodes": 7}}).graph == {"nodes": 7}


BAD: list[tuple[str, object, list[str]]] = [
    ("none", None, ['{"params": {...}, "graph": {...}}', "'None'"]),
    ("text", "graph", ['"graph": {...}', "'graph'"]),
    ("list", [1], ["input of a task is", "'[1]'"]),
    ("empty", {}, ["has no 'graph'"]),
    ("typo", {"graph": {}, "parms": {}}, ["unknown key 'parms'", "did you mean 'params'?"]),
    ("unknown", {"graph": {}, "zzz": 1}, ["unknown key 'zzz'", "takes 'params' and 'graph'"]),
    ("graph", {"graph": 7}, ["graph", "7", "object with 'nodes'"]),
    ("graph_none", {"graph": None}, ["graph", "None", "object with 'nodes'"]),
    ("params", {"graph": {}, "params": [1]}, ["params", "[1]", "must be an object"]),
    ("params_false", {"graph": {}, "params": False}, ["params", "False", "must be an object"]),
]


@pytest.mark.parametrize("given, reported", [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_malformed_input_is_rejected_with_value_and_remedy(given: object, reported: list[str]) -> None:
    text = str(refused(given))
    assert [part for part in reported if part not in text] == []


def test_all_problems_are_reported_together_and_long_values_are_truncated() -> None:
    error = refused({"graph": "g" * 9_000, "params": ["p" * 9_000], "zzz": 1}, task_id="*")
    assert len(error.problems) == 4
    assert len(str(error)) < 600


@pytest.mark.parametrize("task_id", ["a", "a" * ID_CHARS, "*a", "é", "a b"])
def test_valid_task_id_is_accepted(task_id: str) -> None:
    parse_input(task_id, {"graph": {}})


@pytest.mark.parametrize("task_id", ["", "*", "a" * (ID_CHARS + 1)])
def test_invalid_task_id_is_rejected(task_id: str) -> None:
    text = str(refused({"graph": {}}, task_id))
    assert f"task id {truncate(task_id, 80)!r} must be 1 to 200 characters and not '*'" in text
