"""The cases of the benchmark whose nodes run inside an engine, compared with ordinary activities of the baseline."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.cases import CASES as ORDINARY
from benchmarks.cases import Case
from benchmarks.handler import OneBatch

QUEUE = "benchmark-inline"

TARGETS = {"chain of 30": "<= 0.40", "100 tasks x 10 nodes": ">= 1.50"}


class InlineBatch(OneBatch):
    """The handler of the ordinary cases, inside the engine."""

    inline = True


def cases() -> list[Case]:
    """Return the inline variant of each case that has a target."""
    return [
        replace(case, name=f"{case.name}, inline", target=TARGETS[case.name])
        for case in ORDINARY
        if case.name in TARGETS
    ]


def command() -> list[str]:
    """Return the arguments of the `flowkit` process that hosts the handler."""
    return ["engine", "--queue", QUEUE, "--role", "benchmarks.inline:InlineBatch"]
