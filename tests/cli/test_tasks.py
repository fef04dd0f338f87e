"""Commands of tasks on real servers: start, watch, look, list, cancel; and the exit codes that tell the outcome."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.world import CEILING, FLOWKIT, eventually, node

if TYPE_CHECKING:
    from tests.cli.conftest import Program, Said
    from tests.integration.world import World

pytestmark = pytest.mark.server

CHAIN: dict[str, Any] = {"nodes": [node("a"), node("b", "quick", "a")], "name": "chain"}


def failing(**fields: Any) -> dict[str, Any]:
    """A graph whose only node fails for good."""
    return {"nodes": [node("a", "failing", inline={"failures": 9, "permanent": True}, **fields)]}


async def started(world: World) -> None:
    """An engine and workers in this process."""
    await world.engine()
    await world.worker()


async def run_graph(program: Program, world: World, graph: dict[str, Any], *options: str) -> Said:
    """`flowkit run` of a graph."""
    program.write("graph.json", json.dumps(graph))
    return await program.call("run", "graph.json", *options, env=world.environment)


async def test_run_tells_the_id_and_where_to_look(world: World, program: Program) -> None:
    await started(world)
    said = await run_graph(program, world, CHAIN, "--task-id", world.queue)
    assert (said.code, said.out) == (0, f"task {world.queue} started on queue {world.queue}\n")
    assert f"flowkit status {world.queue} --watch" in said.err
    assert f"flowkit cancel {world.queue}" in said.err
    assert (await world.result(world.queue)).status == "finished"


async def test_watching_without_a_terminal_prints_a_line_for_each_change_and_the_outcome(
    world: World, program: Program
) -> None:
    await started(world)
    said = await run_graph(program, world, CHAIN, "--watch", "--task-id", world.queue)
    lines = said.out.splitlines()
    assert said.code == 0
    assert any("a  finished, attempt 1, 1 batch" in line for line in lines)
    assert any("b  finished, attempt 1, 1 batch" in line for line in lines)
    assert len(lines) == len(set(lines))
    assert lines[-1] == f"task {world.queue} finished"


async def test_a_failed_task_is_exit_code_1_and_tells_why(world: World, program: Program) -> None:
    await started(world)
    said = await run_graph(program, world, failing(), "--watch")
    assert said.code == 1
    assert "failed: node 'a' failed: flaky: as ordered" in said.out.splitlines()[-1]


async def test_with_json_a_watched_task_is_one_document_on_stdout(world: World, program: Program) -> None:
    await started(world)
    said = await run_graph(program, world, failing(allow_failure=True), "--watch", "--json")
    view = json.loads(said.out)
    assert (said.code, view["status"], view["handled_failures"]) == (0, "finished", ["a"])
    assert [(n["node_id"], n["status"], n["attempt"]) for n in view["nodes"]] == [("a", "failed", 1)]
    assert "a  failed, attempt 1" in said.err


async def test_params_of_the_command_line_override_those_of_the_file_key_by_key(
    world: World, program: Program
) -> None:
    program.write("more.json", '{"day": 2}')
    given = {"params": {"day": 1, "who": "file"}, "graph": CHAIN}
    said = await run_graph(program, world, given, "--params", "@more.json", "--json")
    document = await world.document(json.loads(said.out)["task_id"])
    assert document["params"] == {"day": 2, "who": "file"}


async def test_a_graph_is_read_from_stdin(world: World, program: Program) -> None:
    said = await asyncio.to_thread(
        program.run, "run", "-", "--json", env=world.environment, stdin=json.dumps(CHAIN)
    )
    assert (await world.document(json.loads(said.out)["task_id"]))["graph"]["name"] == "chain"


async def test_ctrl_c_leaves_a_watched_task_running_and_says_so(world: World, program: Program) -> None:
    await started(world)
    program.write("graph.json", json.dumps({"nodes": [node("a", "paced", inline={"pause": 600})]}))
    command = ["run", "graph.json", "--watch", "--task-id", world.queue]
    watching = program.start(*command, env=world.environment)
    assert watching.stdout is not None
    while "a  running" not in await asyncio.to_thread(watching.stdout.readline):
        assert watching.poll() is None
    watching.send_signal(signal.SIGINT)
    _, err = await asyncio.to_thread(watching.communicate, timeout=CEILING)
    assert watching.returncode == 130
    assert f"task {world.queue} continues: `flowkit status {world.queue} --watch` watches it again" in err
    assert f"`flowkit cancel {world.queue}` cancels it" in err
    assert "Traceback" not in err
    assert (await world.document(world.queue))["status"] == "running"


async def test_cancel_asks_the_task_to_stop_and_watching_it_ends_with_exit_code_5(
    world: World, program: Program
) -> None:
    await started(world)
    task_id = await world.create(node("a", "paced", inline={"pause": 600}), node("b", "quick", "a"))
    await world.until_node(task_id, "a", "running")
    asked = await program.call("cancel", task_id, "--reason", "wrong day", env=world.environment)
    assert (asked.code, asked.out) == (0, f"requested the cancellation of task {task_id}\n")
    watched = await program.call("status", task_id, "--watch", env=world.environment)
    assert watched.code == 5
    assert watched.out.splitlines()[-1] == f"task {task_id} cancelled: wrong day"


async def test_status_shows_nodes_retries_and_reasons(world: World, program: Program) -> None:
    await started(world)
    retry = {"max": 1, "backoff_sec": 600}
    task_id = await world.create(node("a", "failing", inline={"failures": 1}, retry_policy=retry))
    await world.until_node(task_id, "a", "deferred")
    said = await program.call("status", task_id, env=world.environment)
    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines()[0].strip() == f"task {task_id} deferred"
    assert "retry in " in said.out
    assert "flaky: as ordered" in said.out


async def test_status_reads_the_document_while_no_engine_answers(world: World, program: Program) -> None:
    task_id = await world.create(node("a"))
    said = await program.call("status", task_id, "--json", env=world.environment)
    view = json.loads(said.out)
    assert (view["source"], view["status"]) == ("document", "queued")
    assert "no engine polls" in view["hints"][0]


async def test_list_shows_the_newest_first_and_says_when_there_are_more(
    world: World, program: Program
) -> None:
    ids = [await world.create(node("a"), name=f"number {number}") for number in range(3)]
    said = await program.call("list", "--json", "--limit", "2", env=world.environment)
    listed = json.loads(said.out)
    assert [task["task_id"] for task in listed["tasks"]] == [ids[2], ids[1]]
    assert (listed["tasks"][0]["name"], listed["more"]) == ("number 2", True)
    people = await program.call("list", "--limit", "2", env=world.environment)
    assert people.err == "there are more than 2; `--limit 4` shows more\n"
    assert [line.split()[0] for line in people.out.splitlines()] == ["task", ids[2], ids[1]]
    none = await program.call("list", "--status", "failed", env=world.environment)
    assert (none.code, none.out, none.err) == (0, "", "no tasks are failed\n")


async def test_a_worker_serves_only_the_roles_that_are_chosen(world: World) -> None:
    names = [f"tests.integration.handlers:{name}" for name in ("Quick", "Paced")]
    await world.engine()
    world.process("worker", *names, "--role", "quick", "--concurrency", "2")
    task_id = await world.create(node("a"), node("b", "paced", "a"))
    await world.until_node(task_id, "a", "finished")
    client = await world.client()

    async def waits() -> bool:
        answer = await client.get_workflow_handle(task_id).query("status")
        return bool(answer["nodes"][1]["status"] == "running")

    await eventually(waits)
    assert (await world.node(task_id, "b"))["attempt_epoch"] == 0


async def test_an_instance_in_a_module_is_served_as_well(world: World, program: Program) -> None:
    program.write("own.py", "from tests.integration.handlers import Quick\nready = Quick()\n")
    await world.engine()
    root = str(FLOWKIT.parents[2])
    program.start("worker", "own:ready", env={**world.environment, "PYTHONPATH": root})
    assert (await world.result(await world.create(node("a")))).status == "finished"
