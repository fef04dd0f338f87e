"""`flowkit debug`: runs the code of a stored node again, compares the results, and writes nothing."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

import flowkit
from flowkit.cli import app
from flowkit.cli.debug.recording import ReadOnly
from flowkit.cli.debug.report import is_same_error, list_frames
from flowkit.masks import Mask
from flowkit.testing import GraphRun, run_graph
from flowkit.worker import Batch, BatchResult, FinalizeResult, RoleHandler, role
from tests.unit.handler_runs import call, node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from flowkit.worker import RunContext
    from tests.cli.conftest import Program
    from tests.integration.harness import Harness

HERE = "debugged_handlers"
"""The module of this test's handlers, as the command line names it."""

BROKEN: set[str] = set()
"""The uids of batches that `Pull` fails on."""

REFUSED: set[str] = set()
"""The uids of batches for which it returns a failure."""

PASSWORD = "correct-horse"


class Load(RoleHandler):
    """Stores three batches with two items each."""

    role = "load"

    async def iter_batches(self, loaded: dict[str, Any]) -> AsyncIterator[Batch]:
        for number in range(3):
            yield Batch(batch_uid=f"b{number}", payload={"rows": [number, number + 10]})

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        return BatchResult(
            success=True, metrics={"rows": batch.payload["rows"], "token": f"token-of-{batch.batch_uid}"}
        )


class Pull(RoleHandler):
    """Processes batches of other nodes, items and chunks, and writes what a handler can."""

    role = "pull"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        if (batch.batch_uid or "") in REFUSED:
            return BatchResult(success=False, reason_code="refused", error="not today")
        if batch.batch_uid in BROKEN:
            raise ValueError(f"no {batch.batch_uid} with {PASSWORD}, {batch.payload['meta']['token']}")
        ctx.kv["last"] = batch.batch_uid
        await ctx.artifacts.upsert_partial(f"own-{batch.batch_uid}", {"own": True})
        payload = batch.payload
        return BatchResult(success=True, metrics={"seen": payload.get("items") or payload["meta"]["rows"]})

    async def finalize(self, ctx: RunContext) -> FinalizeResult:
        await ctx.vars.set("pulled", True)
        assert await ctx.vars.get("pulled") is True
        stored = [each["batch_uid"] async for each in ctx.artifacts.partials()]
        return FinalizeResult(metrics={"batches": len(stored)}, vars={"incr": {"runs": 1}})


class Rescue(RoleHandler):
    """Pulls from the node that has failed, as its handler decides."""

    role = "rescue"

    async def load_input(self, input_ref: Any, input_inline: Any, ctx: RunContext) -> dict[str, Any]:
        (failed,) = ctx.failed_nodes
        return {"input_adapter": "pull.from_artifacts", "input_args": {"from_nodes": [failed["node_id"]]}}

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        return BatchResult(success=True, metrics={"code": ctx.failed_nodes[0]["reason_code"]})


class Inline(RoleHandler):
    """Runs in an engine, on a thread."""

    role = "inline"
    inline = True

    def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        if batch.batch_uid in BROKEN:
            sys.exit("enough")
        return BatchResult(success=True, metrics={"n": 1})


class Rows(BaseModel):
    rows: list[int]


@role("total")
async def total(given: Rows, ctx: RunContext) -> int:
    """Return the sum of the rows."""
    return sum(given.rows)


@role("yield", key=lambda each: each.rows[0])
async def yield_rows(count: int = 2) -> AsyncIterator[Rows]:
    """Yield rows."""
    for number in range(count):
        yield Rows(rows=[number])


async def report(task_id: str, text: str) -> dict[str, Any]:
    """Print something, and return what it received."""
    sys.stdout.write("not JSON\n")
    return {"said": text}


def pulling(**args: Any) -> dict[str, Any]:
    """Return the inline input of a node that pulls."""
    adapter = "pull.from_artifacts.rechunk:size" if args else "pull.from_artifacts"
    return {"input_adapter": adapter, "password": PASSWORD, **({"input_args": args} if args else {})}


