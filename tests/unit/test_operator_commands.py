"""What the commands and methods for operators send to a task, and what the commands print."""

from __future__ import annotations

import json
import shlex
import subprocess
from typing import TYPE_CHECKING, Any, Self

import pytest

from flowkit.adapters.mongo import iso
from flowkit.cli.app import run
from flowkit.client import TaskCatalog
from flowkit.coordinator import Coordinator
from flowkit.errors import ActionRejected, ConfigError, RejectionCause
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

Sent = list[tuple[str, str, dict[str, Any]]]

RESULT: dict[str, Any] = {
    "revision": 1,
    "affected": [
        {"node_id": "load", "from": "held", "to": "queued"},
        {"node_id": "report", "from": "finished", "to": "queued"},
    ],
    "notes": ["variables keep their values"],
}
STATE = "0123456789abcdef"


class Tasks:
    """Replaces a TaskClient, and records what it is to send."""

    def __init__(self) -> None:
        self.applied: Sent = []
        self.previewed: Sent = []

    @property
    def steering(self) -> Any:
        """What applies actions: this stand-in."""
        return self

    async def act(
        self, task_id: str, name: str, given: dict[str, Any], *, wait_sec: float | None = None
    ) -> dict[str, Any]:
        """Record an action."""
        self.applied.append((task_id, name, given))
        return RESULT

    async def preview(self, task_id: str, name: str, given: dict[str, Any]) -> dict[str, Any]:
        """Record a preview."""
        self.previewed.append((task_id, name, given))
        return {**RESULT, "state": STATE}

    async def rerun(self, task_id: str, nodes: list[str] | None, **given: Any) -> dict[str, Any]:
        """Record a rerun."""
        sent = self.previewed if given.pop("dry_run") else self.applied
        sent.append((task_id, "rerun", {"nodes": nodes, **given}))
        return {**RESULT, "run_seq": 2, "state": STATE}


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> Tasks:
    """Return what replaces the client of all commands."""
    found = Tasks()

    class Servers:
        tasks = found

        async def __aenter__(self) -> Self:
            return self

        async def __aexit__(self, *error: object) -> None:
            """Close nothing."""

    monkeypatch.setattr("flowkit.cli.servers.servers", lambda where: Servers())
    monkeypatch.setattr("flowkit.cli.options.log_warnings", lambda verbose: None)
    monkeypatch.setattr("flowkit.cli.tasks.operate.current_user", lambda: "ada@host")
    return found


COMMANDS: dict[str, tuple[str, dict[str, Any]]] = {
    "retry t load": ("retry_node", {"node_id": "load", "interrupt": False}),
    "retry t load --set limit=5 --set name=a": (
        "retry_node",
        {"node_id": "load", "interrupt": False, "input_inline": {"limit": 5, "name": "a"}},
    ),
    'retry t load --input {"limit":1,"day":"x"} --set limit=null': (
        "retry_node",
        {"node_id": "load", "interrupt": False, "input_inline": {"limit": None, "day": "x"}},
    ),
    "retry t load --input @input.json": (
        "retry_node",
        {"node_id": "load", "interrupt": False, "input_inline": {"limit": 7}},
    ),
    "retry t load --retries 0 --backoff-sec 1.5 --timeout-sec 60 --interrupt": (
        "retry_node",
        {
            "node_id": "load",
            "interrupt": True,
            "timeout_sec": 60.0,
            "retry_policy": {"max": 0, "backoff_sec": 1.5},
        },
    ),
    "retry-batches t load b1 b2": (
        "retry_batches",
        {"node_id": "load", "batch_uids": ["b1", "b2"], "interrupt": False},
    ),
    "skip-batches t load": ("skip_batches", {"node_id": "load", "batch_uids": [], "interrupt": False}),
    "skip t load": ("skip_node", {"node_id": "load", "interrupt": False}),
    "skip t load --interrupt": ("skip_node", {"node_id": "load", "interrupt": True}),
    "complete t load": ("complete_node", {"node_id": "load", "interrupt": False}),
    "complete t load --metric count=7 --metric place=north --batches @batches.json": (
        "complete_node",
        {
            "node_id": "load",
            "interrupt": False,
            "metrics": {"count": 7, "place": "north"},
            "batches": [{"batch_uid": "b0"}],
        },
    ),
    "fail t load": ("fail_node", {"node_id": "load", "interrupt": False}),
    "decide t review approve": (
        "decide",
        {"node_id": "review", "decision": "approve", "comment": ""},
    ),
    "decide t review reject --comment late": (
        "decide",
        {"node_id": "review", "decision": "reject", "comment": "late"},
    ),
    "satisfy t data:eu": ("satisfy", {"prerequisite": "data:eu"}),
    "change t more.json": ("change_graph", {"nodes": [{"node_id": "x", "type": "r"}]}),
    "change t --set a:b:limit=5 --set c:day=null": (
        "change_graph",
        {
            "changes": {
                "a:b": {"io": {"input_inline": {"limit": 5}}},
                "c": {"io": {"input_inline": {"day": None}}},
            }
        },
    ),
}


