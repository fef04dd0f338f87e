"""Tasks that a plain Temporal client starts: valid ones run, and invalid ones fail immediately with a
helpful message."""

from __future__ import annotations

import asyncio
import json
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.api.common.v1 import Payload
from temporalio.api.enums.v1 import EventType
from temporalio.client import WorkflowFailureError
from temporalio.common import RawValue
from temporalio.exceptions import ApplicationError

from flowkit import limits
from flowkit.errors import GraphError
from flowkit.local.temporal import temporal_cli
from tests.integration.harness import EVENT_TIMEOUT_SEC, node
from tests.unit.graphs import one, two
from tests.unit.test_validation import BAD_FIELDS, BAD_GRAPHS, ID_RULE, ROLE_RULE

if TYPE_CHECKING:
    from temporalio.client import Client

    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

FAILURE_TIMEOUT_SEC = EVENT_TIMEOUT_SEC
"""Seconds for all errors of a test together, on a busy machine."""


@dataclass(frozen=True)
class InvalidStart:
    """An invalid start, and the expected text of its error."""

    reported: list[str]
    given: list[Any] = field(default_factory=list)
    """Arguments of the workflow."""
    types: tuple[str, ...] = ("invalid_graph",)
    """Allowed types of the error."""


def bad(graph: object, *reported: str, params: object = None) -> InvalidStart:
    """Return an invalid start whose outer structure is valid."""
    return InvalidStart(list(reported), [{"params": {} if params is None else params, "graph": graph}])


def function(name: str) -> dict[str, Any]:
    """Return a graph of one node that calls a coordinator function."""
    return {"nodes": [{"node_id": "call", "type": "coordinator_fn", "io": {"fn": name}}]}


LONG = "x" * limits.NODE_IO_BYTES

MALFORMED: dict[str, InvalidStart] = {
    "no_input": InvalidStart(["input of a task is", "'None'"]),
    "null": InvalidStart(["input of a task is", "'None'"], [None]),
    "text": InvalidStart(["input of a task is", "'graph'", '"graph": {...}'], ["graph"]),
    "number": InvalidStart(["input of a task is", "'7'"], [7]),
    "list": InvalidStart(["input of a task is", "[{'params'"], [[{"params": {}, "graph": one()}]]),
    "empty": InvalidStart(["has no 'graph'"], [{}]),
    "graph_missing": InvalidStart(["has no 'graph'"], [{"params": {}}]),
    "graph_number": InvalidStart(["graph", "7", "object with 'nodes'"], [{"graph": 7}]),
    "graph_misspelt": InvalidStart(
        ["unknown key 'grahp'", "mean 'graph'?", "no 'graph'"], [{"grahp": one()}]
    ),
    "unknown_key": InvalidStart(
        ["unknown key 'zzz'", "takes 'params' and 'graph'"], [{"params": {}, "graph": one(), "zzz": 1}]
    ),
    "params_number": InvalidStart(["params", "7", "object"], [{"params": 7, "graph": one()}]),
    "two_inputs": InvalidStart(["takes one input", "not 2"], [{}, {"graph": one()}]),
    "state_forged": InvalidStart(["unknown key 'opened'"], [{"graph": one(), "opened": {}}]),
    "stored_forged": InvalidStart(["stored_graph", "only create_task"], [{"stored_graph": {"parts": 1}}]),
    "stored_text": InvalidStart(["unknown key 'stored_graph'"], [{"stored_graph": "x"}]),
    "input_large": bad(one(), "1,0", "bytes", "1,000,000", "create_task", params={"p": "x" * 1_000_000}),
}

GRAPHS: dict[str, InvalidStart] = {
    **{f"field_{name}": bad(two(**fields), "load", *reported) for name, fields, reported in BAD_FIELDS},
    **{f"graph_{name}": bad(graph, *reported) for name, graph, reported in BAD_GRAPHS},
    "id_star": bad({"nodes": [node("*")]}, "'*'", ID_RULE),
    "id_element": bad({"nodes": [node("a[0]")]}, "'a[0]'", ID_RULE, "not ending in '[number]'"),
    "id_long": bad({"nodes": [node("a" * 201)]}, ID_RULE),
    "id_newline": bad({"nodes": [node("a\nb")]}, r"'a\nb'", ID_RULE),
    "id_number": bad({"nodes": [{"node_id": 7, "type": "t"}]}, "graph.nodes[0]", "7", ID_RULE),
    "role": bad(one(type="a b"), "node 'extract'", "type", "'a b'", ROLE_RULE),
    "role_long": bad(one(type="a" * 101), "node 'extract'", "type", ROLE_RULE),
    "function_typo": bad(function("nooop"), "node 'call'", "io.fn", "'nooop'", "did you mean 'noop'?"),
    "function": bad(function("zzzz"), "node 'call'", "io.fn", "'zzzz'", "known here: merge.generic"),
    "io_large": bad(one(io={"input_ref": {"key": LONG}}), "'extract'", "io is 64,", "more than 64,000"),
    "nodes_many": bad({"nodes": [node(f"n{i}") for i in range(5_001)]}, "5,001", "5,000", "split"),
}


