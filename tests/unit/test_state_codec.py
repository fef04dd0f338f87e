"""The state that a task passes to the next run of its workflow."""

from __future__ import annotations

import base64
import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from tests.unit import largest_tasks
from tests.unit.graphs import one
from tests.unit.property_examples import examples

from flowkit.limits import CARRIED_STATE_BYTES, TASK_INPUT_BYTES
from flowkit.models import (
    NodeState,
    NodeStatus,
    Opened,
    Settings,
    SkipReason,
    StatusChange,
    StoredGraph,
    columns,
)
from flowkit.models.actions import ActionState, AppliedAction, PausedScope
from flowkit.workflows import state_codec
from flowkit.workflows.payloads import json_size
from flowkit.workflows.state_codec import (
    TaskState,
    columns_of,
    encode_state,
    is_state,
    parse_state,
    states_of,
)

HISTORIES = Path(__file__).parents[1] / "replay" / "histories"
NOW = 1_763_788_905.123456

LARGEST_PAYLOAD = 1_900_000
"""Temporal rejects payloads of 2 MB."""


def state(nodes: list[NodeState] | None = None, graph: dict[str, Any] | None = None) -> TaskState:
    """Return a state in which every field is set."""
    return TaskState(
        params={"p": [1, None, {"deep": 0.5}]},
        graph=graph or one(),
        opened=Opened(
            run_seq=3,
            settings=Settings(queue="q", window=7, search_attributes=("FlowkitStatus",), inline_roles=("a",)),
            created_at=12.5,
        ),
        nodes=nodes
        or [
            NodeState(
                status=NodeStatus.SKIPPED,
                epoch=2,
                generation=1,
                failures=1,
                losses=1,
                settled=7,
                yields=4,
                failed_batches=2,
                free=True,
                streamed=True,
                ordinary=True,
                evaluated=True,
                kept=True,
                next_retry_at=99.25,
                last_error="flaky: no",
                reason_code="flaky",
                skip_reason=SkipReason.UPSTREAM_FAILED,
                condition=False,
                edges={0: True, 7: False},
                deadline_at=NOW,
                retry_left=0.5,
                deadline_left=7.25,
                first_epoch=4,
                held_until=1_800_000_000.5,
                waits_since=1_700_000_000.5,
            )
        ],
        status_history=[StatusChange(from_=None, to="queued", at=1.0)],
        status_history_omitted=2,
        actions=ActionState(
            applied=[AppliedAction(revision=7, action="pause", at=NOW, by="ada", what="task", update_id="u")],
            paused=[PausedScope(scope="task", since=NOW, reason="release")],
            stopped_at=NOW,
            stopped_sec=2.5,
        ),
        versions={"crawler": {"1.4": "w-1", "1.5": "w-2"}},
        pins={"crawler": "1.4"},
        recorded_at=NOW,
    )


def carried(given: TaskState) -> TaskState:
    """Return `given` as the next run receives it."""
    sent = json.loads(json.dumps(encode_state(given)))
    assert is_state(sent)
    return parse_state(sent)


def test_state_passed_to_the_next_run_is_complete() -> None:
    assert carried(state()) == state()
    assert carried(carried(state())) == state()


def test_epochs_of_earlier_runs_are_used_once_and_not_passed_on() -> None:
    given = state()
    given.opened = dataclasses.replace(given.opened, epochs=[4])
    assert carried(given) == state()


@pytest.mark.parametrize("given", [None, "opened", ["opened"], {}, {"params": {}, "graph": {}}])
def test_input_of_a_client_is_not_a_state(given: object) -> None:
    assert not is_state(given)


@pytest.mark.parametrize("number", [1, 2])
def test_states_of_recorded_histories_can_be_read_and_passed_on(number: int) -> None:
    events = json.loads((HISTORIES / f"continue_as_new-{number}.json").read_text())["events"]
    found = [
        json.loads(base64.b64decode(attributes["input"]["payloads"][0]["data"]))
        for event in events
        for name, attributes in event.items()
        if name.startswith("workflowExecution") and isinstance(attributes, dict) and "input" in attributes
    ]
    states = [parse_state(each) for each in found if is_state(each)]
    assert states
    assert all(carried(each) == each for each in states)


NODES = st.builds(
    NodeState,
    status=st.sampled_from(NodeStatus),
    epoch=st.integers(0, 10**6),
    generation=st.integers(0, 3),
    failures=st.integers(0, 10**6),
    losses=st.integers(0, 6),
    yields=st.integers(0, 10**6),
    failed_batches=st.integers(0, 10**6),
    free=st.booleans(),
    streamed=st.booleans(),
    next_retry_at=st.none() | st.floats(1, 1e12),
    last_error=st.none() | st.text(min_size=1, max_size=30),
    reason_code=st.none() | st.text(min_size=1, max_size=10),
    skip_reason=st.none() | st.sampled_from(SkipReason),
    condition=st.none() | st.booleans(),
    edges=st.dictionaries(st.integers(0, 5_000), st.booleans(), max_size=3),
    deadline_at=st.none() | st.floats(1, 1e12),
    retry_left=st.none() | st.floats(0.001, 1e9),
    deadline_left=st.none() | st.floats(0.001, 1e9),
    first_epoch=st.integers(0, 9),
    held_until=st.none() | st.floats(1, 1e12) | st.just(-1.0),
    waits_since=st.none() | st.floats(1, 1e12),
)


