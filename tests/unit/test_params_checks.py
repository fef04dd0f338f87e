"""A `params_schema` may make its check endless, so checks that could take long run in processes that can be killed."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment
from tests.contract.builders import engine_activities
from tests.unit.event_loop import let_other_tasks_run, until

from flowkit.activities import params_checks
from flowkit.activities.params_checks import ParamsChecks
from flowkit.adapters.tasks.store import TaskStore
from flowkit.cli.json_files import GivenTask
from flowkit.client import TaskClient
from flowkit.errors import ChecksBusy, GraphError
from flowkit.graph.params import check_sec, needs_process, params_problems
from flowkit.models import OpenTask
from flowkit.testing import memory_database, run_graph

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

NODES = [{"node_id": "a", "type": "delay", "io": {"input_inline": {"sec": 1}}}]
BOMB = {"properties": {"p": {"pattern": "^(a+)+$"}}}
ENDLESS = {"p": "a" * 60 + "!"}
FOLD = {f"x{i}": {"anyOf": [{"$ref": f"#/$defs/x{i + 1}"}] * 2} for i in range(40)}
REFERENCES = {"$ref": "#/$defs/x0", "$defs": {**FOLD, "x40": False}}
CHEAP = {"type": "object", "required": ["p"], "properties": {"p": {"type": "string", "format": "date"}}}
REMEDY = "simplify its patterns, references and combinators, or pass less data in params"
GIVEN_UP = f"graph.params_schema cannot be applied to params: the evaluation takes more than .* s; {REMEDY}"

QUICK = 0.2
"""How many times the usual processor time the checks of these tests have."""


def graph_with(schema: object) -> dict[str, Any]:
    """Return a graph with this schema."""
    return {"nodes": NODES, "params_schema": schema}


@pytest.mark.parametrize(
    ("schema", "apart"),
    [
        (CHEAP, False),
        ({"properties": {"pattern": {"type": ["string", "null"]}, "not": {"enum": [1]}}}, False),
        ({"items": {"additionalProperties": {"items": [{"const": 1}, True]}}, "$schema": "x"}, False),
        ("no schema", False),
        (BOMB, True),
        ({"patternProperties": {"a": {}}}, True),
        ({"items": {"format": "regex"}}, True),
        ({"additionalProperties": {"$ref": "#"}}, True),
        ({"properties": {"a": {"anyOf": [{}]}}}, True),
        ({"prefixItems": [{"uniqueItems": True}]}, True),
        ({"type": [{"pattern": "a"}]}, True),
        ({"enum": [*range(1_000)], "required": ["p"] * 1_000}, False),
        ({"enum": [*range(1_000), "a"]}, True),
        ({"items": {"type": [*range(1_000), True]}}, True),
        ({"dependentRequired": {"a": [*range(1_000), None]}}, True),
        ({"prefixItems": [{}] * 4_000}, True),
        ({"unknown": {"pattern": "a"}}, True),
    ],
)
def test_schema_needs_a_process_unless_all_its_keywords_are_cheap(schema: object, apart: bool) -> None:
    assert needs_process(graph_with(schema), {"p": 1}) is apart


def test_large_values_need_a_process_and_have_more_time() -> None:
    choice = graph_with({"items": {"enum": [*range(1_500)]}})
    assert needs_process(choice, {"p": [1] * 5_000})
    assert not needs_process(choice, {"p": 1})
    assert check_sec(graph_with({}), {"p": "a" * 1_000_000}) == pytest.approx(3.5, abs=0.1)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"p": {"pattern": "a{99999999999}"}}},
        {"$id": "http://[bad", "$ref": "#x"},
        {"$schema": {}},
        {"$schema": 5},
        {"$schema": "http://json-schema.org/draft-03/schema#", "type": "foo"},
        {"$ref": "#/required", "required": ["a"]},
        {"$ref": "#/maximum", "maximum": 1},
        {"$ref": "#/maximum/0", "maximum": 1},
    ],
    ids=str,
)
def test_schema_that_the_validator_fails_on_is_a_problem_and_no_crash(schema: dict[str, Any]) -> None:
    [problem] = params_problems({"params_schema": schema}, {"p": "a"})
    assert problem.startswith("graph.params_schema")


@pytest.mark.parametrize("schema", [BOMB, REFERENCES], ids=["pattern", "references"])
async def test_endless_check_is_given_up_while_the_event_loop_runs(schema: dict[str, Any]) -> None:
    with pytest.raises(GraphError, match=GIVEN_UP):
        await ParamsChecks(slack=QUICK).check(graph_with(schema), ENDLESS)


async def test_processes_are_few_and_find_what_a_check_in_place_finds() -> None:
    checks = ParamsChecks()
    found = await asyncio.gather(
        *(checks.check(graph_with(BOMB), {"p": text}) for text in ("aa", "b", "a", "c", "aaa")),
        return_exceptions=True,
    )
    assert [str(each or "") for each in found] == ["", BAD.format("b"), "", BAD.format("c"), ""]
    assert len(checks._idle) <= params_checks._PROCESSES


BAD = "params.p: '{}' does not match '^(a+)+$'"


@pytest.mark.slow
async def test_cheap_checks_do_not_wait_for_endless_ones() -> None:
    checks = ParamsChecks(slack=QUICK)
    endless = [asyncio.create_task(checks.check(graph_with(BOMB), ENDLESS)) for _ in range(4)]
    with pytest.raises(GraphError, match="is not a 'date'"):
        await checks.check(graph_with(CHEAP), {"p": "today"})
    assert not endless[-1].done()
    found = await asyncio.gather(*endless, return_exceptions=True)
    assert {type(each) for each in found} <= {GraphError, ChecksBusy}


@pytest.mark.slow
async def test_endless_checks_of_one_user_leave_a_process_to_another_one() -> None:
    checks = ParamsChecks(slack=QUICK)
    endless = [asyncio.create_task(checks.check(graph_with(BOMB), ENDLESS, whose="first")) for _ in range(8)]
    await let_other_tasks_run()
    with pytest.raises(GraphError, match="params.p: 'b' does not match"):
        await checks.check(graph_with(BOMB), {"p": "b"}, whose="second")
    assert not endless[-1].done()
    found = await asyncio.gather(*endless, return_exceptions=True)
    assert {type(each) for each in found} <= {GraphError, ChecksBusy}


async def test_check_that_gets_no_processor_in_time_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(params_checks, "_WAIT_SEC", 0.0)
    with pytest.raises(ChecksBusy) as caught:
        await ParamsChecks(slack=0.0).check(graph_with(BOMB), {"p": "a"})
    assert caught.value.retryable


async def test_processes_end_with_the_checks() -> None:
    checks = ParamsChecks()
    await checks.check(graph_with(BOMB), {"p": "a"})
    [process] = [each._process for each in checks._idle]
    assert process is not None
    del checks
    gc.collect()
    await until(lambda: process.returncode is not None)


# --- the ways by which a graph comes in ----------------------------------------------------------------------------


async def create_task(graph: dict[str, Any], params: dict[str, Any]) -> None:
    """Create a task without servers, which an invalid one does not need."""
    none: Any = None
    await TaskClient(none, TaskStore(memory_database()), queue="q").create_task(graph=graph, params=params)


async def open_in_engine(graph: dict[str, Any], params: dict[str, Any]) -> None:
    """Open a task that was started without a client."""
    activities = engine_activities(TaskStore(memory_database()))
    opening = OpenTask(task_id="t", first_run_id="r", run_id="r", at=0.0, graph=graph, params=params)
    await ActivityEnvironment().run(activities.open_task, opening)


async def validate_in_cli(graph: dict[str, Any], params: dict[str, Any]) -> None:
    """Validate the content of a file."""
    await asyncio.to_thread(GivenTask(graph=graph, params=params).checked)


WAYS = {"create_task": create_task, "engine": open_in_engine, "cli": validate_in_cli, "run_graph": None}


@pytest.mark.parametrize("way", WAYS)
async def test_every_way_gives_up_an_endless_check(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(params_checks, "check_sec", lambda *_: 0.1)

    async def run(graph: dict[str, Any], params: dict[str, Any]) -> None:
        await run_graph(graph, params=params)

    call: Callable[[Any, Any], Awaitable[None]] = WAYS[way] or run
    with pytest.raises((GraphError, ApplicationError), match=GIVEN_UP) as caught:
        await call(graph_with(BOMB), ENDLESS)
    assert getattr(caught.value, "type", "invalid_graph") == "invalid_graph"
