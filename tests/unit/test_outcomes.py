"""Stubs for handlers, and what tests assert about the outcome of a task."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel
from tests.unit.handler_runs import node

from flowkit.errors import ConfigError
from flowkit.testing import run_graph, stub
from flowkit.worker import Batch, BatchResult, RoleHandler, RunContext, role

PULL = {"input_inline": {"input_adapter": "pull.from_artifacts"}}


class Price(BaseModel):
    """A result with a type."""

    euros: int


class Order(BaseModel):
    """An item with a type."""

    item: str


def shop(**price: Any) -> dict[str, Any]:
    """Return a graph that prices orders."""
    return {"nodes": [node("orders", "orders"), {**node("price", "pricer", "orders"), "io": PULL, **price}]}


ORDERS = [{"item": "tea"}, {"item": "pot"}]


async def test_a_stub_returns_the_same_for_each_batch() -> None:
    run = await run_graph(shop(), orders := stub("orders", yields=ORDERS), stub("pricer", Price(euros=4)))
    assert run.results("orders") == orders.calls == ORDERS
    assert run.results("price", Price) == [Price(euros=4)] * 2


async def test_a_function_returns_what_fits_the_item() -> None:
    prices = {"tea": 4, "pot": 30}

    async def look_up(item: dict[str, Any]) -> int:
        return prices[item["item"]]

    for price in (lambda item: prices[item["item"]], look_up):
        run = await run_graph(shop(), stub("orders", yields=ORDERS), stub("pricer", price))
        assert run.results("price") == [{"value": 4}, {"value": 30}]
        assert run.results("price", int) == [4, 30]


async def test_a_stub_fails_some_times() -> None:
    error = ConnectionError("the shop does not respond")
    retry = {"retry_policy": {"max": 1}}
    once = stub("pricer", {"euros": 4}, fails=error, times=1)
    run = await run_graph(shop(**retry), stub("orders", yields=ORDERS[:1]), once)
    run.assert_finished()
    run.node("price").assert_attempts(2)
    assert once.calls == [{"item": "tea"}] * 2
    always = stub("pricer", fails=ConnectionError)
    run = await run_graph(shop(**retry), stub("orders", yields=ORDERS), always)
    run.node("price").assert_failed(reason="unexpected_error")


async def test_the_item_of_a_node_without_parents_is_its_input() -> None:
    await run_graph({"nodes": [node("a", "a", inline={"n": 1})]}, alone := stub("a"))
    assert alone.calls == [{"n": 1}]


async def test_a_stub_for_no_node_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match="a stub is for role 'pricr', which no node has; the graph has orders"
    ):
        await run_graph({"nodes": [node("orders", "orders")]}, stub("orders"), stub("pricr"))


class Real(RoleHandler):
    """The handler of a flow."""

    role = "orders"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        return BatchResult(success=True, metrics={"item": "cup"})


async def test_a_flow_brings_its_handlers_and_functions_and_stubs_replace_them() -> None:
    async def close(task_id: str) -> None:
        closed.append(task_id)

    closed: list[str] = []
    graph = shop()
    graph["nodes"].append(
        {"node_id": "close", "type": "coordinator_fn", "depends_on": ["price"], "io": {"fn": "close"}}
    )
    handlers = {"orders": Real(), "pricer": stub("pricer", fails=ValueError)}
    flow = SimpleNamespace(to_dict=lambda: graph, handlers=handlers, functions={"close": close})
    run = await run_graph(flow, stub("pricer", {"euros": 4}), params=Order(item="cup"))
    run.assert_finished()
    assert run.results("orders") == [{"item": "cup"}]
    assert run.results(SimpleNamespace(node_id="price"), Price) == [Price(euros=4)]
    assert (closed, run.document["params"]) == ([run.task_id], {"item": "cup"})


async def test_a_failed_assertion_shows_the_graph_and_the_errors() -> None:
    graph = shop(retry_policy={"max": 0})
    run = await run_graph(
        graph, stub("orders", yields=ORDERS), stub("pricer", fails=ConnectionError("no price"))
    )
    with pytest.raises(AssertionError) as caught:
        run.assert_finished()
    assert str(caught.value) == (
        "the task is failed, not finished: node 'price' failed: unexpected_error: ConnectionError: no price\n"
        "\n"
        "┌─────────────────────┐   ┌─────────┐\n"
        "│ ✓ orders            │   │ ✕ price │\n"
        "│ orders              │   │ pricer  │\n"
        "│ finished, 2 batches │──▶│ failed  │\n"
        "└─────────────────────┘   └─────────┘\n"
        "\n"
        "price: unexpected_error: ConnectionError: no price"
    )


async def test_each_assertion_says_what_is_wrong() -> None:
    nodes = [node("a", "a"), node("b", "b", "a"), node("c", "a", "b"), node("d", "a", when="false")]
    run = await run_graph(
        {"nodes": nodes, "on_node_failure": "continue"}, stub("a"), stub("b", fails=ValueError("x"))
    )
    run.assert_failed("x")
    run.assert_skipped("c", "d")
    run.assert_order("a", "b")
    run.node("c").assert_skipped("upstream_failed")
    run.node("b").assert_failed(reason="bad_input", error="x")
    for problem, check in (
        ("node 'a' is finished, not failed", lambda: run.node("a").assert_failed()),
        ("node 'b' is failed, not finished", lambda: run.node("b").assert_finished()),
        ("node 'a' is finished, not cancelled", lambda: run.node("a").assert_cancelled()),
        ("node 'a' had 1 attempts, not 2", lambda: run.node("a").assert_attempts(2)),
        (
            "failed with 'bad_input', not with 'timeout'",
            lambda: run.node("b").assert_failed(reason="timeout"),
        ),
        ("which does not contain 'zz'", lambda: run.node("b").assert_failed(error="zz")),
        ("because of 'condition', not of 'user'", lambda: run.node("d").assert_skipped("user")),
        ("node 'a' is finished, not skipped", lambda: run.assert_skipped("a")),
        ("node 'a' began before node 'b' had ended", lambda: run.assert_order("b", "a")),
        ("node 'c' has not run", lambda: run.assert_order("b", "c")),
        ("this does not contain 'zz'", lambda: run.assert_failed("zz")),
        ("the task is failed, not cancelled", run.assert_cancelled),
        ("the graph has no node 'e'; its nodes are a, b, c and d", lambda: run.node("e")),
    ):
        with pytest.raises(AssertionError, match=problem):
            check()


async def test_the_item_of_a_map_is_one_of_its_items() -> None:
    mapped = node("a", "a", map={"over": "params.items"})
    got = stub("a", lambda item: {"got": item})
    run = await run_graph({"nodes": [mapped]}, got, params={"items": [1, {"n": 2}]})
    assert run.results("a") == [{"got": 1}, {"got": {"n": 2}}]


@role("pricer")
async def look_up(order: Order) -> Price:
    """Return a price, as a typed handler does."""
    return Price(euros=len(order.item))


async def test_stubs_stand_between_typed_handlers() -> None:
    total = stub("total")
    graph = shop()
    graph["nodes"].append({**node("total", "total", "price"), "io": PULL})
    run = await run_graph(graph, stub("orders", yields=[Order(item="tea")]), look_up, total)
    assert run.results("price", Price) == [Price(euros=3)]
    assert total.calls == [{"euros": 3}]


async def test_a_picture_of_a_large_graph_is_bounded_and_begins_with_what_has_not_finished() -> None:
    many = [node(f"n{number}", "a") for number in range(120)]
    bad = [node(f"bad{number}", "b", *(["n0"] if number == 0 else [])) for number in range(25)]
    graph = {"nodes": [*many, *bad], "on_node_failure": "continue"}
    run = await run_graph(graph, stub("a"), stub("b", fails=ValueError("no")))
    lines = run.picture().splitlines()
    assert lines[0] == "145 nodes in 2 layers"
    assert [line.split()[1] for line in lines[2:27]] == [*(f"bad{number}" for number in range(1, 25)), "bad0"]
    assert "n0" in lines[27]
    assert lines[100] == "… and 47 more lines"
    assert lines[-1] == "… and 5 more errors"
    assert len(lines) == 123
