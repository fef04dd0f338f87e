"""What the fixtures of the pytest plugin are: run tasks from tests that are coroutines or plain functions."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from flowkit.testing.graphs import run_graph, simulate
from flowkit.testing.servers import start_engine

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping
    from contextlib import AbstractAsyncContextManager

    from flowkit.adapters.mongo import Database
    from flowkit.testing.graphs import TypedGraph
    from flowkit.testing.runs import GraphRun
    from flowkit.testing.servers import LocalTemporal, TestEngine
    from flowkit.worker import RoleHandler


class FlowkitRun:
    """The fixture `flowkit_run`."""

    def __call__(self, graph: dict[str, Any] | TypedGraph, *handlers: RoleHandler, **options: Any) -> Any:
        """Run a task as `run_graph` does, with its options. Return its GraphRun; in a coroutine, await it."""
        return _outcome(run_graph(graph, *handlers, **options))


class FlowkitTime:
    """The fixture `flowkit_time`."""

    def __call__(self, graph: dict[str, Any] | TypedGraph, *handlers: RoleHandler, **options: Any) -> Any:
        """Run a task as `simulate` does, with its options. Return its GraphRun; in a coroutine, await it."""
        return _outcome(simulate(graph, *handlers, **options))


class FlowkitEnv:
    """The fixture `flowkit_env`: an engine and workers of the real kind."""

    def __init__(self, server: LocalTemporal) -> None:
        self.server = server
        """The Temporal server: its `address`, and the `ui_url` of its Web UI."""

    def run(
        self,
        graph: dict[str, Any] | TypedGraph,
        *handlers: RoleHandler,
        params: Mapping[str, Any] | None = None,
        functions: Mapping[str, Any] | None = None,
        db: Database | None = None,
        timeout_sec: float = 60.0,
    ) -> Any:
        """Run a task to its end. Return its GraphRun; in a coroutine, await it."""
        return _outcome(self._run(graph, handlers, params, functions, db, timeout_sec))

    async def _run(
        self,
        graph: dict[str, Any] | TypedGraph,
        handlers: tuple[RoleHandler, ...],
        params: Mapping[str, Any] | None,
        functions: Mapping[str, Any] | None,
        db: Database | None,
        timeout_sec: float,
    ) -> GraphRun:
        async with start_engine(self.server, graph, handlers, functions, db) as engine:
            return await engine.wait(await engine.submit(params), timeout_sec)

    def engine(
        self,
        graph: dict[str, Any] | TypedGraph,
        *handlers: RoleHandler,
        functions: Mapping[str, Any] | None = None,
        db: Database | None = None,
    ) -> AbstractAsyncContextManager[TestEngine]:
        """Return an engine for an `async with` block: `submit`, `wait`, `status`, `web_ui`, `coordinator`."""
        return start_engine(self.server, graph, handlers, functions, db)


def _outcome(run: Coroutine[Any, Any, GraphRun]) -> Any:
    """Return the outcome of a run, or the run to await if an event loop runs already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(run)
    return run
