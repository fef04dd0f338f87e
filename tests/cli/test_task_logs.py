"""`flowkit logs --task` on real servers: lines of a worker process, and why there are none."""

from __future__ import annotations

import json
import logging
import re
from typing import TYPE_CHECKING

import pytest

from tests.integration.handlers import TICK_SEC, Ticking
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually, node

if TYPE_CHECKING:
    from tests.cli.conftest import Program
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

WRITE_LINES = 20
"""The lines that may be logged while a write is on its way to MongoDB."""
LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (\w+) +(\S+) (?:\[(\S+)\] )?(.*)")


async def test_lines_of_a_worker_process_are_printed_until_the_task_ends(
    harness: Harness, program: Program
) -> None:
    """The logging of the process is that of the command, which prints warnings only."""

    def greet(task_id: str) -> None:
        logging.getLogger("shop").warning("greetings from a function")

    await harness.engine(greet=greet)
    harness.worker_process("Chatty")
    task_id = await harness.create(
        node("a", "chatty", retry_policy={"max": 1, "backoff_sec": 0.1}),
        {"node_id": "f", "type": "coordinator_fn", "io": {"fn": "greet"}},
    )
    output = await program.call("logs", "--task", task_id, "--follow", env=harness.environment)
    lines = [found.groups() for text in output.out.splitlines() if (found := LINE.match(text))]
    assert output.code == 0, output.err
    assert ("WARNING", "f#1", None, "greetings from a function") in lines
    lines = [each for each in lines if each[1] != "f#1"]
    assert lines[0] == ("INFO", "a#1", "b0", "attempt 1 begins \\u001b[2J")
    assert ("WARNING", "a#2", "b0", "attempt 2 ends  count=2") in lines
    assert "    ConnectionError: no route" in output.out.splitlines()
    more = await program.call(
        *("logs", "a", "--task", task_id, "--attempt", "2", "--level", "warning", "--json"),
        env=harness.environment,
    )
    (line,) = map(json.loads, more.out.splitlines())
    assert (line["text"], line["attempt"], line["logger"]) == (
        "attempt 2 ends  count=2",
        2,
        "flowkit.handler",
    )


async def test_killed_worker_loses_at_most_the_lines_of_its_last_second(
    harness: Harness, program: Program
) -> None:
    """It writes once a second. As many lines are logged meanwhile as its event loop has time for, busy or not."""
    harness.settings["lease_ttl_sec"] = 3
    await harness.engine()
    killed = harness.worker_process("Ticking")
    logged = program.folder / "numbers"
    inline = {"batches": 1, "file": str(logged)}
    task_id = await harness.create(node("a", "ticking", inline=inline))

    async def has_written_often() -> bool:
        return await harness.db.attempt_logs.count_documents({"task_id": task_id}) >= 3

    await eventually(has_written_often)
    killed.kill()
    killed.wait(EVENT_TIMEOUT_SEC)
    numbers = logged.read_text().splitlines()
    await harness.worker({"ticking": Ticking()})
    await harness.result(task_id)
    output = await program.call("logs", "a", "--task", task_id, "--json", env=harness.environment)
    kept = [json.loads(line)["text"] for line in output.out.splitlines()]
    assert kept == numbers[: len(kept)]
    assert len(kept) >= len(numbers) - 1 / TICK_SEC - WRITE_LINES


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
    assert "in attempt 9: its last attempt is 1" in await errors("a", "--task", task_id, "--attempt", "9")
    assert "has no node 'b'" in await errors("b", "--task", task_id)
    assert "no-such-task" in await errors("--task", "no-such-task")