async def start(client: Client, harness: Harness, workflow_id: str, given: list[Any]) -> None:
    """Start a task as any Temporal client could."""
    await client.start_workflow("Task", args=given, id=workflow_id, task_queue=harness.queue)


async def refusal_of(client: Client, workflow_id: str) -> ApplicationError:
    """Return the error of the failed workflow. Raise AssertionError if the workflow did not fail."""
    handle = client.get_workflow_handle(workflow_id)
    try:
        result = await asyncio.wait_for(handle.result(), FAILURE_TIMEOUT_SEC)
    except WorkflowFailureError as error:
        assert isinstance(error.cause, ApplicationError), f"failed with {error.cause!r}"
        return error.cause
    except TimeoutError:
        history = await handle.fetch_history()
        failures = [e.workflow_task_failed_event_attributes.failure.message for e in history.events]
        raise AssertionError(f"still open; workflow task failures: {list(filter(None, failures))}") from None
    raise AssertionError(f"ran to its end: {result}")


async def problem_of(client: Client, workflow_id: str, case: InvalidStart) -> str:
    """Return what is wrong with the error of `case`, or an empty string."""
    try:
        error = await refusal_of(client, workflow_id)
    except AssertionError as failed:
        return str(failed)
    missing = [part for part in case.reported if part not in error.message]
    history = await client.get_workflow_handle(workflow_id).fetch_history()
    if missing or error.type not in case.types or not error.non_retryable:
        return f"{error.type}: {error.message[:300]!r} lacks {missing}"
    has_failed = any(
        event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED for event in history.events
    )
    return "a workflow task failed" if has_failed else ""


@pytest.mark.parametrize("cases", [MALFORMED, GRAPHS], ids=["outer_shape", "graph"])
async def test_invalid_start_fails_immediately_with_a_message_and_writes_nothing(
    harness: Harness, cases: dict[str, InvalidStart]
) -> None:
    harness.settings["max_nodes"] = 5_000
    await harness.engine()
    client = await harness.client()
    ids = {name: f"{harness.queue}-{name}" for name in cases}
    await asyncio.gather(*(start(client, harness, ids[name], case.given) for name, case in cases.items()))
    found = await asyncio.gather(*(problem_of(client, ids[name], case) for name, case in cases.items()))
    assert {name: problem for name, problem in zip(cases, found, strict=True) if problem} == {}
    assert await harness.db.tasks.count_documents({}) == 0


@pytest.mark.slow
async def test_workflow_and_create_task_reject_a_graph_with_the_same_text(harness: Harness) -> None:
    harness.settings["max_nodes"] = 5_000
    await harness.engine()
    client = await harness.client()
    cases = {**GRAPHS, "params": MALFORMED["params_number"], "graph": MALFORMED["graph_number"]}
    differing = {}
    for name, case in cases.items():
        workflow_id = f"{harness.queue}-{name}"
        await start(client, harness, workflow_id, case.given)
        given = {"params": {}, **case.given[0]}
        with pytest.raises(GraphError) as caught:
            await harness.coordinator.create_task(**given)
        refused = await refusal_of(client, workflow_id)
        if str(caught.value) != refused.message:
            differing[name] = (str(caught.value), refused.message)
    assert differing == {}
    assert await harness.db.tasks.count_documents({}) == 0


async def test_node_limit_of_the_engine_applies_to_a_plain_start(harness: Harness) -> None:
    harness.settings["max_nodes"] = 1
    await harness.engine()
    client = await harness.client()
    await start(client, harness, harness.queue, [{"graph": two()}])
    assert "2 entries, more than 1: split the task" in (await refusal_of(client, harness.queue)).message


