"""`python -m benchmarks.documents`: what the task document costs a MongoDB server that rewrites it with each update.

Each case runs one task with new processes: an engine, and two workers with 50 slots each. A listener in each of them
counts its commands to the collection `tasks`. A real server rewrites the whole document with each update, so the model
of the cost is the number of updates times the size of the document. An update also goes into the oplog, with about the
bytes of its operators.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import bson
import typer
import uvloop
from bson.raw_bson import RawBSONDocument
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import monitoring
from rich.console import Console
from rich.table import Table

from benchmarks.processes import OPTIMIZING, machine
from flowkit.adapters.tasks.store import TaskStore
from flowkit.cli import app
from flowkit.cli.errors import exit_process
from flowkit.client import TaskClient
from flowkit.connection import connect
from flowkit.local import Stack
from flowkit.worker import Batch, BatchResult, RoleHandler

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flowkit.worker.context import RunContext

QUEUE = "documents"
COUNTS = "FLOWKIT_DOCUMENTS_COUNTS"
"""Environment variable with the folder into which each process writes its counts when it stops."""
WORKERS, SLOTS = 2, 50
WIDTH = 100
ERROR = "the service responded with an unexpected status; " * 10
"""The error of a failed attempt, of 490 characters."""
_PAUSE_SEC = 0.2


class Load(RoleHandler):
    """Returns one number. With `fails` in the input, the first attempt fails."""

    role = "load"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return one number as metrics."""
        if batch.payload.get("fails") and ctx.attempt_epoch == 1:
            return BatchResult(success=False, reason_code="flaky", error=ERROR)
        return BatchResult(success=True, metrics={"n": 1})


class Inline(Load):
    """The same handler inside the engine."""

    role = "inline"
    inline = True


@dataclass(frozen=True, kw_only=True)
class Case:
    """One task."""

    shape: str
    nodes: int
    role: str = "load"
    rough: bool = False
    """Whether each fifth node fails once, and the params have 100 kB."""

    @property
    def name(self) -> str:
        """Return the name as the table shows it."""
        return f"{self.shape} of {self.nodes:,}{', inline' * (self.role == 'inline')}{', rough' * self.rough}"


CASES = (
    *(Case(shape="layers", nodes=nodes) for nodes in (100, 1_000, 5_000, 20_000)),
    *(Case(shape="layers", nodes=nodes, rough=True) for nodes in (1_000, 5_000)),
    Case(shape="fan-out", nodes=1_000),
    *(Case(shape="chain", nodes=nodes) for nodes in (100, 1_000)),
    Case(shape="chain", nodes=1_000, role="inline"),
)


@dataclass(kw_only=True)
class Counts:
    """What one process, or all of them, sent to the collection `tasks`."""

    commands: Counter[str] = field(default_factory=Counter)
    updates: int = 0
    sent: int = 0
    """BSON bytes of all commands."""
    delta: int = 0
    """BSON bytes of the operators of all updates, such as `$set`."""
    received: int = 0
    """BSON bytes of all replies."""


class Listener(monitoring.CommandListener):
    """Counts the commands to the collection `tasks`, and writes the counts to a file."""

    def __init__(self, folder: Path) -> None:
        self._counts = Counts()
        self._wanted: set[int] = set()
        self._folder = folder

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        """Count a command, and its updates."""
        name = event.command_name
        if event.command.get(name) != "tasks" or name == "createIndexes":
            return
        self._wanted.add(event.request_id)
        self._counts.commands[name] += 1
        self._counts.sent += len(bson.encode(event.command))
        changes = [each["u"] for each in event.command.get("updates", ())]
        changes += [event.command["update"]] if name == "findAndModify" else []
        self._counts.updates += len(changes)
        self._counts.delta += sum(len(bson.encode(each)) for each in changes)

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        """Count the bytes of the reply."""
        if event.request_id in self._wanted:
            self._wanted.discard(event.request_id)
            self._counts.received += len(bson.encode(event.reply))

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        """Count nothing."""
        self._wanted.discard(event.request_id)

    def write(self) -> None:
        """Write the counts to a file."""
        (self._folder / f"{os.getpid()}.json").write_text(json.dumps(self._counts.__dict__), encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One case."""

    case: Case
    attempts: Counts
    """What the workers sent; for inline nodes, the engine."""
    workflow: Counts
    """What the engine sent; nothing for inline nodes."""
    opened: int
    """BSON bytes of the document after its task has been created."""
    closed: int
    """BSON bytes of the document after its task has ended."""

    @property
    def rewritten(self) -> float:
        """Return the bytes that a server rewrites for each node. The document grows evenly from its open to its end."""
        updates = self.attempts.updates + self.workflow.updates
        return updates * (self.opened + self.closed) / 2 / self.case.nodes


def main(
    only: Annotated[str, typer.Option(help="Only cases with this text in their name.")] = "",
    largest: Annotated[int, typer.Option(help="Only cases with at most so many nodes.")] = 20_000,
) -> None:
    """Run each case and print a table. The largest case takes about five minutes on a quiet machine."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.environ.setdefault("_JAVA_OPTIONS", OPTIMIZING)
    cases = [case for case in CASES if only in case.name and case.nodes <= largest]
    console = Console(width=140)
    measured = []
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder), keeps_data=False) as stack:
        os.environ.update(stack.exports)
        for case in cases:
            measured.append(_measure(case))
            console.print(f"{case.name}: {_row(measured[-1])[1]} updates for each node")
    columns = ("case", "updates", "of attempts", "sent, B", "delta, B", "open, B", "end, B", "end, MB")
    table = Table(*columns, "rewritten, MB", title="for each node")
    for each in measured:
        table.add_row(*_row(each))
    console.print(table)
    console.print(f"Measured on {machine()}.")


