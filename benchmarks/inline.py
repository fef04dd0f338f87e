"""The role of the cases whose nodes run inside an engine."""

from __future__ import annotations

from benchmarks.handler import OneBatch
from benchmarks.processes import Program, flowkit

SIDE = "inline"
QUEUE = "benchmark-inline"


class InlineBatch(OneBatch):
    """The handler of the ordinary cases, inside the engine."""

    inline = True


def program() -> Program:
    """Return the engine that hosts the handler."""
    role = ("--role", "benchmarks.inline:InlineBatch")
    return flowkit("engine", "engine", "--queue", QUEUE, *role, side=SIDE)
