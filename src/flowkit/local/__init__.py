"""Real local servers for the tests and the demo, run as child processes of whoever needs them."""

from flowkit.local.mongo import MongoServer
from flowkit.local.stack import Stack, setup
from flowkit.local.temporal import TemporalServer

__all__ = ["MongoServer", "Stack", "TemporalServer", "setup"]
