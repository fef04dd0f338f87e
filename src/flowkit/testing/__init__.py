"""Help for the tests of those who use FlowKit."""

from flowkit.testing.memory import memory_database

__all__ = ["memory_database"]
