"""How a node with a coordinator function fails, and when it is retried."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.handler_runs import call, stored_node

from flowkit.coordinator.adapters import AdapterError
from flowkit.testing import run_graph

SOON = {"retry_policy": {"max": 2, "backoff_sec": 0.1}}


async def test_rejected_operation_fails_the_node_immediately_and_names_the_path() -> None:
    run = await run_graph(
        {
            "nodes": [
                call("one", "vars.set", args={"a": 1, "secret": "hunter2hunter2"}),
                call("two", "vars.incr", "one", args={"key": "secret"}, **SOON),
            ]
        }
    )
    reported = str(run.reason)
    assert "adapter_error: vars.incr: coordinator.vars.secret holds a str, not a number" in reported
    assert "hunter2" not in reported
    failed = await stored_node(run, "two")
    assert (failed["status"], failed["attempt_epoch"]) == ("failed", 1)
    assert failed["started_at"]
    assert run.vars == {"a": 1, "secret": "hunter2hunter2"}


@pytest.mark.parametrize(
    ("fn", "args", "reported"),
    [
        (
            "vars.incr",
            {},
            "io.fn_args do not match the parameters of 'vars.incr': missing a required argument: 'key'",
        ),
        ("vars.incr", {"key": "n", "step": 2}, "unexpected keyword argument 'step'"),
        ("vars.incr", {"key": "a.$b"}, "'coordinator.vars.a.$b' has a segment that begins with '$'"),
        ("merge.generic", {"from_nodes": ["x"]}, "'target' must be a dict, not null"),
        ("merge.generic", {"from_nodes": ["x"], "target": "y"}, "'target' must be a dict, not a str"),
        ("metrics.aggregate", {"node_id": "ghost"}, "has no node 'ghost'"),
    ],
)
async def test_invalid_arguments_are_never_retried(fn: str, args: dict[str, Any], reported: str) -> None:
    run = await run_graph({"nodes": [call("only", fn, args=args, **SOON)]})
    assert reported in str(run.reason)
    assert run.nodes["only"].attempts == 1


async def test_other_errors_follow_the_retry_policy_of_the_node() -> None:
    calls: list[int] = []

    async def flaky(task_id: str) -> None:
        calls.append(len(calls))
        if len(calls) < 3:
            raise KeyError("not yet")

    run = await run_graph({"nodes": [call("f", "flaky", **SOON)]}, functions={"flaky": flaky})
    assert run.status == "finished"
    assert run.nodes["f"].attempts == len(calls) == 3


@pytest.mark.parametrize(
    ("args", "reported"),
    [
        ({"limit": 3}, "adapter_error: limit 3 is too low"),
        ({"limits": 3}, "io.fn_args do not match the parameters of 'rejecting'"),
    ],
)
async def test_function_can_fail_permanently(args: dict[str, Any], reported: str) -> None:
    async def rejecting(task_id: str, limit: int) -> None:
        raise AdapterError(f"limit {limit} is too low")

    run = await run_graph(
        {"nodes": [call("p", "rejecting", args=args, **SOON)]}, functions={"rejecting": rejecting}
    )
    assert reported in str(run.reason)
    assert run.nodes["p"].attempts == 1