NODES = [
    node("load", "load"),
    node("more", "load"),
    node("pulled", "pull", "load", inline=pulling()),
    node("both", "pull", "load", "more", inline=pulling()),
    node("chunks", "pull", "load", inline=pulling(size=1, meta_list_key="rows")),
    node("mapped", "pull", "load", map={"over": "params.items", "batch_size": 2}),
    node("wide", "inline", "load", inline=pulling(), parallel=2),
    node("inlined", "inline", "load", inline={**pulling(), "day": {"$cel": "params.day"}}),
    node("typed", "total", "load", inline=pulling()),
    node("yielded", "yield", inline={"count": 3}),
    call("said", "report", "load", args={"text": "hello"}),
    call("counted", "vars.incr", "load", args={"key": "n", "by": 2}),
    call("summed", "metrics.aggregate", "load", args={"node_id": "load"}),
    call("merged", "merge.generic", "load", args={"from_nodes": ["load"], "target": {}}),
]
"""One node of each kind."""

DEBUGGED = [each["node_id"] for each in NODES]


async def run_task(*nodes: dict[str, Any], db: Any = None) -> GraphRun:
    """Run a task with these nodes, or with all."""
    graph = {"nodes": [*(nodes or NODES)], "on_node_failure": "continue"}
    for each in graph["nodes"]:
        each["retry_policy"] = {"max": 0}
    params = {"day": "monday", "items": ["a", "b", "c"], "db": {"password": PASSWORD}}
    handlers = (Load(), Pull(), Rescue(), Inline(), total, yield_rows)
    return await run_graph(graph, *handlers, params=params, functions={"report": report}, db=db)


class Debugger:
    """Runs `flowkit debug` for the nodes of a task in memory."""

    def __init__(
        self, run: GraphRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.run = run
        self._capsys = capsys

        @asynccontextmanager
        async def database(where: object) -> AsyncIterator[Any]:
            yield run.db

        monkeypatch.setattr("flowkit.cli.servers.database", database)
        monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])

    def __call__(self, node_id: str, *options: str, code: int = 0) -> tuple[str, str]:
        """Return the standard output and the standard error."""
        names = ("Load", "Pull", "Rescue", "Inline", "total", "yield_rows")
        known = [option for name in names for option in ("--handler", f"{HERE}:{name}")]
        given = ["debug", self.run.task_id, node_id, *known, "--function", f"report={HERE}:report", *options]
        ended = app.run(given)
        out, err = self._capsys.readouterr()
        assert ended == code, err
        return out, err

    def show(self, command: str, node_id: str) -> str:
        """Return the standard error of another command for a node."""
        assert app.run([command, self.run.task_id, node_id]) == 0
        return self._capsys.readouterr().err

    def read(self, node_id: str, *options: str, code: int = 0) -> dict[str, Any]:
        """Return the document of `--json`."""
        out, _ = self(node_id, "--yes", "--json", *options, code=code)
        found: dict[str, Any] = json.loads(out)
        return found


@pytest.fixture(autouse=True)
def repaired() -> Iterator[None]:
    """Let all batches succeed at the end of a test."""
    yield
    BROKEN.clear()
    REFUSED.clear()


async def snapshot(db: Any) -> dict[str, list[Any]]:
    """Return all documents of a database."""
    names = await db.list_collection_names()
    return {name: [document async for document in db[name].find({})] for name in sorted(names)}


Debug = Callable[[GraphRun], Debugger]


@pytest.fixture
def debug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Debug:
    """Returns what runs `flowkit debug` for a task."""
    return lambda run: Debugger(run, monkeypatch, capsys)


@pytest.fixture(scope="module")
def finished() -> GraphRun:
    """A finished task with one node of each kind. No test changes it."""
    run = asyncio.run(run_task())
    assert run.status == "finished", run.reason
    return run


@pytest.fixture
def debugger(finished: GraphRun, debug: Debug) -> Debugger:
    """Debugs this task."""
    return debug(finished)


