"""Every field of the graph language has its place in a flow: the JSON Schema of graphs says which there are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from flowkit import Flow, cel
from flowkit.graph.submission import validate_input
from flowkit.models import RUNTIME_KEYS
from flowkit.schema import graph_schema

if TYPE_CHECKING:
    from flowkit.flow import FlowNode

AnyFlow = Flow[dict[str, Any]]
Program = Callable[[AnyFlow], object]


def pulling(flow: AnyFlow, **given: Any) -> FlowNode:
    """Create a node that pulls."""
    first = flow.external("a", "role")
    return flow.external("b", "role").pulls(first, **given)


def rechunking(flow: AnyFlow, **given: Any) -> object:
    """Create a node that pulls chunks."""
    first = flow.external("a", "role")
    return flow.external("b", "role").rechunks(first, size=2, **given)


def routing(flow: AnyFlow, **given: Any) -> object:
    """Create a node that starts another one."""
    first = flow.external("a", "role")
    return first.routes(**{key: [flow.external(key, "role")] for key in given})


def node(change: Callable[[Any], object]) -> Program:
    """Return a program with one node."""
    return lambda flow: change(flow.external("a", "role"))


def edge(**given: Any) -> Program:
    """Return a program with one edge."""

    def program(flow: AnyFlow) -> object:
        first = flow.external("a", "role")
        return flow.external("b", "role").after(first, **given)

    return program


MOMENT = datetime(2026, 1, 31, 6, tzinfo=UTC)
PLACES: dict[str, Program] = {
    "nodes[].node_id": node(lambda each: each),
    "nodes[].type": node(lambda each: each),
    "nodes[].depends_on": edge(),
    "nodes[].fan_in": node(lambda each: each.gate("any")),
    "nodes[].when": node(lambda each: each.when("true")),
    "nodes[].timeout_sec": node(lambda each: each.timeout(timedelta(minutes=1))),
    "nodes[].deadline_sec": node(lambda each: each.deadline(60)),
    "nodes[].hold_sec": node(lambda each: each.holds(60)),
    "nodes[].hold_on_failure": node(lambda each: each.holds()),
    "nodes[].allow_failure": node(lambda each: each.allow_failure()),
    "nodes[].prerequisites": node(lambda each: each.needs("data:eu")),
    "nodes[].parallel": lambda flow: pulling(flow).parallel(3),
    "nodes[].name": node(lambda each: each.named("Import")),
    "nodes[].meta": node(lambda each: each.meta(owner="data")),
    "nodes[].x-own": node(lambda each: each.extra({"x-own": 1})),
    "nodes[].map.over": node(lambda each: each.maps("params.cities", dict)),
    "nodes[].map.batch_size": node(lambda each: each.maps("params.cities", dict, batch_size=2)),
    "nodes[].map.parallel": node(lambda each: each.maps("params.cities", dict, parallel=2)),
    "nodes[].map.x-own": node(lambda each: each.maps("params.cities", dict).extra({"x-own": 1}, at="map")),
    "nodes[].on_batch_failure.attempts": node(lambda each: each.quarantine(attempts=2)),
    "nodes[].on_batch_failure.max": node(lambda each: each.quarantine(max="5%")),
    "nodes[].on_batch_failure.then": node(lambda each: each.quarantine()),
    "nodes[].on_batch_failure.x-own": node(
        lambda each: each.quarantine().extra({"x-own": 1}, at="on_batch_failure")
    ),
    "nodes[].routing.on_success": lambda flow: routing(flow, on_success=1),
    "nodes[].routing.on_failure": lambda flow: routing(flow, on_failure=1),
    "nodes[].routing.x-own": node(lambda each: each.extra({"x-own": 1}, at="routing")),
    "nodes[].retry_policy.max": node(lambda each: each.retry(2)),
    "nodes[].retry_policy.backoff_sec": node(lambda each: each.retry(backoff_sec=timedelta(seconds=1.5))),
    "nodes[].retry_policy.backoff_coefficient": node(lambda each: each.retry(backoff_coefficient=2)),
    "nodes[].retry_policy.max_backoff_sec": node(lambda each: each.retry(max_backoff_sec=600)),
    "nodes[].retry_policy.jitter": node(lambda each: each.retry(jitter=0.5)),
    "nodes[].retry_policy.permanent_on": node(lambda each: each.retry(permanent_on=["bad_input"])),
    "nodes[].retry_policy.x-own": node(lambda each: each.extra({"x-own": 1}, at="retry_policy")),
    "nodes[].io.input_inline": node(lambda each: each.input(day=cel("params.day"))),
    "nodes[].io.input_ref": node(lambda each: each.input_ref(path="x")),
    "nodes[].io.batching": node(lambda each: each.batching(size=2)),
    "nodes[].io.max_ahead": node(lambda each: each.max_ahead(100)),
    "nodes[].io.start_when": lambda flow: pulling(flow, streaming="first_batch"),
    "nodes[].io.fn": lambda flow: flow.function("a", "noop"),
    "nodes[].io.fn_args": lambda flow: flow.function("a", "noop", day=cel("params.day")),
    "nodes[].io.x-own": node(lambda each: each.extra({"x-own": 1}, at="io")),
    "nodes[].io.input_inline.input_adapter": pulling,
    "nodes[].io.input_inline.input_args": rechunking,
    "nodes[].io.input_inline.input_args.from_nodes": lambda flow: pulling(flow, waits=False),
    "nodes[].io.input_inline.input_args.poll_ms": lambda flow: pulling(flow, poll_ms=cel("params.poll")),
    "nodes[].io.input_inline.input_args.backoff_max_ms": lambda flow: pulling(flow, backoff_max_ms=9),
    "nodes[].io.input_inline.input_args.eof_on_task_done": lambda flow: pulling(flow, eof_on_task_done=False),
    "nodes[].io.input_inline.input_args.size": rechunking,
    "nodes[].io.input_inline.input_args.meta_list_key": lambda flow: rechunking(flow, list_key="items"),
    "nodes[].io.input_inline.text": lambda flow: flow.approval("a", "Publish?"),
    "nodes[].io.input_inline.default": lambda flow: flow.approval("a", default="approve"),
    "nodes[].io.input_inline.sec": lambda flow: flow.delay("a", timedelta(hours=1)),
    "nodes[].io.input_inline.until": lambda flow: flow.delay("a", until=MOMENT),
    "nodes[].io.input_inline.x-own": node(lambda each: each.input(**{"x-own": 1})),
    "edges_ex[].from": edge(when="true"),
    "edges_ex[].to": edge(streaming=True, is_edge=True),
    "edges_ex[].mode": edge(streaming=True),
    "edges_ex[].when": edge(when=cel("true")),
}
FIELDS: dict[str, AnyFlow] = {
    "name": Flow("nightly"),
    "on_node_failure": Flow("nightly", on_node_failure="hold"),
    "deadline_sec": Flow("nightly", deadline_sec=timedelta(hours=1)),
    "hold_sec": Flow("nightly", hold_sec=60),
    "version_policy": Flow("nightly", version_policy="pin"),
    "params_schema": Flow("nightly", params_schema={"type": "object"}),
    "owner": Flow("nightly", extra={"owner": "data"}),
}
OTHER_SPELLINGS = {"edges[]", "edges_ex[].on_batch", "nodes[].io.input_inline.input_args.from_node"}
"""Fields that a flow writes as `depends_on`, as `mode` and as `from_nodes`."""


def walk(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield the paths of all fields in a JSON Schema that have no fields of their own."""
    below = [*_list_below(schema)]
    found = [each for key, inner in below for each in walk(inner, f"{path}.{key}".lstrip("."))]
    arrays = schema.get("items")
    if isinstance(arrays, dict) and ("properties" in arrays or "items" in arrays):
        found += [*walk(arrays, f"{path}[]")]
    yield from found or [path]