async def test_temporal_cli_starts_a_task_that_completes(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    graph = {"nodes": [node("a"), node("b", "quick", "a")]}
    command = [
        *(temporal_cli(), "workflow", "start", "--type", "Task", "--task-queue", harness.queue),
        *("--workflow-id", harness.queue, "--input", json.dumps({"params": {"who": "cli"}, "graph": graph})),
    ]
    started = await asyncio.to_thread(
        subprocess.run,
        command,
        env=harness.environment,
        capture_output=True,
        text=True,
        timeout=EVENT_TIMEOUT_SEC,
    )
    assert started.returncode == 0, started.stderr
    assert (await harness.result(harness.queue)).status == "finished"
    document = await harness.document(harness.queue)
    assert (document["status"], document["params"]) == ("finished", {"who": "cli"})
    assert await harness.statuses(harness.queue) == {"a": "finished", "b": "finished"}


@pytest.mark.parametrize("workflow_id", ["*", "i" * 201], ids=["star", "201_characters"])
async def test_invalid_workflow_id_fails_and_writes_nothing(harness: Harness, workflow_id: str) -> None:
    await harness.engine()
    client = await harness.client()
    await start(client, harness, workflow_id, [{"graph": {"nodes": [node("a")]}}])
    error = await refusal_of(client, workflow_id)
    assert error.type == "invalid_graph"
    for part in ("task id", workflow_id[:79], "1 to 200 characters", "not '*'"):
        assert part in error.message
    assert await harness.db.tasks.count_documents({}) == 0


async def test_task_with_the_longest_id_runs(harness: Harness) -> None:
    await harness.engine()
    task_id = (harness.queue + "-" * 200)[:200]
    await start(await harness.client(), harness, task_id, [{"graph": function("noop")}])
    assert (await harness.result(task_id)).status == "finished"
    assert (await harness.document(task_id))["status"] == "finished"


async def test_id_of_an_earlier_task_is_rejected_and_its_document_unchanged(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(node("a"))
    await harness.result(task_id)
    earlier = await harness.document(task_id)
    client = await harness.client()
    await start(client, harness, task_id, [{"graph": {"nodes": [node("other"), node("b")]}}])
    error = await refusal_of(client, task_id)
    assert (error.type, "id" in error.message) == ("task_id_taken", True)
    assert await harness.document(task_id) == earlier


def raw(data: bytes, encoding: bytes = b"json/plain") -> RawValue:
    """Return an argument in its encoded form."""
    return RawValue(Payload(metadata={"encoding": encoding}, data=data))


def meta(json_text: str) -> RawValue:
    """Return a graph with this JSON in its `meta`."""
    graph = '{"nodes": [{"node_id": "call", "type": "coordinator_fn", "meta": %s}]}'
    return raw(f'{{"graph": {graph % json_text}}}'.encode())


UNREADABLE: dict[str, list[Any]] = {
    "no_json": [raw(b"{graph")],
    "nothing": [raw(b"")],
    "other_encoding": [raw(b"abc", b"zzz/plain")],
    "half_a_surrogate": [meta(r'"\ud800"')],
    "deeply_nested": [meta("[" * 300 + "]" * 300)],
}
UNSTORABLE: dict[str, list[Any]] = {
    "long_integer": [meta("123456789012345678901234567890")],
    "zero_byte_in_a_key": [meta(r'{"a\u0000b": 1}')],
    "timeout_of_no_time": [{"graph": {"nodes": [{**function("noop")["nodes"][0], "timeout_sec": 1e-9}]}}],
    "endless_retries": [
        {"graph": {"nodes": [{**function("noop")["nodes"][0], "retry_policy": {"max": 1_000_000}}]}}
    ],
}
EXPECTED_TEXTS = {
    "long_integer": ["node 'call': graph.nodes[0].meta is 1234567890", "beyond MongoDB's 64-bit integers"],
    "zero_byte_in_a_key": ["node 'call': graph.nodes[0].meta.a\\x00b", "NUL", "rename the key"],
}


@pytest.mark.parametrize("cases", [UNREADABLE, UNSTORABLE], ids=["unreadable", "unstorable"])
async def test_input_that_cannot_be_decoded_or_stored_fails(
    harness: Harness, cases: dict[str, list[Any]]
) -> None:
    harness.settings["max_nodes"] = 5_000
    await harness.engine()
    client = await harness.client()
    ids = {name: f"{harness.queue}-{name}" for name in cases}
    await asyncio.gather(*(start(client, harness, ids[name], given) for name, given in cases.items()))
    found = await asyncio.gather(
        *(problem_of(client, ids[name], InvalidStart(EXPECTED_TEXTS.get(name, []))) for name in cases)
    )
    assert {name: problem for name, problem in zip(cases, found, strict=True) if problem} == {}