def test_nodes_of_every_kind_run_again_with_the_stored_results_and_nothing_is_written(
    debugger: Debugger,
) -> None:
    before = asyncio.run(snapshot(debugger.run.db))
    for node_id in DEBUGGED:
        found = debugger.read(node_id)
        assert found["failure"] is None, node_id
        stored = [each for each in (*found["batches"], found["final"]) if each is not None]
        assert [each["differences"] for each in stored] == [[]] * len(stored), node_id
        assert all(each["stored"] for each in stored), node_id
    assert asyncio.run(snapshot(debugger.run.db)) == before


def test_a_debugged_attempt_cannot_write_whatever_calls_the_database(finished: GraphRun) -> None:
    read_only = ReadOnly(finished.db)
    with pytest.raises(PermissionError, match="`flowkit debug` writes nothing, so it cannot call update_one"):
        read_only.tasks.update_one({}, {"$set": {"status": "failed"}})


@pytest.mark.parametrize("node_id", ["chunks", "mapped"])
def test_each_batch_of_a_node_can_be_run_alone(debugger: Debugger, node_id: str) -> None:
    for batch in debugger.read(node_id)["batches"]:
        found = debugger.read(node_id, "--batch", batch["uid"])
        assert [each["uid"] for each in found["batches"]] == [batch["uid"]]
        assert found["batches"][0]["metrics"] == batch["metrics"]
        assert found["final"] is None


def test_what_the_attempt_would_write_is_printed(debugger: Debugger) -> None:
    out, err = debugger("pulled", "--yes")
    assert out.splitlines()[-8:] == [
        "not written:",
        '  artifact own-b0  {"own": true}',
        '  artifact own-b1  {"own": true}',
        '  artifact own-b2  {"own": true}',
        "  vars.set pulled  true",
        "  vars.incr runs  1",
        "ctx.kv at the end:",
        '  last  "b2"',
    ]
    assert "FlowKit stores nothing of this run" in err
    assert "source load is finished: 3 batches" in err
    assert debugger.read("counted")["not_written"]["vars"] == [{"operation": "incr", "path": "n", "value": 2}]
    assert debugger.read("said")["returned"] == {"said": "hello"}
    assert debugger.read("merged")["not_written"]["complete"]["meta"]["complete_nodes"] == ["load"]


def test_a_result_that_differs_shows_both_values(debugger: Debugger, monkeypatch: pytest.MonkeyPatch) -> None:
    async def process(self: Pull, batch: Batch, ctx: RunContext) -> BatchResult:
        return BatchResult(success=True, metrics={"seen": {"rows": 7}})

    monkeypatch.setattr(Pull, "process_batch", process)
    out, _ = debugger("pulled", "--batch", "b1", "--yes")
    assert out.splitlines()[2:] == [
        "  differs from the result stored by attempt 1:",
        '    metrics.seen: now {"rows": 7}, stored [1, 11]',
    ]


def failing(**fields: Any) -> dict[str, Any]:
    """Return a node whose batch b1 fails."""
    BROKEN.add("b1")
    return node("pulled", "pull", "load", inline=pulling(), **fields)


def test_the_error_of_a_batch_is_compared_with_the_stored_one_and_hides_secrets(debug: Debug) -> None:
    debugger = debug(asyncio.run(run_task(node("load", "load"), failing())))
    command = f"`flowkit debug {debugger.run.task_id} pulled --batch b1 --handler MODULE:CLASS`"
    assert command in debugger.show("batches", "pulled")
    assert command in debugger.show("result", "pulled")
    out, _ = debugger("pulled", "--batch", "b1", "--yes", code=1)
    assert PASSWORD not in out
    lines = out.splitlines()
    assert lines[1] == "  also stored as failed by attempt 1"
    assert lines[2].endswith(", in process_batch")
    assert lines[4].startswith(
        "error of batch b1: bad_input: ValueError: no b1 with (hidden), (hidden), at tests/"
    )
    assert lines[5:] == ["  would not be retried: the error is permanent", "  same error as stored"]
    BROKEN.clear()
    REFUSED.add("b1")
    found = debugger.read("pulled", "--batch", "b1", code=1)["failure"]
    assert (found["code"], found["message"], found["same_error"]) == ("refused", "not today", False)
    assert found["decision"] == "would not be retried: the node has no retries"
    REFUSED.clear()
    assert (
        "differs from the stored result: failed by attempt 1"
        in debugger("pulled", "--batch", "b1", "--yes")[0]
    )


