"""Runs one engine, bridge or worker until a signal arrives, with its health file and its health port."""

from __future__ import annotations

import asyncio
import gc
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from flowkit.cli import output
from flowkit.cli.errors import Exit
from flowkit.cli.health import health_endpoint, health_file, health_values, measure
from flowkit.cli.loading import (
    choose_roles,
    load_config,
    load_flow_parts,
    load_functions,
    load_handlers,
    load_worker_config,
)
from flowkit.cli.output import log_processes
from flowkit.cli.replicas import ReplicaReports, scraped
from flowkit.cli.stop_signals import on_stop_signals
from flowkit.core.loops import run
from flowkit.core.ready_line import LOADED_LINE, ready_line

if TYPE_CHECKING:
    from pathlib import Path

    from flowkit.attempt.background import Health
    from flowkit.cli.options import DeploymentOptions, HealthOptions
    from flowkit.config import CoordinatorConfig, WorkerConfig
    from flowkit.products import ProcessMetrics
    from flowkit.worker import RoleHandler


class LongRunning(Protocol):
    """The common interface of `Coordinator`, `BridgeRunner` and `Worker`."""

    async def start(self) -> None:
        """Start polling."""

    async def stop(self) -> None:
        """Stop gracefully."""

    async def wait_stopped(self) -> None:
        """Wait until it stops on its own; raise its error."""

    def health(self) -> Health:
        """Return whether it runs, and how its background loops do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCommand:
    """The options of `flowkit engine`. An instance runs one process."""

    where: DeploymentOptions
    config: str | None
    page_url: str | None
    functions: list[str]
    handlers: list[str]
    """Handlers that the engine hosts."""
    flows: list[str]
    """Flows whose functions and inline handlers the engine runs."""
    after: Path | None
    """The lock for which it waits once it has loaded its code; None for none."""
    verbose: bool

    def load(self) -> tuple[CoordinatorConfig, dict[str, Any], dict[str, RoleHandler]]:
        """Return the settings, functions, and hosted handlers by role. Raise ConfigError if an option is invalid."""
        given = {"queue": self.where.queue, "page_url": self.page_url}
        settings = load_config(self.config, {name: value for name, value in given.items() if value})
        functions, handlers = load_flow_parts(self.flows)
        return (
            settings,
            {**functions, **load_functions(self.functions)},
            {**handlers, **load_handlers(self.handlers)},
        )

    def __call__(self, reports: HealthOptions, number: int) -> None:
        """Run one engine until it is stopped."""
        log_processes(self.verbose)
        loaded = self.load()
        _wait_for_lock(self.after)
        run(self._run(*loaded, reports))

    async def _run(
        self,
        settings: CoordinatorConfig,
        adapters: dict[str, Any],
        handlers: dict[str, RoleHandler],
        reports: HealthOptions,
    ) -> None:
        from flowkit.cli import servers
        from flowkit.coordinator import Coordinator

        metrics = measure(reports, "engine", settings.queue)
        async with servers.database(self.where) as db:
            client = await servers.connect_temporal(metrics)
            process = Coordinator(
                db=db,
                cfg=settings,
                adapters=adapters,
                client=client,
                own_thread=bool(adapters or handlers),
                handlers=handlers,
            )
            hosted = f" and hosts {', '.join(handlers)}" if handlers else ""
            await run_until_stopped(process, f"engine polls queue {settings.queue}{hosted}", reports, metrics)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerCommand:
    """The options of `flowkit worker`. An instance runs one process."""

    where: DeploymentOptions
    config: str | None
    handlers: list[str]
    roles: list[str]
    concurrency: int | None
    after: Path | None
    """As for an engine."""
    verbose: bool

    def load(self) -> tuple[WorkerConfig, dict[str, RoleHandler]]:
        """Return the settings and the handlers by role. Raise ConfigError if an option is invalid."""
        loaded = load_handlers(self.handlers)
        given: dict[str, Any] = {
            "roles": choose_roles(loaded, self.roles),
            "queue": self.where.queue,
            "max_concurrent": self.concurrency,
        }
        overrides = {name: value for name, value in given.items() if value is not None}
        return load_worker_config(self.config, overrides), loaded

    def __call__(self, reports: HealthOptions, number: int) -> None:
        """Run one worker until it is stopped."""
        log_processes(self.verbose)
        settings, handlers = self.load()
        _wait_for_lock(self.after)
        if settings.worker_id and number:
            settings = replace(settings, worker_id=f"{settings.worker_id}-{number}")
        run(self._run(settings, handlers, reports))

    async def _run(
        self, settings: WorkerConfig, handlers: dict[str, RoleHandler], reports: HealthOptions
    ) -> None:
        from flowkit.cli import servers
        from flowkit.worker import Worker

        metrics = measure(reports, "worker", settings.queue)
        async with servers.database(self.where) as db:
            client = await servers.connect_temporal(metrics)
            process = Worker(db=db, cfg=settings, handlers=handlers, client=client)
            summary = f"worker runs {', '.join(settings.roles)} on queue {settings.queue}"
            await run_until_stopped(process, summary, reports, metrics)


async def run_until_stopped(
    process: LongRunning, summary: str, reports: HealthOptions, metrics: ProcessMetrics | None = None
) -> None:
    """Start a process, print its ready line, and stop it on SIGINT or SIGTERM. A second signal ends it at once.

    Meanwhile, serve its health and its metrics. Raise its error if it stops on its own.
    """

    def render() -> bytes:
        return metrics.render(health_values(process.health())) if metrics else b""

    rendered = render if metrics else None
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    is_replica = isinstance(reports, ReplicaReports)  # The parent receives the same signals, and kills it.
    on_stop_signals(
        lambda: loop.call_soon_threadsafe(stop.set), (lambda: None) if is_replica else _end_at_once
    )
    with health_endpoint(reports, process.health, rendered), scraped(reports, rendered):
        await process.start()
        _freeze_garbage_collector()
        output.note(ready_line(summary))
        waits = [asyncio.create_task(stop.wait()), asyncio.create_task(process.wait_stopped())]
        with health_file(reports.file, process.health):
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            await process.stop()
    waits[0].cancel()
    if waits[1] in done:
        waits[1].result()


def _end_at_once() -> NoReturn:
    """End the process without its shutdown, as a crash does: its attempts are lost when their leases expire."""
    os._exit(Exit.INTERRUPTED)


def _freeze_garbage_collector() -> None:
    """Exclude the objects of the startup from garbage collection: they live as long as the process."""
    gc.collect()
    gc.freeze()


def _wait_for_lock(file: Path | None) -> None:
    """Report that the code is loaded, then wait until the process with the old code has exited."""
    if file is not None:
        from flowkit.local.data_folder import hold_lock

        output.note(LOADED_LINE)
        hold_lock(file)