def _row(each: Measured) -> list[str]:
    nodes, sides = each.case.nodes, (each.attempts, each.workflow)
    return [
        each.case.name,
        f"{sum(side.updates for side in sides) / nodes:.3f}",
        f"{each.attempts.updates / nodes:.3f}",
        f"{sum(side.sent for side in sides) / nodes:,.0f}",
        f"{sum(side.delta for side in sides) / nodes:,.0f}",
        f"{each.opened / nodes:,.0f}",
        f"{each.closed / nodes:,.0f}",
        f"{each.closed / 1e6:.2f}",
        f"{each.rewritten / 1e6:.3f}",
    ]


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(60)


def _measure(case: Case) -> Measured:
    engine = [
        "engine",
        "--queue",
        QUEUE,
        *(["--role", "benchmarks.documents:Inline"] * (case.role == "inline")),
    ]
    worker = ["worker", "benchmarks.documents:Load", "--queue", QUEUE, "--concurrency", str(SLOTS)]
    with tempfile.TemporaryDirectory() as folder:
        folders = {name: Path(folder) / name for name in ("engine", "worker")}
        with ExitStack() as processes:
            for name, command in [("engine", engine), *[("worker", worker)] * WORKERS]:
                folders[name].mkdir(exist_ok=True)
                environment = {**os.environ, COUNTS: str(folders[name])}
                started = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.documents", *command], env=environment
                )
                processes.callback(_stop, started)
            opened, closed = uvloop.run(_run(case))
        counts = {name: _total(path.iterdir()) for name, path in folders.items()}
    is_inline = case.role == "inline"
    return Measured(
        case=case,
        attempts=counts["engine" if is_inline else "worker"],
        workflow=Counts() if is_inline else counts["engine"],
        opened=opened,
        closed=closed,
    )


def _total(files: Iterable[Path]) -> Counts:
    total = Counts()
    for path in files:
        counts = Counts(**json.loads(path.read_text(encoding="utf-8")))
        total.commands.update(counts.commands)
        for name in ("updates", "sent", "delta", "received"):
            setattr(total, name, getattr(total, name) + getattr(counts, name))
    return total


async def _run(case: Case) -> tuple[int, int]:
    """Run the task of a case. Return the bytes of its document after its creation and after its end."""
    mongo: Any = AsyncIOMotorClient(os.environ["MONGO_URL"])
    store = mongo["flowkit"].tasks.with_options(
        codec_options=mongo.codec_options.with_options(document_class=RawBSONDocument)
    )
    for name in ("tasks", "artifacts", "metrics_raw", "stream_progress"):
        await mongo["flowkit"][name].delete_many({})
    tasks = TaskClient(await connect(), TaskStore(mongo["flowkit"]), queue=QUEUE)
    task_id = str(uuid.uuid4())
    params = {"text": "x" * 100_000} if case.rough else {}
    await tasks.create_task(params=params, graph=graph_of(case), task_id=task_id)
    opened = len((await store.find_one({"id": task_id})).raw)
    await tasks.handle(task_id).result()
    return opened, len((await store.find_one({"id": task_id})).raw)


def graph_of(case: Case) -> dict[str, Any]:
    """Return the graph of a case."""
    return {"nodes": [_node(case, index) for index in range(case.nodes)]}


def _node(case: Case, index: int) -> dict[str, Any]:
    node: dict[str, Any] = {
        "node_id": f"n{index}",
        "type": case.role,
        "depends_on": _parents(case.shape, index),
    }
    if case.rough:
        node["retry_policy"] = {"max": 3, "backoff_sec": _PAUSE_SEC}
        node["io"] = {"input_inline": {"fails": index % 5 == 0}}
    return node


def _parents(shape: str, index: int) -> list[str]:
    """Return the parents of a node: the one before in a chain, three of the previous layer in layers."""
    if shape == "chain":
        return [f"n{index - 1}"] if index else []
    layer, place = divmod(index, WIDTH)
    if shape == "fan-out" or not layer:
        return []
    return [f"n{(layer - 1) * WIDTH + (place + step) % WIDTH}" for step in range(3)]


def _run_process() -> None:
    """Run the `flowkit` command of the arguments, and count what it sends to MongoDB."""
    listener = Listener(Path(os.environ[COUNTS]))
    monitoring.register(listener)
    code = app.run(sys.argv[1:])
    listener.write()
    exit_process(code)


if __name__ == "__main__":
    if COUNTS in os.environ:
        _run_process()
    else:
        typer.run(main)