@pytest.mark.parametrize(
    ("message", "is_same"),
    [("no b1, at other.py:7, in read", True), ("no b2, at a.py:3, in read", False), ("", True)],
)
def test_the_same_error_may_come_from_another_place(message: str, is_same: bool) -> None:
    assert is_same_error("bad_input", message, "bad_input: no b1, at a.py:3, in read (worker w)") is is_same


def test_a_node_that_sets_batches_aside_says_so_and_keeps_their_errors(debug: Debug) -> None:
    kept = {"then": "quarantine", "attempts": 1, "max": 5}
    run = asyncio.run(run_task(node("load", "load"), failing(on_batch_failure=kept)))
    assert run.status == "finished", run.reason
    found = debug(run).read("pulled", code=1)
    assert [each["uid"] for each in found["batches"]] == ["b0", "b1"]
    assert found["failure"]["decision"] == "the node would set the batch aside after 1 try"
    assert found["failure"]["same_error"] is True


def test_a_node_started_by_a_failure_knows_it_and_its_handler_may_choose_the_sources(debug: Debug) -> None:
    rescued = failing(routing={"on_failure": ["rescue"]})
    debugger = debug(asyncio.run(run_task(node("load", "load"), rescued, node("rescue", "rescue", "pulled"))))
    (batch,) = [each for each in debugger.read("rescue")["batches"] if each["uid"] == "b0"]
    assert (batch["metrics"], batch["differences"]) == ({"code": "bad_input"}, [])
    assert "did you mean 'own-b0'?" in debugger("rescue", "--yes", "--batch", "own-0", code=2)[1]


def test_quitting_the_debugger_ends_the_command(debugger: Debugger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("q\n"))
    out, _ = debugger("pulled", "--break", "--yes", code=130)
    assert "error" not in out


def test_an_exit_of_the_handler_is_an_error_like_any_other(debugger: Debugger) -> None:
    BROKEN.add("b2")
    found = debugger.read("wide", "--batch", "b2", code=1)["failure"]
    assert found["message"].startswith("SystemExit: enough")
    assert found["same_error"] is None


