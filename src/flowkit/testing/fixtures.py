"""What the fixtures without servers are: run tasks from tests that are coroutines or plain functions."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from flowkit.testing.graphs import run_graph, simulate

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from flowkit.testing.graphs import TypedGraph
    from flowkit.testing.runs import GraphRun
    from flowkit.worker import RoleHandler


class FlowkitRun:
    """The fixture `flowkit_run`."""

    def __call__(self, graph: dict[str, Any] | TypedGraph, *handlers: RoleHandler, **options: Any) -> Any:
        """Run a task as `run_graph` does, with its options. Return its GraphRun; in a coroutine, await it."""
        return outcome(run_graph(graph, *handlers, **options))


class FlowkitTime:
    """The fixture `flowkit_time`."""

    def __call__(self, graph: dict[str, Any] | TypedGraph, *handlers: RoleHandler, **options: Any) -> Any:
        """Run a task as `simulate` does, with its options. Return its GraphRun; in a coroutine, await it."""
        return outcome(simulate(graph, *handlers, **options))


def outcome(run: Coroutine[Any, Any, GraphRun]) -> Any:
    """Return the outcome of a run, or the run to await if an event loop runs already."""
    return run if _is_in_coroutine() else asyncio.run(run)


def _is_in_coroutine() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
