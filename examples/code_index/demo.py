"""One run of the demo, from the start of its servers to their stop."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from motor.motor_asyncio import AsyncIOMotorClient

from code_index.chaos import LEASE_SEC, Chaos
from code_index.cleanup import delete_earlier_tasks
from code_index.display import open_display
from code_index.documents import load_documents
from code_index.external import EXTERNAL_ROLE, External
from code_index.faults import Fault
from code_index.flow import Params
from code_index.page.data import DemoRun
from code_index.page.environment import environment
from code_index.page.render import write_page
from code_index.processes import DATABASE, ProcessGroup, ensure_running
from code_index.report import ranking_table, summary
from code_index.result import verified_result
from code_index.stopwatch import Stopwatch
from code_index.task import IndexTask
from flowkit import CoordinatorConfig
from flowkit.connection import connect
from flowkit.local import Stack

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from temporalio.client import Client

    from code_index.chaos import Incident
    from code_index.progress import Progress
    from code_index.result import IndexResult


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command line."""

    source: Path
    folder: Path
    report: Path
    batch_size: int
    workers: int
    chaos: bool
    external: bool
    """Whether an external worker runs one of the roles."""
    keep: bool

    @property
    def engine_settings(self) -> dict[str, Any]:
        """The engine's settings that differ from the defaults."""
        return {"lease_ttl_sec": LEASE_SEC} if self.chaos else {}


class Demo:
    """Starts servers and processes, runs and shows one task, and stops everything that it started."""

    def __init__(self, options: Options, console: Console) -> None:
        self._options = options
        self._console = console
        self._stopwatch = Stopwatch()
        self._stack = Stack(options.folder)
        self._task_id = f"code-index-{secrets.token_hex(4)}"
        # Its own queue, so that on shared servers no other workers take the nodes of this task.
        self._external = External(options.folder, self._task_id) if options.external else None
        self._processes = ProcessGroup(
            options.folder,
            self._task_id,
            options.workers,
            options.engine_settings,
            without=EXTERNAL_ROLE if options.external else None,
        )

    def run(self) -> None:
        """Run the demo; raises DemoError, DevServerError or FlowKitError. Nothing keeps running afterwards."""
        self._print(f"source   {self._options.source}")
        with self._stack:
            os.environ.update(self._stack.exports)
            self._print(f"servers  Temporal and Mongo, ready in {self._stopwatch.lap('servers'):.1f} s")
            with self._processes, self._external or nullcontext():
                self._print(
                    f"FlowKit  {self._describe_processes()}, ready in {self._stopwatch.lap('FlowKit'):.1f} s"
                )
                if self._external is not None:
                    self._print(f"external {self._external.description}")
                asyncio.run(self._index())
                if self._options.keep:
                    self._keep()
        self._stopwatch.lap("stop")
        self._print(f"time     {self._stopwatch}")

    def _describe_processes(self) -> str:
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
            await delete_earlier_tasks(client, db)
        task = IndexTask(client, db, task_id=self._task_id, queue=self._task_id)
        fault = Fault.KILL if self._options.chaos else Fault.FLAKY_DISK
        await task.create(
            Params(source=self._options.source, batch_size=self._options.batch_size, fault=fault)
        )
        self._print(f"task     {self._task_id}")
        self._print(f"Web UI   {self._web_ui(client)}")
        self._print(f"{self._describe_faults()}\n")
        incident = await self._follow(task)
        self._stopwatch.lap("task")
        await self._report_result(client, db, incident)
        self._stopwatch.lap("report")

    def _web_ui(self, client: Client) -> str:
        """Return the address of the task in the Web UI; for a server that already ran, the host is unknown."""
        ui = self._stack.temporal.ui_url if self._stack.temporal is not None else "<its Web UI>"
        return f"{ui}/namespaces/{client.namespace}/workflows/{self._task_id}"

    def _describe_faults(self) -> str:
        if not self._options.chaos:
            return "faults   two batches of node enrich fail once each, on purpose"
        default = CoordinatorConfig().lease_ttl_sec
        return (
            "chaos    one of the workers that run node enrich will be killed half-way; the lease\n"
            f"         is {LEASE_SEC:.0f} s instead of the default {default:.0f} s, so that the wait is short"
        )

    async def _follow(self, task: IndexTask) -> Incident | None:
        """Follow the task to its end; returns the kill, if there was one."""
        with open_display(self._console) as display:
            chaos = Chaos(self._processes, display.print_line) if self._options.chaos else None

            async def on_progress(progress: Progress) -> None:
                display.show(progress)
                if chaos is not None:
                    await chaos.update(progress)

            try:
                await task.follow(on_progress, self._check)
            finally:
                if chaos is not None:
                    await chaos.wait()
        return chaos.incident if chaos is not None else None

    def _check(self) -> None:
        ensure_running(self._stack.servers)
        self._processes.ensure_running()
        if self._external is not None:
            ensure_running(self._external.processes)

    async def _report_result(self, client: Client, db: Any, incident: Incident | None) -> None:
        documents = await load_documents(db, self._task_id)
        result = verified_result(documents)
        self._show_result(result, incident)
        run = DemoRun(
            documents=documents,
            result=result,
            incident=incident,
            web_ui=self._web_ui(client),
            environment=await environment(client, db, self._options, self._stack),
        )
        write_page(run, self._options.report)
        self._print(f"report   {self._options.report}")

    def _show_result(self, result: IndexResult, incident: Incident | None) -> None:
        if result.ranking:
            self._console.print(ranking_table(result), "")
        for line in summary(result, incident):
            self._print(line)
        if self._options.chaos and incident is None:
            self._print("killed   no worker: node enrich finished before the kill")

    def _keep(self) -> None:
        self._print("\neverything keeps running, including the Web UI; press Ctrl-C to stop it")
        never = threading.Event()
        try:
            while not never.wait(1.0):
                self._check()
        except KeyboardInterrupt:
            self._print("")
            self._stopwatch.lap("kept")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