def test_a_batch_of_a_node_with_shards_may_do_what_a_shard_may(
    debugger: Debugger, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def process(self: Inline, batch: Batch, ctx: RunContext) -> BatchResult:
        await ctx.vars.set("n", 1)
        return BatchResult(success=True)

    monkeypatch.setattr(Inline, "process_batch", process)
    assert "a shard of a node with 'parallel' cannot change" in str(debugger.read("wide", code=1)["failure"])
    assert debugger.read("inlined")["failure"] is None


@pytest.mark.parametrize(
    ("node_id", "options", "says"),
    [
        ("pulled", ("--batch", "bb1"), "has no batch 'bb1': no source has stored it; did you mean 'b1'?"),
        ("both", ("--batch", "zzz"), "the first of its 6 are 'b0', 'b0@more', 'b1', 'b1@more', 'b2'"),
        (
            "mapped",
            ("--batch", "9"),
            "uids are the numbers of the batches of items, from 0; it has '0000000'",
        ),
        ("load", ("--batch", "b9"), "the handler does not yield it"),
        ("said", ("--batch", "b0"), "calls the function 'report', which has no batches; omit --batch"),
        ("nope", (), "has no node 'nope'"),
    ],
)
def test_a_missing_input_is_explained(
    debugger: Debugger, node_id: str, options: tuple[str, ...], says: str
) -> None:
    assert says in debugger(node_id, "--yes", *options, code=2)[1]


async def change(run: GraphRun, name: str, **fields: Any) -> None:
    """Change fields of a node in the task document."""
    (index,) = [i for i, each in enumerate(NODES) if each["node_id"] == name]
    changed = {f"graph.nodes.{index}.{key}": value for key, value in fields.items()}
    await run.db.tasks.update_one({"id": run.task_id}, {"$set": changed})


def test_an_input_that_is_gone_says_why(debug: Debug) -> None:
    run = asyncio.run(run_task())
    debugger, batch = debug(run), ("--batch", "b1", "--yes")

    async def reset() -> None:
        await change(run, "load", first_epoch=2, attempt_epoch=2, status="queued")

    asyncio.run(reset())
    assert "source 'load' stored it in an earlier generation" in debugger("pulled", *batch, code=2)[1]

    async def delete() -> None:
        await change(run, "load", first_epoch=0, status="finished")
        await run.db.artifacts.delete_many({"node_id": "load"})

    asyncio.run(delete())
    gone = "attempt 1 has processed it, but its source no longer has it: it was deleted"
    assert gone in debugger("pulled", *batch, code=2)[1]
    asyncio.run(run.db.artifacts.delete_many({"node_id": "pulled"}))
    asyncio.run(change(run, "load", status="running"))
    assert "no source has stored it yet (load is running)" in debugger("pulled", *batch, code=2)[1]
    asyncio.run(run.db.map_items.delete_many({}))
    assert "its items were deleted" in debugger("mapped", "--batch", "0000001", "--yes", code=2)[1]
    asyncio.run(run.db.input_values.delete_many({}))
    assert (
        "the items of node 'mapped' are not in MongoDB: they were deleted"
        in debugger("mapped", "--yes", code=2)[1]
    )
    asyncio.run(change(run, "inlined", status="queued", attempt_epoch=0))
    assert "the node is queued and has not started" in debugger("inlined", "--yes", code=2)[1]


def run_program(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Return the exit code and the standard error of a command."""
    return app.run(["debug", *arguments]), capsys.readouterr().err


def test_code_that_is_not_named_is_asked_for(debugger: Debugger, capsys: pytest.CaptureFixture[str]) -> None:
    task_id, db = debugger.run.task_id, debugger.run.db
    code, err = run_program(capsys, task_id, "pulled", "--yes", "--handler", f"{HERE}:Load")
    assert code == 2
    assert (
        "no handler for role 'pull' of node 'pulled' is given; the given handlers serve load; pass it with"
        in err
    )
    assert "pass --function report=module:function" in run_program(capsys, task_id, "said", "--yes")[1]
    asyncio.run(db.dispatches.insert_one({"task_id": task_id, "node_id": "pulled"}))
    _, err = run_program(capsys, task_id, "pulled", "--yes")
    asyncio.run(db.dispatches.delete_many({}))
    assert "which external workers serve, so its code is not here; print its input with --show-input" in err


def test_it_asks_before_it_runs_code(debugger: Debugger, capsys: pytest.CaptureFixture[str]) -> None:
    given = (debugger.run.task_id, "pulled", "--handler", f"{HERE}:Pull")
    assert run_program(capsys, *given)[0] == 2
    assert run_program(capsys, *given, "--json", "--pdb", "--yes")[0] == 2


class Terminal(io.StringIO):
    """Commands that a user types."""

    def isatty(self) -> bool:
        """Return True."""
        return True


@pytest.mark.parametrize("answer", ["y", "n"])
def test_an_answer_runs_the_code_or_not(
    debugger: Debugger, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(f"{answer}\n"))
    out, _ = debugger("pulled", code=0 if answer == "y" else 130)
    assert bool(out.strip()) == (answer == "y")


@pytest.mark.parametrize(("node_id", "shown"), [("pulled", "'b1'"), ("inlined", "'b1'"), ("said", None)])
def test_break_stops_before_the_first_line(
    debugger: Debugger, monkeypatch: pytest.MonkeyPatch, node_id: str, shown: str | None
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("p batch.batch_uid\nc\n" if shown else "p text\nc\n"))
    options = ("--batch", "b1") if shown else ()
    out, _ = debugger(node_id, "--break", "--yes", *options)
    assert out.splitlines()[0].endswith("process_batch()" if shown else "report()")
    assert f"(Pdb) {shown or repr('hello')}" in out


def test_break_stops_in_the_function_of_a_typed_role(
    debugger: Debugger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("p given.rows, ctx.batch.batch_uid\nc\n"))
    out, _ = debugger("typed", "--break", "--yes", "--batch", "b1")
    assert out.splitlines()[0].endswith("total()")
    assert "(Pdb) ([1, 11], 'b1')" in out


def test_pdb_opens_where_the_exception_was_raised(
    debugger: Debugger, monkeypatch: pytest.MonkeyPatch
) -> None:
    BROKEN.add("b1")
    monkeypatch.setattr(sys, "stdin", Terminal("p batch.batch_uid\nq\n"))
    out, _ = debugger("pulled", "--pdb", "--yes", "--batch", "b1", code=1)
    assert "process_batch()" in out.split("error of batch b1")[1]
    assert "(Pdb) 'b1'" in out
    BROKEN.clear()
    REFUSED.add("b1")
    _, err = debugger("pulled", "--pdb", "--yes", "--batch", "b1", code=1)
    assert "no exception was raised, so --pdb has nothing to open" in err


def test_the_input_of_any_node_is_shown_without_its_secrets(debugger: Debugger) -> None:
    before = asyncio.run(snapshot(debugger.run.db))
    shown = {node_id: json.loads(debugger(node_id, "--show-input")[0]) for node_id in DEBUGGED}
    assert asyncio.run(snapshot(debugger.run.db)) == before
    assert PASSWORD not in json.dumps(shown)
    assert shown["load"]["batches"] is None
    assert [each["batch_uid"] for each in shown["both"]["batches"]][3:] == ["b0@more", "b1@more", "b2@more"]
    assert shown["mapped"]["batches"][1]["payload"] == {"items": ["c"], "first": 2}
    assert shown["inlined"]["input_inline"]["day"] == "monday"
    assert (shown["said"]["fn"], shown["said"]["fn_args"]) == ("report", {"text": "hello"})
    assert shown["said"]["params"]["db"] == {"password": "(hidden)"}


def test_mask_hides_values_of_keys_and_texts_of_well_known_forms() -> None:
    mask = Mask({"db": {"password": "hunter22"}, "tokens": 17, "api_keys": ["k-1234"]})
    assert mask.value({"said": "with hunter22 and k-1234", "Authorization": "x", "tokens": {"in": 3}}) == {
        "said": "with (hidden) and (hidden)",
        "Authorization": "(hidden)",
        "tokens": {"in": 3},
    }
    mask.add({"meta": {"access_key": "found later"}})
    assert mask.text("with found later") == "with (hidden)"
    for text in ("mongodb://me:pw@host/db", "Bearer abcdefghijklmnop1234", "AKIAABCDEFGHIJKLMNOP"):
        assert "(hidden)" in mask.text(text)
    assert mask.text("batch 0f3a of /data/rows.csv at 12:30") == "batch 0f3a of /data/rows.csv at 12:30"


def test_frames_of_a_package_whose_name_begins_like_flowkits_are_those_of_a_user() -> None:
    path = f"{Path(str(flowkit.__file__)).parent}_tasks/load.py"
    with pytest.raises(ZeroDivisionError) as raised:
        FunctionType(compile("1 / 0", path, "exec"), {})()
    assert [path in frame for frame in list_frames(raised.value)] == [False, True]


HANDLERS = """
from flowkit.worker import Batch, BatchResult, RoleHandler

class Pull(RoleHandler):
    role = "pull"

    async def process_batch(self, batch, ctx):
        await ctx.vars.set("seen", batch.batch_uid)
        return BatchResult(success=True, metrics={"seen": batch.payload["meta"]["rows"]})
"""


@pytest.mark.server
async def test_the_program_debugs_a_batch_on_a_real_database(harness: Harness, program: Program) -> None:
    run = await run_task(node("load", "load"), failing(), db=harness.db)
    program.write("mine.py", HANDLERS)
    before = await snapshot(harness.db)
    given = ("debug", run.task_id, "pulled", "--handler", "mine:Pull", "--yes", "--batch", "b1")
    ended = await program.call(*given, env=harness.environment)
    assert (ended.code, ended.out.splitlines()[1:]) == (
        0,
        [
            "  metrics.seen  [1, 11]",
            "  differs from the stored result: failed by attempt 1",
            "not written:",
            '  vars.set seen  "b1"',
        ],
    ), ended.err
    assert await snapshot(harness.db) == before
