"""What the fixture `flowkit_env` is: it runs tasks on real engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowkit.testing.fixtures import outcome
from flowkit.testing.servers import start_engine

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractAsyncContextManager

    from flowkit.adapters.mongo import Database
    from flowkit.testing.graphs import TypedGraph
    from flowkit.testing.runs import GraphRun
    from flowkit.testing.servers import LocalTemporal, TestEngine
    from flowkit.worker import RoleHandler


class FlowkitEnv:
    """The fixture `flowkit_env`: an engine and workers of the real kind."""

    def __init__(self, server: LocalTemporal) -> None:
        self.server = server
        """The Temporal server: its `address`, and the `ui_url` of its Web UI."""

    def run(
        self,
        graph: dict[str, Any] | TypedGraph,
        *handlers: RoleHandler,
        params: Any = None,
        functions: Mapping[str, Any] | None = None,
        db: Database | None = None,
        timeout_sec: float = 60.0,
    ) -> Any:
        """Run a task to its end. Return its GraphRun; in a coroutine, await it."""
        return outcome(self._run(graph, handlers, params, functions, db, timeout_sec))

    async def _run(
        self,
        graph: dict[str, Any] | TypedGraph,
        handlers: tuple[RoleHandler, ...],
        params: Any,
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
