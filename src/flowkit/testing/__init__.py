"""Utilities for testing handlers, functions and graphs of FlowKit users."""

from flowkit.testing.graphs import GraphRun, NodeRun, run_graph
from flowkit.testing.memory import memory_database

__all__ = ["GraphRun", "NodeRun", "memory_database", "run_graph"]
