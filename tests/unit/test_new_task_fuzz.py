"""Any input of `create_task` is either rejected with a readable message before the start, or can be stored."""

from __future__ import annotations

import copy
from datetime import datetime
from decimal import Decimal
from typing import Any

import bson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.property_examples import examples

from flowkit.adapters.tasks.fields import new_task
from flowkit.adapters.tasks.store import TaskStore
from flowkit.client import TaskClient
from flowkit.errors import GraphError
from flowkit.testing import memory_database


class Started(Exception):
    """Raised in place of starting the workflow; holds its arguments."""


class Client:
    """A fake of Temporal's client."""

    async def start_workflow(self, name: str, given: dict[str, Any], **options: Any) -> None:
        """Raise Started with the arguments."""
        raise Started(given, options["id"])


class UnsupportedObject:
    """A value that is neither JSON nor text."""

    def __repr__(self) -> str:
        return "odd\nobject"


GOOD: dict[str, Any] = {
    "name": "good",
    "on_node_failure": "fail",
    "edges": [["a", "b"]],
    "edges_ex": [{"from": "a", "to": "b"}],
    "nodes": [
        {"node_id": "a", "type": "t", "meta": {"k": [1]}, "timeout_sec": 1.5},
        {
            "node_id": "b",
            "type": "coordinator_fn",
            "depends_on": ["a"],
            "fan_in": "count:1",
            "io": {"fn": "vars.set", "fn_args": {"kv": {"x": 1}}, "input_inline": {"y": None}},
            "retry_policy": {"max": 1, "backoff_sec": 0.1, "permanent_on": ["x"]},
        },
    ],
}
UNSUPPORTED = st.sampled_from(
    [
        *(
            None,
            True,
            0,
            -1,
            2**63,
            -(2**63) - 1,
            10**400,
            10**4_000,
            float("nan"),
            float("inf"),
            1e308,
            5e-324,
        ),
        *("", "*", "a[0]", "\0", "\ud800", "\n", "x" * 300, b"", b"\xff", "count:0", "all"),
        *([], {}, (), set(), {1}, {1: 2}, {None: 1}, {"\0": 1}, {"\ud800": 1}, {"$gt": ""}, [[[]]]),
        *(
            UnsupportedObject(),
            UnsupportedObject,
            object(),
            Decimal(1),
            datetime.now(),
            1j,
            range(3),
            len,
            Exception("x\ny"),
        ),
    ]
)
VALUES = st.one_of(
    UNSUPPORTED, st.recursive(UNSUPPORTED, lambda inner: st.lists(inner, max_size=2), max_leaves=3)
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to everything in a graph."""
    pairs: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list):
        pairs = list(enumerate(value))
    return [path, *(place for key, inner in pairs for place in places(inner, (*path, key)))]


@st.composite
def graphs(draw: st.DrawFn) -> Any:
    """Generate valid graphs in which one or two parts are replaced or get a neighbor."""
    root = {"graph": copy.deepcopy(GOOD)}
    for _ in range(draw(st.integers(1, 2))):
        *above, last = draw(st.sampled_from([place for place in places(root) if place]))
        holder: Any = root
        for step in above:
            holder = holder[step]
        if isinstance(holder, dict) and draw(st.booleans()):
            holder[draw(st.sampled_from(["x-own", "other", "a\0b", "\ud800", ""]))] = copy.deepcopy(
                draw(VALUES)
            )
        else:
            holder[last] = copy.deepcopy(draw(VALUES))
    return root["graph"]


@settings(max_examples=examples(150))
@given(
    graph=graphs(),
    params=st.one_of(st.just({}), VALUES, st.dictionaries(st.text(max_size=3), VALUES, max_size=2)),
)
async def test_task_is_rejected_with_a_readable_message_or_can_be_stored(graph: Any, params: Any) -> None:
    client: Any = Client()
    tasks = TaskClient(client, TaskStore(memory_database()), queue="q")
    with pytest.raises((GraphError, Started)) as caught:
        await tasks.create_task(params=params, graph=graph)
    if isinstance(caught.value, GraphError):
        assert caught.value.problems
        for problem in caught.value.problems:
            assert problem.isprintable(), problem
            assert len(problem) < 700, problem
        return
    started, task_id = caught.value.args
    assert bson.encode(new_task(task_id, started["params"], started["graph"], 0.0))
