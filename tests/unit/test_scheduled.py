"""The nominal time of a task that a schedule has started, in expressions, in params and in handlers."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from flowkit.errors import GraphError
from flowkit.graph.scheduled import evaluate_params, format_nominal, parse_nominal
from flowkit.limits import CONDITION_CHARS, SCHEDULE_EXPRESSIONS
from flowkit.testing import handler_context, run_graph
from flowkit.worker import Batch, BatchResult, RoleHandler, RunContext

AT = datetime(2026, 11, 26, 2, 0, tzinfo=timezone(timedelta(hours=1)))
"""The nominal time of the tasks here: 01:00 in UTC."""
TEXT = "2026-11-26T01:00:00Z"


def cel(text: str) -> dict[str, str]:
    return {"$cel": text}


def test_nominal_times_are_written_as_temporal_writes_them_into_ids() -> None:
    assert format_nominal(AT) == TEXT
    assert format_nominal(AT.replace(microsecond=377_740)) == TEXT
    assert parse_nominal(TEXT) == AT
    assert parse_nominal(None) is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"day": cel("task.scheduled_at")}, {"day": TEXT}),
        ({"a": [{"b": cel("'at ' + task.scheduled_at")}], "n": 1}, {"a": [{"b": f"at {TEXT}"}], "n": 1}),
        (
            {"before": cel('string(timestamp(task.scheduled_at) - duration("24h"))')},
            {"before": "2026-11-25T01:00:00Z"},
        ),
        ({"year": cel('timestamp(task.scheduled_at).getFullYear("Europe/Berlin")')}, {"year": 2026}),
        ({"day": cel('date(task.scheduled_at, "Europe/Berlin")')}, {"day": "2026-11-26"}),
        ({"day": cel('date(task.scheduled_at, "America/Los_Angeles")')}, {"day": "2026-11-25"}),
        (
            {"before": cel('date(timestamp(task.scheduled_at) - duration("24h"), "UTC")')},
            {"before": "2026-11-25"},
        ),
        ({"plain": {"$cel": 1}}, {"plain": {"$cel": 1}}),
    ],
)
def test_params_of_a_schedule_contain_the_nominal_time(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert evaluate_params(given, TEXT) == expected


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        ("2026-03-28T23:00:00Z", "2026-03-28"),
        ("2026-03-29T22:00:00Z", "2026-03-29"),
        ("2026-10-25T22:45:00Z", "2026-10-24"),
        ("2026-10-25T23:00:00Z", "2026-10-25"),
        ("2027-01-01T02:00:00Z", "2026-12-31"),
    ],
    ids=["midnight before spring", "midnight after spring", "end of autumn", "midnight after autumn", "year"],
)
def test_the_documented_day_before_is_right_around_a_change_of_the_clocks(at: str, expected: str) -> None:
    page = (Path(__file__).parents[2] / "docs/howto/schedules.md").read_text()
    found = re.search(r"the day before: `([^`]+)`", page)
    assert found
    assert evaluate_params({"day": cel(found[1])}, at) == {"day": expected}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("task.started_at", "params.x: task has no field 'started_at'; use task.scheduled_at"),
        ("task", "params.x: task is not a value; use task.scheduled_at"),
        ("params.y", "params.x: the params of a schedule can read task.scheduled_at only, not params"),
        ("[1].map(n, n)", "params.x: the params of a schedule cannot iterate over lists"),
        ("task.scheduled_at +", "params.x: the expression is incomplete"),
        ("timestamp(task.scheduled_at)", "params.x: the result is of type timestamp"),
        ("int(task.scheduled_at)", "params of a schedule: "),
        (
            'date(task.scheduled_at, "Europe/Berln")',
            "time zone 'Europe/Berln' is unknown; did you mean 'Europe/Berlin'?",
        ),
        (
            "date(task.scheduled_at)",
            'write date(task.scheduled_at, "Europe/Berlin"), with a time and a time zone',
        ),
        ('date(5, "UTC")', "found no matching overload for 'date' applied to '(int, string)'; write date("),
        ('date("2026-11-26", "UTC")', "date('2026-11-26', …): write the time as in 2026-11-26T02:00:00Z"),
        ('date(null, "UTC")', "the time is null, such as that of a task without a schedule"),
        ('date("0001-01-01T00:00:00Z", "America/New_York")', "the day is not in the years 1 to 9999"),
        ('date(timestamp("9999-12-31T23:00:00Z"), "Asia/Tokyo")', "the day is not in the years 1 to 9999"),
        ('date(task.scheduled_at, "localtime")', "time zone 'localtime' is unknown"),
        (
            'date(task.scheduled_at, "../" + "x")',
            "time zone '../x' is unknown; use a name of the IANA database",
        ),
    ],
)
def test_invalid_params_of_a_schedule_name_the_param_and_the_remedy(text: str, problem: str) -> None:
    with pytest.raises(GraphError) as caught:
        evaluate_params({"x": cel(text)}, TEXT)
    assert problem in str(caught.value)


def test_params_of_a_schedule_hold_a_bounded_number_of_short_expressions() -> None:
    many = {str(number): cel("task.scheduled_at") for number in range(SCHEDULE_EXPRESSIONS + 1)}
    with pytest.raises(GraphError, match="hold 101 expressions, more than 100; pass task.scheduled_at once"):
        evaluate_params(many, TEXT)
    with pytest.raises(
        GraphError, match=r"params.x: the expression has [\d,]+ characters; it must have 1 to"
    ):
        evaluate_params({"x": cel("1+" * CONDITION_CHARS + "1")}, TEXT)


class Report(RoleHandler):
    """Returns what it knows of the nominal time."""

    role = "report"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        assert ctx.input_inline is not None
        return BatchResult(
            success=True,
            metrics={
                "ctx": str(ctx.scheduled_at),
                "input": ctx.input_inline["at"],
                "params": ctx.params["at"],
            },
        )


def graph() -> dict[str, Any]:
    return {
        "nodes": [
            {"node_id": "a", "type": "report", "io": {"input_inline": {"at": cel("task.scheduled_at")}}},
            {
                "node_id": "by hand",
                "type": "report",
                "depends_on": ["a"],
                "when": "task.scheduled_at == null",
                "io": {"input_inline": {"at": 1}},
            },
        ]
    }


async def test_conditions_inputs_params_and_handlers_read_the_nominal_time() -> None:
    run = await run_graph(graph(), Report(), params={"at": cel("task.scheduled_at")}, scheduled_at=AT)
    run.assert_finished()
    assert run.nodes["a"].batches[0] == {"ctx": str(AT.astimezone(UTC)), "input": TEXT, "params": TEXT}
    assert run.nodes["by hand"].status == "skipped"
    stored = await run.db.tasks.find_one({})
    assert stored is not None
    assert (stored["scheduled_at"], stored["params"]) == (TEXT, {"at": TEXT})


async def test_a_task_without_a_schedule_has_no_nominal_time_and_keeps_its_params() -> None:
    params = {"at": cel("task.scheduled_at")}
    run = await run_graph(graph(), Report(), params=params)
    assert run.nodes["a"].batches[0] == {"ctx": "None", "input": None, "params": params["at"]}
    assert run.nodes["by hand"].status == "finished"


async def test_params_and_variables_named_task_keep_their_meaning() -> None:
    node = {
        "node_id": "a",
        "type": "report",
        "when": "params.task == 1 && [1, 2].exists(task, task == 2)",
        "io": {"input_inline": {"at": cel("params.task")}},
    }
    run = await run_graph({"nodes": [node]}, Report(), params={"task": 1, "at": 2})
    assert run.nodes["a"].batches[0]["input"] == 1


async def test_an_unknown_field_of_task_is_refused_with_the_graph() -> None:
    node = {"node_id": "a", "type": "report", "when": "task.schedule == 'x'"}
    with pytest.raises(GraphError, match="task has no field 'schedule'; use task.scheduled_at"):
        await run_graph({"nodes": [node]}, Report())


async def test_the_context_of_a_unit_test_has_a_nominal_time_if_it_is_given() -> None:
    assert handler_context(scheduled_at=AT).scheduled_at == AT
    assert handler_context().scheduled_at is None
