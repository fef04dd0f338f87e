"""Real local servers for the tests and the demo, run as child processes of whoever needs them."""

from flowkit_dev.mongo import MongoServer
from flowkit_dev.stack import Stack, setup
from flowkit_dev.temporal import TemporalServer

__all__ = ["MongoServer", "Stack", "TemporalServer", "setup"]
