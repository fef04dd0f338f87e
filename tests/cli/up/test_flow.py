"""`flowkit up module:flow` runs the handlers and functions of the flow, and other commands take it as a graph."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.cli.up.up_process import UpProcess, environment_without_servers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Program
    from tests.integration.harness import Harness

PIPELINE = """
from pydantic import BaseModel

from flowkit import Flow, cel
from flowkit.worker import role

print("imported")

class Params(BaseModel):
    words: list[str]
    factor: int = 2

class Count(BaseModel):
    chars: int

@role("counter")
async def count(word: str) -> Count:
    return Count(chars=len(word))

@role("multiplier", inline=True)
async def multiply(count: Count, *, factor: int) -> Count:
    return Count(chars=count.chars * factor)

async def publish(task_id: str, factor: int) -> None:
    assert factor == 2

flow = Flow("words", params=Params)
counts = flow.node("count", count).maps("params.words", str)
products = flow.node("multiply", multiply).pulls(counts).input(factor=cel("params.factor"))
flow.function("publish", publish, factor=cel("params.factor")).after(products)

tools = Flow("tools")
tools.function("publish", publish, factor=2)
broken = Flow("broken", params=Params)
broken.node("count", count).maps("params.wrds", str)
"""


@pytest.mark.server
async def test_a_flow_runs_with_its_handlers_and_functions(
    harness: Harness, tmp_path: Path, up: Callable[..., UpProcess]
) -> None:
    (tmp_path / "pipeline.py").write_text(PIPELINE)
    env = {**harness.environment, "TMPDIR": environment_without_servers(tmp_path)["TMPDIR"]}
    running = up("pipeline:flow", "--no-page", "--queue", harness.queue, env=env)
    running.wait_for_line("logs: ")
    words = """words=["a", "bcd"]"""
    done = running.run_command(
        "run", "pipeline:flow", "--param", words, "--task-id", "t1", "--watch", "--timeout", "60"
    )
    assert done.returncode == 0, done.stderr
    shown = running.run_command("result", "t1", "--json")
    assert [node["batches"] for node in json.loads(shown.stdout)["nodes"]] == [2, 2, 0]
    assert running.stop() == 0


def test_commands_take_a_flow_in_place_of_a_file(program: Program) -> None:
    program.write("pipeline.py", PIPELINE)
    shown = program.run("validate", "pipeline:flow")
    assert (shown.code, "pipeline:flow is valid: 3 nodes" in shown.out) == (0, True), shown.err
    assert json.loads(program.run("validate", "pipeline:flow", "--json").out)["valid"]
    assert "multiplier" in program.run("graph", "pipeline:flow").out
    for command in ("worker", "engine"):
        assert program.run(command, "pipeline:flow", "--check").code == 0
    assert program.run("engine", "pipeline:tools", "pipeline:flow", "--check").code == 0


MISTAKES = [
    (["validate", "pipeline:flw"], "module 'pipeline' has no 'flw'; did you mean 'flow'?"),
    (
        ["validate", "pipeline:nothing"],
        "module 'pipeline' has no 'nothing'; its flows are flow, tools, broken",
    ),
    (
        ["run", "pipeline:count"],
        "pipeline:count is a handler, not a Flow; the flows of the module are flow, tools, broken",
    ),
    (
        ["validate", "nowhere:flow"],
        "module 'nowhere' was not found; run flowkit in the folder that contains it",
    ),
    (["validate", "pipeline:broken"], "pipeline.py:35: node 'count': map.over: params has no 'wrds'"),
    (["run", "pipeline:flow"], "params: 'words' is a required property"),
    (["run", "pipeline:flow", "--param", "words=3"], "params.words is 3; it must be a list"),
    (
        ["worker", "pipeline:tools", "--check"],
        "pipeline:tools is a flow without handlers; add them with flow.node",
    ),
    (["engine", "pipeline:count", "--check"], "pipeline:count is a handler, not a Flow"),
    (["validate", "pipeline.py"], "'pipeline.py' names a Python file; name its module: pipeline:flow"),
    (["graph", "./pipeline.py:tools"], "names a Python file; name its module: pipeline:tools"),
    (["worker", "jobs/pipeline.py", "--check"], "names a Python file; name its module: jobs.pipeline:flow"),
]


@pytest.mark.parametrize(("arguments", "problem"), MISTAKES)
def test_a_mistake_is_reported_with_its_remedy(program: Program, arguments: list[str], problem: str) -> None:
    program.write("pipeline.py", PIPELINE)
    shown = program.run(*arguments)
    assert problem in shown.err
    assert shown.code == 2
