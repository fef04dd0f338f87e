"""Values by expression on real servers: evaluated once, read by every attempt, and absent from the history."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf.json_format import MessageToDict

from flowkit.coordinator.adapters import CoordinatorAdapters
from flowkit.errors import GraphError
from flowkit.models import TaskStatus
from flowkit.worker import BatchResult
from tests.integration.handlers import ALL, Failing, InlineQuick
from tests.integration.harness import Harness, node
from tests.integration.test_cancel_terminate_reset import reset
from tests.integration.test_conditions import call, evaluations, servers
from tests.integration.test_continue_as_new import histories, replay
from tests.integration.test_large_graphs import run_ids

if TYPE_CHECKING:
    from flowkit.worker.context import RunContext

pytestmark = pytest.mark.server

ONCE: dict[str, Any] = {"retry_policy": {"max": 0}}
AGAIN: dict[str, Any] = {"retry_policy": {"max": 2, "backoff_sec": 0.1}}


def cel(text: str) -> dict[str, str]:
    """Return a value by expression."""
    return {"$cel": text}


class Reader(Failing):
    """Fails as `Failing` does, and returns its input, as hooks and the context have it."""

    role = "reader"

    async def load_input(self, input_ref: Any, input_inline: Any) -> Any:
        """Keep the whole input."""
        return {**(input_inline or {}), "whole": [input_ref, input_inline]}

    async def process_batch(self, batch: Any, ctx: RunContext) -> Any:
        """Fail, or return the input."""
        if "broken" in batch.payload:
            raise ValueError(f"no data for {batch.payload['broken']}")
        result = await super().process_batch(batch, ctx)
        seen = [batch.payload["whole"], ctx.input_inline]
        return BatchResult(success=True, metrics={"seen": seen}) if result.success else result


async def test_attempts_and_functions_read_values_that_no_history_has(harness: Harness) -> None:
    await harness.engine(handlers={"inline": InlineQuick()})
    await harness.worker({**ALL, "reader": Reader()})
    secret = {"text": cel("'pre-' + vars.text"), "failures": cel("vars.n"), "list": [cel("vars.list")]}
    task_id = await harness.create(
        call("set", "vars.set", text="fix", n=1, list=[1, {"a": None}]),
        {**node("a", "reader", "set", inline=secret, **AGAIN)},
        call("count", "vars.incr", "a", key="total", by=cel("vars.n + 6")),
        node("in", "inline", "count", inline={"batches": cel("vars.n + 1"), "failures": cel("1")}, **AGAIN),
        node(
            "torn",
            "reader",
            "set",
            inline={"broken": cel("vars.text + '-of-bad'")},
            allow_failure=True,
            **ONCE,
        ),
        node("lost", "reader", "set", inline={"x": {"y": cel("vars.text + vars.none")}}, allow_failure=True),
    )
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    (row,) = await harness.rows(task_id, "a")
    expected = {"text": "pre-fix", "failures": 1, "list": [[1, {"a": None}]]}
    assert row["metrics"]["seen"] == [[None, expected], expected]
    document = await harness.document(task_id)
    assert document["coordinator"]["vars"]["total"] == 7
    nodes = {each["node_id"]: each for each in document["graph"]["nodes"]}
    assert nodes["a"]["attempt_epoch"] == 2
    assert nodes["a"]["io"]["input_inline"] == secret
    assert nodes["lost"]["last_error"] == (
        'bad_expression: io.input_inline.x.y: Key not found in map: "none", '
        "in the expression vars.text + vars.none; vars.none is not set"
    )
    assert nodes["lost"]["attempt_epoch"] == 0
    assert "no data for (hidden), at tests/integration/test_expressions.py:" in nodes["torn"]["last_error"]
    found = await histories(harness, task_id)
    assert evaluations(found) == 5
    assert len(await harness.rows(task_id, "in")) == 2
    assert all(text not in decoded(found) for text in ("pre-fix", "fix-of-bad"))
    await replay(found)


def decoded(found: list[Any]) -> str:
    """Return all payloads of the histories as text."""
    return json.dumps([MessageToDict(event) for each in found for event in each.events]) + "".join(
        payload.data.decode(errors="replace")
        for each in found
        for event in each.events
        for payload in _payloads(event)
    )


def _payloads(event: Any) -> list[Any]:
    scheduled = event.activity_task_scheduled_event_attributes.input.payloads
    completed = event.activity_task_completed_event_attributes.result.payloads
    return [*scheduled, *completed]


async def test_values_pass_to_the_next_run(short_runs: Harness) -> None:
    await servers(short_runs)
    chain = [node(f"n{i}", "quick", f"n{i - 1}") for i in range(1, 25)]
    task_id = await short_runs.create(
        call("set", "vars.set", n=2),
        node("long", "failing", "set", inline={"batches": cel("vars.n"), "failures": 2}, **SLOWLY),
        node("n0", "quick", "set"),
        *chain,
    )
    assert (await short_runs.result(task_id)).status is TaskStatus.FINISHED
    assert len(await run_ids(short_runs, task_id)) > 1
    assert len(await short_runs.rows(task_id, "long")) == 2
    found = await histories(short_runs, task_id)
    assert evaluations(found) == 1
    await replay(found)


SLOWLY: dict[str, Any] = {"retry_policy": {"max": 2, "backoff_sec": 1}}


async def test_reset_evaluates_anew(harness: Harness) -> None:
    await servers(harness)
    task_id = await harness.create(
        call("set", "vars.set", n=1),
        node("a", "quick", "set"),
        node("b", "quick", "a", inline={"batches": cel("vars.n")}),
    )
    await harness.result(task_id)
    assert len(await harness.rows(task_id, "b")) == 1
    await CoordinatorAdapters(db=harness.db).vars_set(task_id, n=3)
    await reset(harness, task_id, "a")
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert len(await harness.rows(task_id, "b")) == 3


async def test_engine_rejects_params_that_do_not_match_the_schema(harness: Harness) -> None:
    await servers(harness)
    schema = {"type": "object", "required": ["day"], "properties": {"day": {"$ref": "#/$defs/day"}}}
    graph = {"nodes": [node("a")], "params_schema": {**schema, "$defs": {"day": {"type": "string"}}}}
    with pytest.raises(GraphError, match=r"params\.day: 5 is not of type 'string'"):
        await harness.coordinator.create_task(params={"day": 5}, graph=graph)
    task_id = await harness.coordinator.create_task(params={"day": "monday"}, graph=graph)
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert "params_schema" not in (await harness.document(task_id))["graph"]
