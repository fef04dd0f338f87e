"""Invalid arguments of commands: one line with argument, value and remedy, no traceback, and no request to a server."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.cli.app import run
from tests.integration.harness import node

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Program
    from tests.integration.harness import Harness

    Ask = Callable[..., tuple[int, str]]

BYTES = os.fsdecode(b"\xff")
"""An argument that is not UTF-8, as Python decodes it."""

DEEP = '{"nodes": [{"node_id": "a", "type": "t", "meta": %s}]}' % ("[" * 150 + "]" * 150)
LARGE = '{"nodes": [{"node_id": "a", "type": "t", "io": {"input_inline": {"id": 9223372036854775808}}}]}'
FILES = {
    "good.json": '{"nodes": [{"node_id": "a", "type": "t"}]}',
    "deep.json": DEEP,
    "large.json": LARGE,
    "nul.json": r'{"params": {"a\u0000b": 1}, "graph": {"nodes": [{"node_id": "a", "type": "t"}]}}',
    "half.json": r'{"nodes": [{"node_id": "a", "type": "t", "meta": "\ud800"}]}',
    "digits.json": '{"nodes": [{"node_id": "a", "type": "t", "meta": %s}]}' % ("9" * 5_000),
    "deeper.json": '{"nodes": %s}' % ("[" * 100_000 + "]" * 100_000),
    "nan.json": '{"nodes": [{"node_id": "a", "type": "t", "timeout_sec": NaN}]}',
    "empty.json": "",
}


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Ask:
    """Run a command in this process without servers, and return its exit code and line on stderr, with an excerpt."""
    monkeypatch.setattr("flowkit.cli.options.log_warnings", lambda verbose: None)
    monkeypatch.setenv("MONGO_URL", "mongodb://127.0.0.1:1")
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr("flowkit.cli.servers._ANSWER_MS", 50)
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")

    def call(*arguments: str) -> tuple[int, str]:
        code = run(list(arguments))
        output = capsys.readouterr()
        assert output.out == ""
        lines = [line for line in output.err.splitlines() if not line.startswith("  | ")]
        assert (output.err[:9], len(lines)) == ("flowkit: ", 1), output.err
        assert output.err.encode()
        assert len(output.err) < 700
        return code, output.err

    return call


IDS = {"empty": "", "star": "*", "long": "a" * 201, "no UTF-8": BYTES}


@pytest.mark.parametrize("value", IDS.values(), ids=IDS)
@pytest.mark.parametrize(
    "command",
    [["status"], ["status", "--watch"], ["status", "--json"], ["cancel"], ["vars"], ["vars", "--set", "a=1"]],
    ids=" ".join,
)
def test_invalid_task_id_is_rejected_before_connecting_to_a_server(
    ask: Ask, capsys: pytest.CaptureFixture[str], command: list[str], value: str
) -> None:
    if "--json" in command:
        assert run([*command, "--", value]) == 2
        error = json.loads(capsys.readouterr().out)["error"]
        assert error["message"].startswith("TASK is ")
        return
    code, line = ask(*command, "--", value)
    assert (code, "TASK is " in line, "must be the id of a task" in line) == (2, True, True)


@pytest.mark.parametrize("value", [*IDS.values(), "a\nb", "\x1b[2J"], ids=[*IDS, "two lines", "escape"])
def test_invalid_new_task_id_is_rejected_before_connecting_to_a_server(ask: Ask, value: str) -> None:
    code, line = ask("run", "good.json", f"--task-id={value}")
    assert (code, "--task-id is " in line, "omit it to get a new UUID" in line) == (2, True, True)


MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "timeout": (["run", "good.json", "--watch", "--timeout", "nan"], ["--timeout", "0"]),
    "negative": (["status", "a", "--watch", "--timeout", "-1"], ["--timeout", "status --help"]),
    "text": (["status", "a", "--watch", "--timeout", "soon"], ["--timeout", "valid number", "--help"]),
    "limit": (["list", "--limit", "1000000000000"], ["--limit", "9999", "list --help"]),
    "limit text": (["list", "--limit", "1e3"], ["--limit", "valid integer", "--help"]),
    "status": (["list", "--status", BYTES], ["status '\\udcff' is unknown", "queued, running"]),
    "queue": (["run", "good.json", "--queue", ""], ["--queue (FLOWKIT_QUEUE) is ''", "printable"]),
    "queue bytes": (["run", "good.json", "--queue", BYTES], ["--queue (FLOWKIT_QUEUE) is '\\udcff'"]),
    "queue long": (["engine", "--queue", "q" * 201], ["--queue (FLOWKIT_QUEUE) is 'qqq", "1 to 200"]),
    "database": (["list", "--database", ""], ["database name ''", "MONGO_DATABASE"]),
    "database bytes": (["list", "--database", BYTES], ["database name '\\udcff'", "MONGO_DATABASE"]),
    "database long": (["list", "--database", "d" * 64], ["database name 'ddd", "63", "MONGO_DATABASE"]),
    "file bytes": (["run", f"{BYTES}.json"], ["no graph file '\\udcff.json'", "path of a JSON or YAML file"]),
    "file NUL": (["run", "a\0b"], ["graph file 'a\\x00b'", "path of a JSON or YAML file"]),
    "params bytes": (
        ["run", "good.json", "--params", BYTES],
        ["--params:1:1: a YAML text cannot contain the character"],
    ),
    "params folder": (["run", "good.json", "--params", "@."], ["file of --params '.' cannot be read"]),
    "param": (["run", "good.json", "--param", "day"], ["--param 'day' is not of the form key=value"]),
    "variable bytes": (["vars", "a", "--set", f"k={BYTES}"], ["vars.k, a str, cannot be stored"]),
    "name bytes": (["vars", "a", "--set", f"{BYTES}=1"], ["vars.\\\\udcff'", "not valid Unicode"]),
    "deep": (["run", "deep.json"], ["node 'a': graph.nodes[0].meta[0]", "100 levels", "flatter"]),
    "large": (
        ["run", "large.json"],
        ["node 'a': graph.nodes[0].io.input_inline.id", "64-bit", "as a string"],
    ),
    "NUL": (["run", "nul.json"], [r"params.a\x00b", "NUL", "rename the key"]),
    "half": (["run", "half.json"], ["graph.nodes[0]", "node 'a'", "surrogates not allowed"]),
    "digits": (["run", "digits.json"], ["digits.json:1:4351: number out of range", "4,300 digits"]),
    "deeper": (["run", "deeper.json"], ["deeper.json:1:", "recursion limit exceeded", "200 levels"]),
    "nan": (["run", "nan.json"], ["graph.nodes[0]", "node 'a'", "must be JSON"]),
    "empty": (["run", "empty.json"], ["empty.json:1:1: not JSON"]),
    "params large": (
        ["run", "good.json", "--params", '{"n": 9223372036854775808}'],
        ["params.n is 92233720"],
    ),
}


@pytest.mark.parametrize(("arguments", "reported"), MISTAKES.values(), ids=MISTAKES)
def test_invalid_argument_prints_one_line_with_a_remedy(
    ask: Ask, arguments: list[str], reported: list[str]
) -> None:
    code, line = ask(*arguments)
    assert code == 2
    assert [part for part in reported if part not in line] == []


@pytest.mark.parametrize("name", ["deep", "large", "nul", "half", "nan"])
def test_validate_reports_values_that_mongodb_cannot_store(ask: Ask, name: str) -> None:
    _, line = ask("run", f"{name}.json")
    assert ask("validate", f"{name}.json") == (2, line)


def test_validate_accepts_a_file_name_that_is_not_utf_8(
    ask: Ask, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / f"{BYTES}.json").write_text(FILES["good.json"], encoding="utf-8")
    assert run(["validate", f"{BYTES}.json"]) == 0
    assert capsys.readouterr().out.startswith("\\udcff.json is valid: 1 node\n")


@pytest.mark.parametrize(
    "arguments",
    [["run", "good.json"], ["status", "a"], ["cancel", "a"], ["cancel", "a", "--reason", BYTES]],
    ids=" ".join,
)
def test_unreachable_temporal_is_reported_with_a_remedy(ask: Ask, arguments: list[str]) -> None:
    code, line = ask(*arguments)
    assert (code, "no Temporal server responds at 127.0.0.1:1" in line, "TEMPORAL_ADDRESS" in line) == (
        3,
        True,
        True,
    )


# --- with servers ---------------------------------------------------------------------------------------------------


@pytest.mark.server
async def test_cancel_prints_the_status_of_the_task(harness: Harness, program: Program) -> None:
    await harness.engine()
    await harness.worker()
    ended = await harness.create({"node_id": "a", "type": "coordinator_fn"})
    await harness.result(ended)
    output = await program.call("cancel", ended, env=harness.environment)
    assert (output.code, output.out) == (2, "")
    assert output.err == f"flowkit: task {ended} is already finished; there is nothing to cancel\n"
    open_ = await harness.create(node("a", "paced", inline={"pause": 600}))
    await harness.until_node(open_, "a", "running")
    asked = await program.call(
        "cancel", open_, "--reason", f"x{BYTES}" * 600, "--json", env=harness.environment
    )
    reported: Any = json.loads(asked.out)
    assert (asked.code, reported["cancel_requested"], len(reported["reason"])) == (0, True, 1_000)
    await harness.until_status(open_, "cancelled")
    assert (await harness.document(open_))["coordinator"]["cancel_reason"] == reported["reason"]


@pytest.mark.server
async def test_cancel_reports_a_task_that_exists_only_in_mongodb(harness: Harness, program: Program) -> None:
    await harness.db.tasks.insert_one(
        {
            "id": "left",
            "status": "running",
            "params": {},
            "graph": {"nodes": [{"node_id": "a", "type": "t", "status": "queued"}]},
        }
    )
    output = await program.call("cancel", "left", env=harness.environment)
    assert output.code == 4
    assert output.err == (
        "flowkit: Temporal has no workflow for task 'left'; only its document exists in MongoDB; "
        "a running engine soon closes the document\n"
    )


@pytest.mark.slow
@pytest.mark.server
async def test_open_task_can_be_cancelled_without_mongodb(harness: Harness, program: Program) -> None:
    task_id = await harness.create(node("a", "nobody"))
    away = {**harness.environment, "MONGO_URL": "mongodb://127.0.0.1:1"}
    output = await program.call("cancel", task_id, env=away)
    assert (output.code, output.out) == (0, f"requested the cancellation of task {task_id}\n"), output.err
    unknown = await program.call("cancel", "nothing", env=away)
    assert (unknown.code, "no MongoDB server responds at mongodb://127.0.0.1:1" in unknown.err) == (3, True)
