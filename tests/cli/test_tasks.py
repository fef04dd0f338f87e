"""Task commands on real servers: run, watch, status, list and cancel, with the exit code of each outcome."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.harness import EVENT_TIMEOUT_SEC, FLOWKIT, eventually, node

if TYPE_CHECKING:
    from tests.cli.conftest import Program, ProgramOutput
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

CHAIN: dict[str, Any] = {"nodes": [node("a"), node("b", "quick", "a")], "name": "chain"}


def failing(**fields: Any) -> dict[str, Any]:
    """Return a graph whose only node fails permanently."""
    return {"nodes": [node("a", "failing", inline={"failures": 9, "permanent": True}, **fields)]}


async def started(harness: Harness) -> None:
    """Start an engine and workers in this process."""
    await harness.engine()
    await harness.worker()


async def run_graph(
    program: Program, harness: Harness, graph: dict[str, Any], *options: str
) -> ProgramOutput:
    """Run `flowkit run` for a graph, and return its output."""
    program.write("graph.json", json.dumps(graph))
    return await program.call("run", "graph.json", *options, env=harness.environment)


async def test_run_prints_the_task_id_and_its_web_ui_address(harness: Harness, program: Program) -> None:
    await started(harness)
    output = await run_graph(program, harness, CHAIN, "--task-id", harness.queue)
    assert (output.code, output.out) == (0, f"task {harness.queue} started on queue {harness.queue}\n")
    assert f"flowkit status {harness.queue} --watch" in output.err
    assert f"flowkit cancel {harness.queue}" in output.err
    assert (await harness.result(harness.queue)).status == "finished"


async def test_watching_without_a_terminal_prints_a_line_for_each_change_and_the_outcome(
    harness: Harness, program: Program
) -> None:
    await started(harness)
    output = await run_graph(program, harness, CHAIN, "--watch", "--task-id", harness.queue)
    lines = output.out.splitlines()
    assert output.code == 0
    assert any("a  finished, attempt 1, 1 batch" in line for line in lines)
    assert any("b  finished, attempt 1, 1 batch" in line for line in lines)
    assert len(lines) == len(set(lines))
    assert lines[-1] == f"task {harness.queue} finished"


async def test_failed_task_exits_with_code_1_and_prints_the_reason(
    harness: Harness, program: Program
) -> None:
    await started(harness)
    output = await run_graph(program, harness, failing(), "--watch")
    assert output.code == 1
    assert "failed: node 'a' failed: flaky: as ordered" in output.out.splitlines()[-1]


async def test_json_option_prints_a_watched_task_as_one_document_on_stdout(
    harness: Harness, program: Program
) -> None:
    await started(harness)
    output = await run_graph(program, harness, failing(allow_failure=True), "--watch", "--json")
    view = json.loads(output.out)
    assert (output.code, view["status"], view["handled_failures"]) == (0, "finished", ["a"])
    assert [(n["node_id"], n["status"], n["attempt"]) for n in view["nodes"]] == [("a", "failed", 1)]
    assert "a  failed, attempt 1" in output.err


async def test_command_line_params_override_those_of_the_file_key_by_key(
    harness: Harness, program: Program
) -> None:
    program.write("more.json", '{"day": 2}')
    given = {"params": {"day": 1, "who": "file"}, "graph": CHAIN}
    output = await run_graph(program, harness, given, "--params", "@more.json", "--param", "n=5", "--json")
    document = await harness.document(json.loads(output.out)["task_id"])
    assert document["params"] == {"day": 2, "who": "file", "n": 5}


async def test_graph_can_be_read_from_stdin(harness: Harness, program: Program) -> None:
    output = await asyncio.to_thread(
        program.run, "run", "-", "--json", env=harness.environment, stdin=json.dumps(CHAIN)
    )
    assert (await harness.document(json.loads(output.out)["task_id"]))["graph"]["name"] == "chain"


async def test_ctrl_c_stops_watching_and_leaves_the_task_running(harness: Harness, program: Program) -> None:
    await started(harness)
    program.write("graph.json", json.dumps({"nodes": [node("a", "paced", inline={"pause": 600})]}))
    command = ["run", "graph.json", "--watch", "--task-id", harness.queue]
    watching = program.start(*command, env=harness.environment)
    assert watching.stdout is not None
    while "a  running" not in await asyncio.to_thread(watching.stdout.readline):
        assert watching.poll() is None
    watching.send_signal(signal.SIGINT)
    _, err = await asyncio.to_thread(watching.communicate, timeout=EVENT_TIMEOUT_SEC)
    assert watching.returncode == 130
    assert f"task {harness.queue} continues: `flowkit status {harness.queue} --watch` watches it again" in err
    assert f"`flowkit cancel {harness.queue}` cancels it" in err
    assert "Traceback" not in err
    assert (await harness.document(harness.queue))["status"] == "running"


async def test_watching_a_cancelled_task_exits_with_code_5(harness: Harness, program: Program) -> None:
    await started(harness)
    task_id = await harness.create(node("a", "paced", inline={"pause": 600}), node("b", "quick", "a"))
    await harness.until_node(task_id, "a", "running")
    asked = await program.call("cancel", task_id, "--reason", "wrong day", env=harness.environment)
    assert (asked.code, asked.out) == (0, f"requested the cancellation of task {task_id}\n")
    watched = await program.call("status", task_id, "--watch", env=harness.environment)
    assert watched.code == 5
    assert watched.out.splitlines()[-1] == f"task {task_id} cancelled: wrong day"


async def test_status_shows_nodes_retries_and_reasons(harness: Harness, program: Program) -> None:
    await started(harness)
    retry = {"max": 1, "backoff_sec": 600}
    task_id = await harness.create(node("a", "failing", inline={"failures": 1}, retry_policy=retry))
    await harness.until_node(task_id, "a", "deferred")
    output = await program.call("status", task_id, env=harness.environment)
    assert (output.code, output.err) == (0, "")
    assert output.out.splitlines()[0].startswith(f"task {task_id} deferred (for ")
    assert "retry in " in output.out
    assert "flaky: as ordered" in output.out
    drawn = await program.call("graph", task_id, env=harness.environment)
    assert (drawn.code, drawn.err) == (0, "")
    assert [line.strip(" │") for line in drawn.out.splitlines()[1:-1]] == ["◷ a", "failing", "deferred"]


async def test_status_reads_the_document_if_no_engine_responds(harness: Harness, program: Program) -> None:
    task_id = await harness.create(node("a"))
    output = await program.call("status", task_id, "--json", env=harness.environment)
    view = json.loads(output.out)
    assert (view["source"], view["status"]) == ("document", "queued")
    assert "no engine polls" in view["hints"][0]
    drawn = await program.call("graph", task_id, "--format", "mermaid", env=harness.environment)
    assert 'n0("○ a<br/>quick<br/>queued"):::queued' in drawn.out
    unknown = await program.call("graph", f"{task_id}x", env=harness.environment)
    assert (unknown.code, "or give the path of a JSON or YAML file" in unknown.err) == (4, True)


async def test_list_shows_the_newest_first_and_reports_that_there_are_more(
    harness: Harness, program: Program
) -> None:
    ids = [await harness.create(node("a"), name=f"number {number}") for number in range(3)]
    output = await program.call("list", "--json", "--limit", "2", env=harness.environment)
    listed = json.loads(output.out)
    assert [task["task_id"] for task in listed["tasks"]] == [ids[2], ids[1]]
    assert (listed["tasks"][0]["name"], listed["more"]) == ("number 2", True)
    people = await program.call("list", "--limit", "2", env=harness.environment)
    assert people.err == "there are more than 2; `--limit 4` shows more\n"
    assert [line.split()[0] for line in people.out.splitlines()] == ["task", ids[2], ids[1]]
    none = await program.call("list", "--status", "failed", env=harness.environment)
    assert (none.code, none.out, none.err) == (0, "", "no tasks are failed\n")


async def failed_once(harness: Harness) -> tuple[str, str]:
    """Run a task whose first node fails once; return its id and the id of its worker."""
    await harness.engine()
    worker = await harness.worker()
    once = node("a", "failing", inline={"failures": 1}, retry_policy={"max": 1, "backoff_sec": 0})
    task_id = await harness.create(once, node("b", "quick", "a", inline={"batches": 3}))
    assert (await harness.result(task_id)).status == "finished"
    return task_id, worker.worker_id


async def test_attempts_show_workers_durations_and_outcomes(harness: Harness, program: Program) -> None:
    task_id, worker = await failed_once(harness)
    shown = (await program.call("attempts", task_id, env=harness.environment)).out.splitlines()[1:]
    assert [line.split()[:3] for line in shown] == [
        ["a", "1", worker],
        ["a", "2", worker],
        ["b", "1", worker],
    ]
    assert ["failed: flaky: as ordered" in line for line in shown] == [True, False, False]
    own = await program.call("attempts", task_id, "b", "--json", env=harness.environment)
    [only] = json.loads(own.out)["attempts"]
    assert (only["outcome"], only["worker"], only["seconds"] >= 0) == ("finished", worker, True)


async def test_result_shows_final_metrics_and_pages_of_batches(harness: Harness, program: Program) -> None:
    task_id, _ = await failed_once(harness)
    page = await program.call("result", task_id, "b", "--limit", "2", env=harness.environment)
    assert page.out.splitlines()[:2] == [f"node b of task {task_id} finished", "  metrics.epoch  1"]
    assert page.err == "batches 1 to 2 of 3; `--offset 2` shows the next\n"
    whole = json.loads((await program.call("result", task_id, "--json", env=harness.environment)).out)
    assert [(each["metrics"], each["batches"]) for each in whole["nodes"]] == [
        ({"epoch": 2}, 1),
        ({"epoch": 1}, 3),
    ]
    wrong = await program.call("result", task_id, "nodes", env=harness.environment)
    assert (wrong.code, "has no node 'nodes'" in wrong.err) == (2, True)


async def test_workers_show_their_slots_and_what_they_run(harness: Harness, program: Program) -> None:
    await harness.engine()
    worker = await harness.worker()
    task_id = await harness.create(node("a", "paced", inline={"pause": 600}))
    await harness.until_node(task_id, "a", "running")
    shown = await program.call("workers", "--json", env=harness.environment)
    engine, busy = json.loads(shown.out)["workers"]
    assert (engine["kind"], engine["state"]) == ("engine", "online")
    assert (busy["worker_id"], busy["kind"], "paced" in busy["roles"]) == (worker.worker_id, "worker", True)
    assert [(each["task_id"], each["node_id"]) for each in busy["busy"]] == [(task_id, "a")]
    status = await program.call("status", task_id, env=harness.environment)
    assert f"worker {worker.worker_id}" in status.out


async def test_worker_serves_only_the_selected_roles(harness: Harness) -> None:
    names = [f"tests.integration.handlers:{name}" for name in ("Quick", "Paced")]
    await harness.engine()
    harness.process("worker", *names, "--role", "quick", "--concurrency", "2")
    task_id = await harness.create(node("a"), node("b", "paced", "a"))
    await harness.until_node(task_id, "a", "finished")
    client = await harness.client()

    async def waits() -> bool:
        response = await client.get_workflow_handle(task_id).query("status")
        return bool(response["nodes"][1]["status"] == "running")

    await eventually(waits)
    assert (await harness.node(task_id, "b"))["attempt_epoch"] == 0


async def test_worker_also_serves_a_handler_instance_of_a_module(harness: Harness, program: Program) -> None:
    program.write("own.py", "from tests.integration.handlers import Quick\nready = Quick()\n")
    await harness.engine()
    root = str(FLOWKIT.parents[2])
    program.start("worker", "own:ready", env={**harness.environment, "PYTHONPATH": root})
    assert (await harness.result(await harness.create(node("a")))).status == "finished"
