"""Nodes with `parallel` or `map`: what a graph may contain, and how commands show the progress of shards."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.graphs import pulling, refusal, two

from flowkit.adapters.shards import ShardProgress
from flowkit.errors import GraphError
from flowkit.graph.description import describe
from flowkit.graph.submission import validate_input
from flowkit.graph.validation import parse_graph
from flowkit.models import ItemMap, Quarantine
from flowkit.reading.state import describe_progress


def test_a_pulling_node_may_have_shards() -> None:
    graph = parse_graph(two(io=pulling(), parallel=20))
    assert [node.parallel for node in graph.nodes] == [1, 20]
    assert describe(graph)[1].differs == "up to 20 shards"


@pytest.mark.parametrize(
    ("graph", "problem"),
    [
        (two(parallel=2), "parallel is 2, but the node does not pull, so it has no batches to share"),
        (two(io=pulling(), parallel=0), "parallel 0 must be a whole number from 1 to 1,000"),
        (two(io=pulling(), parallel=1_001), "parallel 1001 must be a whole number from 1 to 1,000"),
        (two(io=pulling(), parallel=True), "parallel True must be a whole number"),
        ({**two(io=pulling(), parallel=2), "version_policy": "pin"}, "which shards do not support"),
    ],
)
def test_other_nodes_may_not(graph: dict[str, Any], problem: str) -> None:
    assert problem in str(refusal(graph))


def test_a_node_may_process_the_items_of_a_list() -> None:
    node = parse_graph(two(map={"over": "params.all", "batch_size": 10, "parallel": 3})).nodes[1]
    assert (node.map, node.parallel) == (ItemMap(over="params.all", batch_size=10), 3)
    assert node.expressions == (("map.over", "params.all"),)
    plain = parse_graph(two(map={"over": "[1]"}, io={"input_inline": {"day": {"$cel": "params.day"}}}))
    assert plain.nodes[1].parallel == 1
    assert [path for path, _ in plain.nodes[1].expressions] == ["io.input_inline.day", "map.over"]
    assert describe(plain)[1].differs.startswith("for each item of [1]")


ITEMS = {"over": "params.all"}


@pytest.mark.parametrize(
    ("graph", "problem"),
    [
        (two(map="params.all"), "must be an object with the key 'over'"),
        (two(map={}), "map {} must be an object with the key 'over'"),
        (two(map={"over": ""}), "map.over '' must be a CEL expression of 1 to 2,000 characters"),
        (two(map={**ITEMS, "size": 3}), "unknown key 'size'"),
        (two(map={**ITEMS, "batch_size": 0}), "map.batch_size 0 must be a whole number from 1 to 10,000"),
        (two(map={**ITEMS, "parallel": 1_001}), "map.parallel 1001 must be a whole number from 1 to 1,000"),
        (two(map=ITEMS, parallel=2), "set map.parallel in place of parallel"),
        (two(map=ITEMS, io=pulling()), "as io.input_inline.input_adapter does: remove one of them"),
        (two(map=ITEMS, type="coordinator_fn"), "needs a role, whose handler processes the items"),
        ({**two(map={**ITEMS, "parallel": 2}), "version_policy": "pin"}, "which shards do not support"),
    ],
)
def test_a_map_is_valid_or_rejected(graph: dict[str, Any], problem: str) -> None:
    assert problem in str(refusal(graph))


def test_a_node_may_set_batches_aside() -> None:
    given = {"attempts": 2, "then": "quarantine", "max": "2.5%"}
    node = parse_graph(two(on_batch_failure=given)).nodes[1]
    assert node.quarantine == Quarantine(attempts=2, most=None, share=0.025)
    assert parse_graph(two(on_batch_failure={"max": 7})).nodes[1].quarantine == Quarantine(most=7)
    assert parse_graph(two(on_batch_failure={})).nodes[1].quarantine == Quarantine()
    described = describe(parse_graph(two(on_batch_failure={"max": 7})))[1].differs
    assert "sets up to 7 batches aside that fail 3 times" in described


@pytest.mark.parametrize(
    ("graph", "problem"),
    [
        (two(on_batch_failure=3), "must be an object such as {'attempts': 3, 'then': 'quarantine'}"),
        (two(on_batch_failure={"tries": 3}), "unknown key 'tries'"),
        (two(on_batch_failure={"attempts": 0}), "attempts 0 must be a whole number from 1 to 100"),
        (two(on_batch_failure={"then": "drop"}), "then 'drop' must be 'quarantine'"),
        (two(on_batch_failure={"max": 0}), "max 0 must be a number of batches from 1 to 100,000, or a share"),
        (two(on_batch_failure={"max": "101%"}), "max '101%' must be a number of batches"),
        (two(on_batch_failure={"max": "0%"}), "max '0%' must be a number of batches"),
        (two(on_batch_failure={"max": 1}, type="approval"), "on_batch_failure needs a role"),
    ],
)
def test_a_rule_for_failed_batches_is_valid_or_rejected(graph: dict[str, Any], problem: str) -> None:
    assert problem in str(refusal(graph))


def test_the_list_may_read_only_what_a_condition_may() -> None:
    for over, problem in (
        ("params.", "map.over"),
        ("nodes['load'].status", "map.over"),
        ("'a'", None),
    ):
        given = {"graph": two(map={"over": over}), "params": {}}
        if problem is None:
            validate_input("t", given)
        else:
            with pytest.raises(GraphError, match=problem):
                validate_input("t", given)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"io": pulling(), "parallel": 2}, "parallel is 2, but type is the external role 'crawler'"),
        (
            {"on_batch_failure": {"max": 1}},
            "on_batch_failure is set, but type is the external role 'crawler'",
        ),
        ({"map": ITEMS}, "map is set, but type is the external role 'crawler'"),
    ],
)
def test_an_external_role_runs_a_node_as_a_whole(fields: dict[str, Any], problem: str) -> None:
    given = {"graph": two(**fields), "params": {}}
    with pytest.raises(GraphError, match=problem):
        validate_input("t", given, external_roles=["crawler"])
    validate_input("t", given, external_roles=["other"])


@pytest.mark.parametrize(
    ("done", "total", "is_final", "text"),
    [
        (120, 300, True, "3 shards on 2 workers, 120 of 300, 12/s, 15 s left"),
        (120, 300, False, "3 shards on 2 workers, 120 of 300 so far, 12/s"),
        (120, 0, False, "3 shards on 2 workers, 12/s"),
        (0, 300, True, "3 shards on 2 workers, 0 of 300"),
    ],
)
def test_progress_names_what_is_known(done: int, total: int, is_final: bool, text: str) -> None:
    workers = {1: "x", 2: "y", 3: "x", 4: ""}
    progress = ShardProgress(generation=0, started_at=90.0, workers=workers)
    assert describe_progress(progress, done, total, 100.0, is_final=is_final) == text
