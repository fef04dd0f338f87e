"""`flowkit logs --task` on real servers: lines of a worker process, while it runs, after it was killed, and none."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.integration.harness import eventually, node

if TYPE_CHECKING:
    from tests.cli.conftest import Program
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (\w+) +(\S+) (?:\[(\S+)\] )?(.*)")


async def test_lines_are_printed_while_the_task_runs_and_survive_a_killed_worker(
    harness: Harness, program: Program
) -> None:
    """The second attempt runs on another worker. The command ends with the task."""
    harness.settings["lease_ttl_sec"] = 2
    await harness.engine()
    killed = harness.worker_process("Chatty")
    task_id = await harness.create(node("a", "chatty"))
    followed = asyncio.create_task(
        program.call("logs", "--task", task_id, "--follow", env=harness.environment)
    )

    async def has_line() -> bool:
        return await harness.db.attempt_logs.find_one({"task_id": task_id}) is not None

    await eventually(has_line)
    killed.kill()
    killed.wait(10)
    harness.worker_process("Chatty")
    await harness.result(task_id)
    output = await followed
    lines = [found.groups() for text in output.out.splitlines() if (found := LINE.match(text))]
    assert output.code == 0, output.err
    assert lines[0] == ("INFO", "a#1", "b0", "attempt 1 begins \\u001b[2J")
    assert ("WARNING", "a#2", "b0", "attempt 2 ends  count=2") in lines
    found = await program.call(
        *("logs", "a", "--task", task_id, "--attempt", "2", "--level", "warning", "--json"),
        env=harness.environment,
    )
    (line,) = map(json.loads, found.out.splitlines())
    assert (line["text"], line["attempt"], line["logger"]) == (
        "attempt 2 ends  count=2",
        2,
        "flowkit.handler",
    )


async def test_command_says_why_there_are_no_lines(harness: Harness, program: Program) -> None:
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(node("a"))
    await harness.result(task_id)

    async def errors(*arguments: str) -> str:
        output = await program.call("logs", *arguments, env=harness.environment)
        assert output.out == ""
        return output.err

    assert "its handlers have logged none of level error or above" in await errors(
        "--task", task_id, "--level", "error"
    )
    assert "has no node 'b'" in await errors("b", "--task", task_id)
    assert "no-such-task" in await errors("--task", "no-such-task")
