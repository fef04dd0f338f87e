"""One run of the demo, from the start of its servers to their end."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from motor.motor_asyncio import AsyncIOMotorClient

from code_index.earlier import forget_ended_tasks
from code_index.graph import index_graph
from code_index.laps import Laps
from code_index.outcome import Outcome, outcome_of
from code_index.processes import DATABASE, check_all_run, engine_and_workers, running
from code_index.report import ranking_table, summary
from code_index.screen import screen
from code_index.task import IndexTask
from flowkit.connection import connect
from flowkit.local import Stack

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says."""

    source: Path
    folder: Path
    batch_size: int
    workers: int
    keep: bool


class Demo:
    """Starts what it needs, runs one task, shows it, and stops what it started."""

    def __init__(self, options: Options, console: Console) -> None:
        self._options = options
        self._console = console
        self._laps = Laps()
        self._stack = Stack(options.folder)
        self._processes = engine_and_workers(options.folder, options.workers)

    def run(self) -> None:
        """The whole run. Raises DemoError, DevServerError or FlowKitError; nothing runs on afterwards."""
        self._say(f"source   {self._options.source}")
        with self._stack:
            os.environ.update(self._stack.exports)
            self._say(f"servers  Temporal and Mongo, ready in {self._laps.lap('servers'):.1f} s")
            with running(self._processes):
                self._say(f"FlowKit  {self._crew()}, ready in {self._laps.lap('FlowKit'):.1f} s")
                asyncio.run(self._index())
                if self._options.keep:
                    self._keep()
        self._laps.lap("stop")
        self._say(f"time     {self._laps}")

    def _crew(self) -> str:
        workers = self._options.workers
        return f"an engine and {workers} worker{'s' if workers > 1 else ''}"

    async def _index(self) -> None:
        mongo: AsyncIOMotorClient[dict[str, Any]] = AsyncIOMotorClient(
            self._stack.mongo_url, tz_aware=True, serverSelectionTimeoutMS=5_000
        )
        try:
            outcome = await self._outcome(mongo[DATABASE])
        finally:
            mongo.close()
        self._laps.lap("task")
        self._report(outcome)

    async def _outcome(self, db: Any) -> Outcome:
        if self._stack.mongo is not None:
            await forget_ended_tasks(db)
        client = await connect()
        task = IndexTask(client, db)
        await task.create(index_graph(self._options.source, self._options.batch_size))
        self._say(f"task     {task.task_id}")
        self._say_where(client.namespace, task.task_id)
        with screen(self._console) as shown:
            await task.follow(shown, self._check)
        return await outcome_of(db, task.task_id)

    def _check(self) -> None:
        check_all_run([*self._stack.servers, *self._processes])

    def _say_where(self, namespace: str, task_id: str) -> None:
        """The task's page in the Web UI; nobody told us where that of a server of others listens."""
        ui = self._stack.temporal.ui_url if self._stack.temporal is not None else "<its Web UI>"
        self._say(f"Web UI   {ui}/namespaces/{namespace}/workflows/{task_id}\n")

    def _report(self, outcome: Outcome) -> None:
        if outcome.ranking:
            self._console.print(ranking_table(outcome), "")
        for line in summary(outcome):
            self._say(line)

    def _keep(self) -> None:
        self._say("\nall keeps running, the Web UI above too; Ctrl-C ends it")
        never = threading.Event()
        try:
            while not never.wait(1.0):
                self._check()
        except KeyboardInterrupt:
            self._say("")
            self._laps.lap("kept")

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
