"""Run the small examples on real servers, with the commands from their docstrings."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import uuid
from typing import TYPE_CHECKING

import pytest
from pymongo import MongoClient
from tests.cli.up.up_process import free_port_base
from tests.fork_server import fork_server
from tests.integration.harness import EVENT_TIMEOUT_SEC, FLOWKIT, ROOT

from flowkit.cli.loading import load_handlers
from flowkit.local.temporal import temporal_cli

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flowkit.local import Stack

EXAMPLES = ROOT / "examples"
LONGEST = [(17647, 278), (23529, 281), (26623, 307), (34239, 310), (35655, 323), (52527, 339), (77031, 350)]
LONGEST += [(106239, 353), (142587, 374), (156159, 382), (216367, 385), (230631, 442), (410011, 448)]
"""Numbers whose Collatz sequence is longer than that of all smaller ones, with its steps (OEIS A006877)."""

NAMES = ("fan_in", "retries", "cancel", "variables", "bare_temporal")


def commands(name: str) -> list[list[str]]:
    """Return the commands in an example's docstring."""
    text = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))) or ""
    return [line.split() for line in re.findall(r"^    (.+)$", text, re.MULTILINE)]


def up_arguments() -> list[str]:
    """Return the arguments of `flowkit` that serve all examples together."""
    named = [argument for name in NAMES for argument in commands(name)[0][2:]]
    return ["up", *(argument for argument in named if ":" in argument), "--concurrency", "4"]


@pytest.fixture(scope="module")
def deployment(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Run an engine and a worker with the handlers of all examples; yields the environment of their clients."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "temporal").symlink_to(temporal_cli())
    name = uuid.uuid4().hex[:10]
    own = {"MONGO_DATABASE": f"test_{name}", "FLOWKIT_QUEUE": f"q-{name}"}
    own["FLOWKIT_PORT_BASE"] = str(free_port_base())
    path = os.pathsep.join([str(FLOWKIT.parent), str(folder), os.environ["PATH"]])
    environment = {**os.environ, **stack.exports, **own, "PATH": path}
    running = fork_server().start(up_arguments(), EXAMPLES, environment)
    try:
        yield environment
    finally:
        running.terminate()
    assert running.wait(EVENT_TIMEOUT_SEC) == 0
    with MongoClient[dict[str, object]](stack.mongo_url) as mongo:
        mongo.drop_database(own["MONGO_DATABASE"])


def run_program(deployment: dict[str, str], *command: str) -> str:
    """Run a command and return what it prints."""
    done = subprocess.run(
        command,
        cwd=EXAMPLES,
        env=deployment,
        capture_output=True,
        text=True,
        timeout=EVENT_TIMEOUT_SEC,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_example(deployment: dict[str, str], name: str) -> str:
    """Run an example and return what it prints."""
    code, out, err = fork_server().run([], EXAMPLES, deployment, EVENT_TIMEOUT_SEC, module=name)
    assert code == 0, out + err
    return out


@pytest.mark.parametrize("name", NAMES)
def test_example_documents_its_two_commands_and_is_listed_on_the_page(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES)
    (program, verb, *arguments), start = commands(name)[:2]
    handlers = [argument for argument in arguments if ":" in argument]
    assert (program, verb, start) == ("flowkit", "up", ["python", f"{name}.py"])
    assert {each.partition(":")[0] for each in handlers} == {name}
    page = (ROOT / "docs/examples.md").read_text(encoding="utf-8")
    assert all(" ".join(command) in page for command in commands(name))
    assert load_handlers(handlers)


@pytest.mark.server
def test_fan_in_opens_gates_after_one_two_and_all_parents(deployment: dict[str, str]) -> None:
    *events, last = run_example(deployment, "fan_in").splitlines()
    order = [event.split()[2] for event in events]
    before = {gate: order[: order.index(gate)] for gate in ("readable", "durable", "verified")}
    copies = {gate: [name for name in names if name not in before] for gate, names in before.items()}
    assert "tape" not in copies["readable"] + copies["durable"]
    assert (len(copies["readable"]) >= 1, len(copies["durable"]) >= 2, len(copies["verified"])) == (
        True,
        True,
        4,
    )
    assert last.startswith("4 copies, 1 checksum: ")


@pytest.mark.server
def test_retries_fix_the_temporary_failure_and_skip_the_permanent_one(deployment: dict[str, str]) -> None:
    text = run_example(deployment, "retries")
    first, second = text.split("allow_failure: ")
    assert first.startswith(
        "on_node_failure: continue: failed, node 'february' failed: bad_input: ValueError"
    )
    assert second.startswith("finished\n")
    for part in (first, second):
        words = {line.split()[0]: line.split() for line in part.splitlines()[1:]}
        assert int(words["january"][3]) >= 3
        assert words["february"][1:5] == ["failed", "attempts:", "1", "bad_input:"]
        assert words["letter"][1:] == ["skipped", "attempts:", "0", "upstream_failed"]
        assert words["total"][1] == "finished"
        assert "sum of the files read: 133.75" in part


@pytest.mark.server
def test_cancelled_loop_stops_and_cleans_up(deployment: dict[str, str]) -> None:
    _, ended, kept, cleaned = run_example(deployment, "cancel").splitlines()
    assert re.fullmatch(r"cancelled (\d+\.\d) s after the request", ended)
    batches, number, steps = map(int, re.findall(r"\d+", kept))
    assert batches >= 3
    assert (number, steps) == max(record for record in LONGEST if record[0] <= batches * 10_000)
    assert re.fullmatch(r"scratch file collatz-\w+ is removed", cleaned)


@pytest.mark.server
def test_variables_decide_on_approval_and_carrier(deployment: dict[str, str]) -> None:
    small, _, waits, large, after = run_example(deployment, "variables").splitlines()
    assert small == "small order: 14.90, approved by the rules, ships by bicycle"
    assert waits.startswith("large order: waits for `flowkit vars ")
    assert large == "large order: 648.00, approved by a person, ships by insured van"
    assert "'approved': True" in after
    assert "'orders': {'approved': 1}" in after


@pytest.mark.server
def test_temporal_client_and_command_line_start_a_task(
    deployment: dict[str, str],
) -> None:
    started, result, words, total = run_example(deployment, "bare_temporal").splitlines()
    assert started.startswith("workflow proverbs-")
    assert "'status': 'finished'" in result
    assert (words.split()[-1], total.split()[-1]) == ("finished", "finished")
    printed = run_program(deployment, *commands("bare_temporal")[2])
    assert re.search(r"Status +COMPLETED", printed)
    assert len(re.findall(r'"status":"finished"', printed)) == 4