def _list_below(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    if set(schema.get("required", ())) == {"$cel"}:
        return  # a value by expression, in place of another value
    for key, inner in schema.get("properties", {}).items():
        if key not in RUNTIME_KEYS and inner != {"type": "null"}:
            yield key, inner
    if "^x-" in schema.get("patternProperties", {}):
        yield "x-own", {}
    branches = [*schema.get("anyOf", ()), *schema.get("allOf", ()), schema.get("then", {})]
    for each in branches:
        yield from _list_below(each) if each else ()


def has(value: Any, path: str) -> bool:
    """Return whether a graph has a field."""
    key, _, rest = path.partition(".")
    name, is_list = key.removesuffix("[]"), key.endswith("[]")
    if not isinstance(value, dict) or name not in value:
        return False
    parts = value[name] if is_list else [value[name]]
    return not rest or any(has(each, rest) for each in parts)


def test_every_field_of_a_graph_has_its_place_in_a_flow() -> None:
    fields = {*walk(graph_schema())}
    assert len(fields) > 50
    assert fields - {*PLACES, *FIELDS, *OTHER_SPELLINGS} == set()


@pytest.mark.parametrize("path", [*PLACES, *FIELDS])
def test_a_flow_writes_the_field_and_reads_it_back(path: str) -> None:
    flow = FIELDS.get(path) or Flow("nightly")
    PLACES.get(path, node(lambda each: each))(flow)
    graph = flow.to_dict()
    assert has(graph, path), graph
    assert json.dumps(Flow.from_dict(graph).to_dict()) == json.dumps(graph)
    assert validate_input("t", {"graph": graph}).nodes
