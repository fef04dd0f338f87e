"""Utilities for testing handlers, functions and graphs of FlowKit users."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowkit.testing.context import HandlerContext, handler_context
from flowkit.testing.graphs import GraphRun, NodeRun, run_graph, simulate
from flowkit.testing.memory import memory_database
from flowkit.testing.simulation.server import TaskStuck
from flowkit.testing.simulation.steering import SimulatedTask
from flowkit.testing.stubs import Stub, stub

if TYPE_CHECKING:
    from flowkit.testing.external import ExternalWorker, Misbehavior

__all__ = [
    "ExternalWorker",
    "GraphRun",
    "HandlerContext",
    "Misbehavior",
    "NodeRun",
    "SimulatedTask",
    "Stub",
    "TaskStuck",
    "handler_context",
    "memory_database",
    "run_graph",
    "simulate",
    "stub",
]


def __getattr__(name: str) -> Any:
    """Import the external worker when it is first used: it needs a Kafka client, and other tests do not."""
    if name in ("ExternalWorker", "Misbehavior"):
        from flowkit.testing import external

        return getattr(external, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
