"""Help for the tests of those who use FlowKit."""

from flowkit.testing.graphs import GraphRun, NodeRun, run_graph
from flowkit.testing.memory import memory_database

__all__ = ["GraphRun", "NodeRun", "memory_database", "run_graph"]
