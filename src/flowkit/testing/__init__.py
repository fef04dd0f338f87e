"""Utilities for testing handlers, functions and graphs of FlowKit users."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flowkit.testing.context import HandlerContext, handler_context
from flowkit.testing.fixtures import FlowkitRun, FlowkitTime
from flowkit.testing.graphs import GraphRun, NodeRun, run_graph, simulate
from flowkit.testing.memory import memory_database
from flowkit.testing.simulation.server import TaskStuck
from flowkit.testing.simulation.steering import SimulatedTask
from flowkit.testing.stubs import Stub, stub

if TYPE_CHECKING:
    from flowkit.testing.env import FlowkitEnv
    from flowkit.testing.external import ExternalWorker, Misbehavior

__all__ = [
    "ExternalWorker",
    "FlowkitEnv",
    "FlowkitRun",
    "FlowkitTime",
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


_HOMES = {"ExternalWorker": "external", "FlowkitEnv": "env", "Misbehavior": "external"}
"""What is imported when it is first used: it needs a Kafka client, or an engine, and other tests do not."""


def __getattr__(name: str) -> Any:
    """Import a public name of `_HOMES`. Raise AttributeError for any other name."""
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