def test_stored_graph_is_only_referred_to() -> None:
    stored = StoredGraph(graph_id="0f", parts=2, size=1_234_567, deployment="db-1")
    given = dataclasses.replace(state(), stored=stored)
    sent = json.loads(json.dumps(encode_state(given)))
    assert "task" not in sent
    assert parse_state(sent, {"graph": given.graph, "params": given.params}) == given


@settings(max_examples=examples(80))
@given(nodes=st.lists(NODES, min_size=1, max_size=30))
def test_every_node_state_round_trips(nodes: list[NodeState]) -> None:
    assert carried(state(nodes)) == state(nodes)


def test_every_status_and_reason_has_its_own_letter() -> None:
    assert set(columns.STATUS_LETTERS) == set(NodeStatus)
    assert set(state_codec._REASON_LETTERS) == {None, *SkipReason}
    for letters in (columns.STATUS_LETTERS, state_codec._REASON_LETTERS):
        assert len(set(letters.values())) == len(letters)


def test_every_field_of_a_node_has_a_column() -> None:
    names = {each.name for each in dataclasses.fields(NodeState)} - {"wait"}  # the next run sets it again
    assert columns_of(state().nodes, 10**6).keys() - {"texts"} == names


SIZES: list[tuple[str, NodeState]] = [
    ("new", NodeState()),
    ("finished", NodeState(status=NodeStatus.FINISHED, epoch=1)),
    ("skipped", NodeState(status=NodeStatus.SKIPPED, skip_reason=SkipReason.UPSTREAM_FAILED)),
    ("failed", NodeState(status=NodeStatus.FAILED, epoch=3, failures=3, reason_code="flaky")),
    ("waits", NodeState(status=NodeStatus.DEFERRED, epoch=9, failures=9, reason_code="flaky", next_retry_at=NOW)),
]  # fmt: skip


@pytest.mark.parametrize("node", [row[1] for row in SIZES], ids=[row[0] for row in SIZES])
def test_node_without_an_error_takes_at_most_forty_bytes(node: NodeState) -> None:
    assert json_size(columns_of([node] * 5_000, 10**6)) <= 40 * 5_000


def test_equal_errors_are_passed_on_once_and_complete() -> None:
    error = "connection refused: " + "é" * 1_900
    nodes = [NodeState(status=NodeStatus.FAILED, last_error=error, reason_code="away") for _ in range(5_000)]
    assert carried(state(nodes)).nodes == nodes


@cache
def carried_at_the_edge(alphabet: str, chars: int) -> tuple[TaskState, dict[str, Any]]:
    """Return 5,000 failed nodes and their encoded state."""
    given = state(largest_tasks.all_failed(5_000, chars=chars, alphabet=alphabet), largest_tasks.many_nodes())
    return given, encode_state(given)


EDGES = [(largest_tasks.FOUR_BYTES, 2_000), (largest_tasks.ASCII, 500)]


@pytest.mark.parametrize(("alphabet", "chars"), EDGES, ids=["emoji", "ascii"])
def test_largest_state_fits_into_a_payload(alphabet: str, chars: int) -> None:
    given, sent = carried_at_the_edge(alphabet, chars)
    assert json_size(given.graph) + json_size(given.params) <= TASK_INPUT_BYTES
    assert json_size({**sent, "task": None}) <= CARRIED_STATE_BYTES
    assert json_size(sent) <= LARGEST_PAYLOAD
    assert len(TypeAdapter(TaskState).dump_json(given)) > LARGEST_PAYLOAD, "it fits anyway"


@pytest.mark.parametrize(("alphabet", "chars"), EDGES, ids=["emoji", "ascii"])
def test_only_long_texts_of_the_largest_state_are_truncated(alphabet: str, chars: int) -> None:
    given, sent = carried_at_the_edge(alphabet, chars)
    read = parse_state(json.loads(json.dumps(sent)))
    bare: dict[str, Any] = {"last_error": None, "reason_code": None}
    assert [dataclasses.replace(node, **bare) for node in read.nodes] == [
        dataclasses.replace(node, **bare) for node in given.nodes
    ]
    assert (read.graph, read.params, read.opened) == (given.graph, given.params, given.opened)
    for before, after in zip(given.nodes, read.nodes, strict=True):
        assert before.last_error
        assert after.last_error
        assert after.last_error.endswith("…")
        assert before.last_error.startswith(after.last_error[:-1])


def test_largest_columns_fit_into_their_budget() -> None:
    nodes = largest_tasks.all_failed(2_000)
    assert json_size(columns_of(nodes, 300_000)) <= 300_000
    assert [node.status for node in states_of(columns_of(nodes, 0))] == [NodeStatus.FAILED] * 2_000


def test_graph_is_compressed_unless_that_makes_it_larger() -> None:
    usual = encode_state(
        state(graph={"nodes": [{"node_id": f"node-{i}", "type": "crawler"} for i in range(500)]})
    )
    assert json_size(usual["task"]) < 500 * 10
    assert encode_state(state())["task"] == {"json": {"graph": one(), "params": state().params}}
    noise = base64.b85encode(bytes(range(256)) * 40).decode()
    dense = columns.pack([noise[i : i + 900] for i in range(0, 3_000, 900)])
    assert columns.unpack(dense) == [noise[i : i + 900] for i in range(0, 3_000, 900)]