@pytest.mark.parametrize(("command", "sent"), COMMANDS.items(), ids=COMMANDS)
def test_command_sends_only_the_given_keys(
    tasks: Tasks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, sent: tuple[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "input.json").write_text('{"limit": 7}')
    (tmp_path / "more.json").write_text('{"nodes": [{"node_id": "x", "type": "r"}]}')
    (tmp_path / "batches.json").write_text('[{"batch_uid": "b0"}]')
    assert run(command.split()) == 0
    name, given = sent
    assert tasks.applied == [("t", name, {**given, "reason": "", "by": "ada@host"})]


@pytest.mark.parametrize("command", [each for each in COMMANDS if ".json" not in each])
def test_command_takes_what_all_actions_have_in_common(tasks: Tasks, command: str) -> None:
    more = ["--reason", "why", "--by", "bob", "--if-revision", "3", "--if-state", STATE, "--dry-run"]
    assert run([*command.split(), *more]) == 0
    name, given = COMMANDS[command]
    common = {"reason": "why", "by": "bob", "if_revision": 3, "if_state": STATE}
    assert (tasks.applied, tasks.previewed) == ([], [("t", name, {**given, **common})])


@pytest.mark.parametrize("command", [each for each in COMMANDS if ".json" not in each])
def test_the_command_of_a_preview_applies_what_it_has_shown(
    tasks: Tasks, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    outdated = ["--if-revision", "0", "--if-state", "f" * 16]
    assert run([*command.split(), "--reason", "it's late", *outdated, "--json", "--dry-run"]) == 0
    line = json.loads(capsys.readouterr().out)["command"]
    assert line.startswith(f"flowkit {command.split()[0]} t")
    assert run(shlex.split(line)[1:]) == 0
    name, given = COMMANDS[command]
    seen = {"if_revision": RESULT["revision"], "if_state": STATE}
    assert tasks.applied == [("t", name, {**given, "reason": "it's late", "by": "ada@host", **seen})]


HOSTILE_UIDS = ["-b", "two words", "$(touch x)", "a\x1b[2J\u202eb\n", "--if-state=x"]


def test_the_command_of_a_preview_has_the_same_batches_and_no_password(
    tasks: Tasks, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is printed as one that can be pasted, whatever characters the uids have."""
    given = [
        "retry-batches",
        "--mongo-url",
        "mongodb://u:secret@h",
        "--by=-x",
        "--dry-run",
        "--",
        "t",
        "load",
    ]
    assert run([*given, *HOSTILE_UIDS]) == 0
    printed = capsys.readouterr().err.splitlines()[-1]
    assert printed.isprintable()
    assert "secret" not in printed
    words = ["bash", "-c", f'set -- {printed.partition("flowkit ")[2]}; printf "%s\\0" "$@"']
    argv = subprocess.run(words, capture_output=True, check=True, text=True).stdout.split("\0")[:-1]
    assert run(argv) == 0
    [(_, _, sent)] = tasks.applied
    assert (sent["batch_uids"], sent["by"], sent["if_state"]) == (HOSTILE_UIDS, "-x", STATE)


def test_the_command_of_the_preview_of_a_rerun_starts_what_it_has_shown(
    tasks: Tasks, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["rerun", "t", "load", "--set", "load:day=1 2", "--dry-run"]) == 0
    line = capsys.readouterr().err.splitlines()[-1].strip()
    assert line == f"apply exactly this  flowkit rerun t load --set 'load:day=1 2' --if-state {STATE}"
    assert run(shlex.split(line.partition("flowkit ")[2])) == 0
    [(_, _, sent)] = tasks.applied
    assert (sent["nodes"], sent["inputs"], sent["if_state"]) == (["load"], {"load": {"day": "1 2"}}, STATE)


def test_command_prints_the_affected_nodes_and_the_notes(
    tasks: Tasks, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["retry", "t", "load"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "retry_node applied as revision 1; it affects 2 nodes of task t",
        "  load    held -> queued",
        "  report  finished -> queued",
    ]
    assert printed.err == "  variables keep their values\n"


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_what_a_task_says_of_interrupt_names_the_option(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dry_run: list[str]
) -> None:
    async def refuse(*given: object, **options: object) -> None:
        raise ActionRejected("node 'load' is running; interrupt=true stops its attempt", RejectionCause.BUSY)

    note = "node 'load' keeps its batches; interrupt=true starts it anew"
    monkeypatch.setitem(RESULT, "notes", [note])
    assert run(["retry", "t", "load", *dry_run]) == 0
    line = capsys.readouterr().err.splitlines()[0]
    assert line == "  node 'load' keeps its batches; --interrupt starts it anew"
    monkeypatch.setattr(tasks, "act", refuse)
    monkeypatch.setattr(tasks, "preview", refuse)
    assert run(["skip", "t", "load", *dry_run]) != 0
    assert "node 'load' is running; --interrupt stops its attempt" in capsys.readouterr().err


def test_command_prints_a_task_id_with_braces(tasks: Tasks, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["retry", "day{1}", "load"]) == 0
    assert capsys.readouterr().out.startswith(
        "retry_node applied as revision 1; it affects 2 nodes of task day{1}\n"
    )


def test_command_prints_one_json_document(tasks: Tasks, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["skip", "t", "load", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == {"task_id": "t", "action": "skip_node", "dry_run": False, **RESULT}


CALLS: dict[str, tuple[Callable[[Coordinator], Awaitable[object]], dict[str, Any]]] = {
    "retry_node": (
        lambda c: c.retry_node("t", "load", input_inline={"limit": 5}, retry_policy={"max": 0}),
        {"node_id": "load", "interrupt": False, "input_inline": {"limit": 5}, "retry_policy": {"max": 0}},
    ),
    "skip_node": (lambda c: c.skip_node("t", "load", interrupt=True), {"node_id": "load", "interrupt": True}),
    "complete_node": (
        lambda c: c.complete_node("t", "load", metrics={"n": 1}, batches=({"batch_uid": "b"},)),
        {"node_id": "load", "interrupt": False, "metrics": {"n": 1}, "batches": [{"batch_uid": "b"}]},
    ),
    "fail_node": (lambda c: c.fail_node("t", "load"), {"node_id": "load", "interrupt": False}),
    "retry_batches": (
        lambda c: c.retry_batches("t", "load", ["b1"]),
        {"node_id": "load", "batch_uids": ["b1"], "interrupt": False},
    ),
    "skip_batches": (
        lambda c: c.skip_batches("t", "load"),
        {"node_id": "load", "batch_uids": [], "interrupt": False},
    ),
    "decide": (
        lambda c: c.decide("t", "review", "approve", comment="fine"),
        {"node_id": "review", "decision": "approve", "comment": "fine"},
    ),
    "satisfy": (lambda c: c.satisfy("t", "data:eu"), {"prerequisite": "data:eu"}),
    "change_graph": (
        lambda c: c.change_graph("t", nodes=[{"node_id": "x"}], edges=[("a", "x")]),
        {"nodes": [{"node_id": "x"}], "edges": [["a", "x"]]},
    ),
    "pause": (lambda c: c.pause("t"), {"scopes": ["task"], "interrupt": False}),
    "resume": (lambda c: c.resume("t"), {"scopes": []}),
}


@pytest.mark.parametrize(("name", "call", "given"), [(name, *rest) for name, rest in CALLS.items()])
async def test_method_of_the_coordinator_sends_only_the_given_keys(
    name: str, call: Callable[[Coordinator], Awaitable[object]], given: dict[str, Any]
) -> None:
    coordinator, tasks = Coordinator(db=memory_database()), Tasks()
    coordinator._client = tasks  # type: ignore[assignment]  # a stand-in for the client
    assert await call(coordinator) == RESULT
    assert tasks.applied == [("t", name, {**given, "reason": "", "by": ""})]


MISTAKES: dict[str, list[str]] = {
    "retry t load --set limit": [
        "--set 'limit' is not of the form key=value",
        "write, for example, --set limit=5",
    ],
    "retry t load --set a=1 --set a=2": ["--set a is given twice"],
    "retry t load --input [1]": ["--input holds a list, not an object", "for example"],
    "retry t a[0]": ["NODE is 'a[0]'; it must be the id of a node"],
    "complete t load --metric count": ["--metric 'count' is not of the form key=value"],
    "complete t load --batches {}": ["--batches holds an object, not a list of objects", "batch_uid"],
    "complete t load --batches [7]": ["the list in --batches holds a number, not only objects"],
    "complete t load --batches @no.json": ["there is no file of --batches 'no.json'"],
    "change t no.json": ["there is no file 'no.json'"],
    "change t --set limit=5": ["--set 'limit' names no node", "write, for example, --set load:limit=50"],
    "decide t review maybe": ["the decision 'maybe' is unknown; known: approve, reject"],
}


@pytest.mark.parametrize(("command", "reported"), MISTAKES.items(), ids=MISTAKES)
def test_invalid_argument_is_rejected_before_anything_is_sent(
    tasks: Tasks, capsys: pytest.CaptureFixture[str], command: str, reported: list[str]
) -> None:
    assert run(command.split()) == 2
    line = capsys.readouterr().err
    assert [part for part in reported if part not in line] == []
    assert (tasks.applied, tasks.previewed) == ([], [])


async def test_task_id_of_an_action_is_checked_before_connecting() -> None:
    with pytest.raises(ConfigError, match="task_id is"):
        await Coordinator(db=memory_database()).skip_node("*", "load")


async def test_tasks_are_found_by_what_their_nodes_wait_for() -> None:
    """The kind decides, and not the sentence. A node that has ended waits for nothing."""
    db, waiting = memory_database(), {"status": "deferred", "waits_for": "a decision: approve or reject"}
    nodes: dict[str, dict[str, Any]] = {
        "held": waiting | {"wait_kind": "decision", "held_until_ms": 5},
        "approval": waiting | {"wait_kind": "decision", "waits_for": "your word"},
        "prerequisites": {"status": "queued", "wait_kind": "event"},
        "slot": {"status": "deferred", "wait_kind": "slot", "waits_for": "a decision"},
        "ended": waiting | {"wait_kind": "decision", "status": "cancelled"},
        "running": {"status": "running"},
    }
    for task_id, node in nodes.items():
        graph = {"nodes": [{"node_id": "a", "status": "queued"}, {"node_id": "b", **node}]}
        await db.tasks.insert_one({"id": task_id, "status": "running", "finished_at": None, "graph": graph})
    coordinator = Coordinator(db=db)
    found = {each.task_id for each in await coordinator.list_tasks(waits="decision")}
    assert found == {"held", "approval"}
    assert [each.task_id for each in await coordinator.list_tasks(waits="event")] == ["prerequisites"]
    assert await coordinator.list_tasks("failed", waits="decision") == []
    assert len(await coordinator.list_tasks()) == len(nodes)
    with pytest.raises(ConfigError, match=r"waits.*decision.*event"):
        await coordinator.list_tasks(waits="held")


async def test_tasks_are_found_by_their_name_and_their_start() -> None:
    db = memory_database()
    named: list[tuple[str, dict[str, Any], str | None]] = [
        ("by-params", {"pipeline_name": "orders"}, "other"),
        ("by-graph", {}, "orders"),
        ("neither", {"pipeline_name": "other"}, "orders"),
    ]
    for day, (task_id, params, name) in enumerate(named, 1):
        document = {"id": task_id, "status": "running", "params": params, "started_at": iso(day * 86_400)}
        await db.tasks.insert_one({**document, "graph": {"name": name, "nodes": []}})
    catalog = TaskCatalog(db)
    assert [each.task_id for each in await catalog.list_tasks(name="orders")] == ["by-graph", "by-params"]
    assert [each.task_id for each in await catalog.list_tasks(since=2 * 86_400)] == ["neither", "by-graph"]


def test_since_names_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "--since", "yesterday"]) == 2
    assert "--since 'yesterday' is not a duration" in capsys.readouterr().err
