"""One run of the demo, from the start of its servers to their end."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from motor.motor_asyncio import AsyncIOMotorClient

from code_index.chaos import LEASE_SEC, Chaos
from code_index.documents import documents_of
from code_index.earlier import forget_earlier_tasks
from code_index.graph import index_graph
from code_index.laps import Laps
from code_index.outcome import checked_outcome
from code_index.page.data import Run
from code_index.page.environment import environment
from code_index.page.render import write_page
from code_index.processes import DATABASE, Crew, check_all_run
from code_index.report import ranking_table, summary
from code_index.screen import screen
from code_index.task import IndexTask
from code_index.trouble import Trouble
from flowkit import CoordinatorConfig
from flowkit.connection import connect
from flowkit.local import Stack

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from temporalio.client import Client

    from code_index.chaos import Incident
    from code_index.outcome import Outcome
    from code_index.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says."""

    source: Path
    folder: Path
    report: Path
    batch_size: int
    workers: int
    chaos: bool
    keep: bool

    @property
    def engine_settings(self) -> dict[str, Any]:
        """Settings of the engine that are not the defaults."""
        return {"lease_ttl_sec": LEASE_SEC} if self.chaos else {}


class Demo:
    """Starts what it needs, runs one task, shows it, and stops what it started."""

    def __init__(self, options: Options, console: Console) -> None:
        self._options = options
        self._console = console
        self._laps = Laps()
        self._stack = Stack(options.folder)
        self._task_id = f"code-index-{secrets.token_hex(4)}"
        # A queue of its own: on servers that others use too, nobody else's workers take this task's nodes.
        self._crew = Crew(options.folder, self._task_id, options.workers, options.engine_settings)

    def run(self) -> None:
        """The whole run. Raises DemoError, DevServerError or FlowKitError; nothing runs on afterwards."""
        self._say(f"source   {self._options.source}")
        with self._stack:
            os.environ.update(self._stack.exports)
            self._say(f"servers  Temporal and Mongo, ready in {self._laps.lap('servers'):.1f} s")
            with self._crew:
                self._say(f"FlowKit  {self._told_crew()}, ready in {self._laps.lap('FlowKit'):.1f} s")
                asyncio.run(self._index())
                if self._options.keep:
                    self._keep()
        self._laps.lap("stop")
        self._say(f"time     {self._laps}")

    def _told_crew(self) -> str:
        workers = self._options.workers
        return f"an engine and {workers} worker{'s' if workers > 1 else ''}"

    async def _index(self) -> None:
        mongo: AsyncIOMotorClient[dict[str, Any]] = AsyncIOMotorClient(
            self._stack.mongo_url, tz_aware=True, serverSelectionTimeoutMS=5_000
        )
        try:
            await self._run_task(await connect(), mongo[DATABASE])
        finally:
            mongo.close()

    async def _run_task(self, client: Client, db: Any) -> None:
        if self._stack.mongo is not None:
            await forget_earlier_tasks(client, db)
        task = IndexTask(client, db, task_id=self._task_id, queue=self._task_id)
        trouble = Trouble.KILL if self._options.chaos else Trouble.FLAKY_DISK
        await task.create(index_graph(self._options.source, self._options.batch_size, trouble))
        self._say(f"task     {self._task_id}")
        self._say(f"Web UI   {self._web_ui(client)}")
        self._say(f"{self._told_trouble()}\n")
        incident = await self._follow(task)
        self._laps.lap("task")
        await self._tell_outcome(client, db, incident)
        self._laps.lap("report")

    def _web_ui(self, client: Client) -> str:
        """The task's page in the Web UI; nobody told us where that of a server of others listens."""
        ui = self._stack.temporal.ui_url if self._stack.temporal is not None else "<its Web UI>"
        return f"{ui}/namespaces/{client.namespace}/workflows/{self._task_id}"

    def _told_trouble(self) -> str:
        if not self._options.chaos:
            return "trouble  two batches of node enrich fail once each, on purpose"
        usual = CoordinatorConfig().lease_ttl_sec
        return (
            "chaos    the worker that holds node enrich will be killed half-way; its lease\n"
            f"         is {LEASE_SEC:.0f} s here instead of {usual:.0f} s, so that the wait is short"
        )

    async def _follow(self, task: IndexTask) -> Incident | None:
        """See the task through; answers what chaos has done."""
        with screen(self._console) as shown:
            chaos = Chaos(self._crew, shown.tell) if self._options.chaos else None

            async def look(progress: Progress) -> None:
                shown.show(progress)
                if chaos is not None:
                    await chaos.look(progress)

            try:
                await task.follow(look, self._check)
            finally:
                if chaos is not None:
                    await chaos.end()
        return chaos.incident if chaos is not None else None

    def _check(self) -> None:
        check_all_run(self._stack.servers)
        self._crew.check()

    async def _tell_outcome(self, client: Client, db: Any, incident: Incident | None) -> None:
        lost = frozenset({(incident.node, incident.attempt)} if incident else ())
        documents = await documents_of(db, self._task_id, lost)
        outcome = checked_outcome(documents)
        self._show_outcome(outcome, incident)
        run = Run(
            documents=documents,
            outcome=outcome,
            incident=incident,
            web_ui=self._web_ui(client),
            environment=await environment(client, db, self._options, self._stack),
        )
        write_page(run, self._options.report)
        self._say(f"report   {self._options.report}")

    def _show_outcome(self, outcome: Outcome, incident: Incident | None) -> None:
        if outcome.ranking:
            self._console.print(ranking_table(outcome), "")
        for line in summary(outcome, incident):
            self._say(line)
        if self._options.chaos and incident is None:
            self._say("killed   nobody: node enrich was through before the kill could meet it")

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
