"""Real local servers, and FlowKit's own processes, as child processes of whoever needs them: tests, demo, `flowkit up`."""

from flowkit.local.mongo import MongoServer
from flowkit.local.stack import Stack
from flowkit.local.temporal import TemporalServer

__all__ = ["MongoServer", "Stack", "TemporalServer"]
