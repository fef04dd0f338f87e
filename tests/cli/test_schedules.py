"""The commands of schedules on real servers: what they print, their exit codes, and the errors of their options."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.integration.harness import node

if TYPE_CHECKING:
    from tests.cli.conftest import Program, ProgramOutput
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

PARAMS = '{"at": {"$cel": "task.scheduled_at"}}'
FILE = """
schedules:
  {name}:
    graph: graph.json
    params: {{at: {{$cel: task.scheduled_at}}}}
    cron: 0 4 * * *
    timezone: Europe/Berlin
"""


async def schedule(program: Program, harness: Harness, *arguments: str) -> ProgramOutput:
    """Run a command of schedules, and return its output."""
    return await program.call("schedule", *arguments, env=harness.environment)


async def test_a_schedule_is_created_shown_changed_and_deleted(harness: Harness, program: Program) -> None:
    name, graph = f"s-{harness.queue}", program.write("graph.json", json.dumps({"nodes": [node("a")]}))
    made = await schedule(program, harness, "create", name, graph, "--cron", "0 2 * * *", "--params", PARAMS)
    assert (made.code, made.out) == (0, f"created schedule {name}: 0 2 * * * UTC\n")
    assert made.err.count(" 02:00") == 3

    paused = await schedule(program, harness, "pause", name, "--note", "closed")
    assert paused.out == f"paused schedule {name}\n"
    triggered = await schedule(program, harness, "trigger", name, "--json")
    task_id = json.loads(triggered.out)["task_id"]
    assert task_id.startswith(f"{name}-2")
    again = await schedule(program, harness, "trigger", name)
    assert "no task has started, because an earlier one" in again.err
    shown = await schedule(program, harness, "show", name)
    assert shown.out.splitlines()[:3] == [
        f"{name}: 0 2 * * * UTC, paused",
        "  note     closed",
        "  tasks    1 started; 1 time skipped, because an earlier task ran",
    ]
    assert f"{task_id}  {task_id.removeprefix(f'{name}-')}  running" in shown.out

    program.write("schedules.yaml", FILE.format(name=name))
    planned = await schedule(program, harness, "apply", "schedules.yaml", "--dry-run")
    assert planned.out.splitlines() == [
        f"would update  {name}",
        '  cron: ["0 2 * * *"] → ["0 4 * * *"]',
        '  timezone: (default) → "Europe/Berlin"',
    ]
    assert f"updated  {name}" in (await schedule(program, harness, "apply", "schedules.yaml")).out
    updated = await schedule(program, harness, "update", name, "--every", "30s", "--param", "n=1", "--json")
    assert json.loads(updated.out)["every"] == "30s"
    details = json.loads((await schedule(program, harness, "show", name, "--json")).out)
    assert details["params"] == {**json.loads(PARAMS), "n": 1}
    assert [each["task_id"] for each in details["runs"]] == [task_id]

    assert (await schedule(program, harness, "delete", name)).code == 0
    gone = await schedule(program, harness, "delete", name)
    assert (gone.code, gone.err) == (
        2,
        f"flowkit: there is no schedule {name!r}; `flowkit schedule list` shows the schedules\n",
    )


async def test_an_invalid_option_shows_the_right_form_and_its_next_three_times(
    harness: Harness, program: Program
) -> None:
    program.write("graph.json", json.dumps({"nodes": [node("a")]}))
    refused = await schedule(program, harness, "create", "x", "graph.json", "--cron", "0 25 * * *")
    assert refused.code == 2
    assert len(refused.err.splitlines()) == 1
    assert "cron is '0 25 * * *': the hour is '25'; write 0 to 23" in refused.err
    assert refused.err.count(" 02:00") == 3
