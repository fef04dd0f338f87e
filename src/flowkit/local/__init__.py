"""Local servers and FlowKit processes, run as child processes of tests, the demo and `flowkit up`."""

from flowkit.local.kafka import Kafka
from flowkit.local.mongo import MongoServer
from flowkit.local.stack import Stack
from flowkit.local.temporal import TemporalServer

__all__ = ["Kafka", "MongoServer", "Stack", "TemporalServer"]
