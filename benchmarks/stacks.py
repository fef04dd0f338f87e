"""What a process does with its processor time, from sampled stacks of its Python threads and the time of each thread.

Pure, so that a test can show which layer a stack belongs to.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

CORE = "Temporal's core (Rust): gRPC, state machines"
SDK = "Temporal's SDK in Python"
CONVERSION = "conversion of payloads: JSON, pydantic, protobuf"
MONGO = "MongoDB's driver: BSON, sockets, Motor's threads"
OWN = "FlowKit's code, or the hand-written code"
LOOP = "event loop, tasks, hand-over between threads"
LOGGING = "logging"
LAYERS = (OWN, CONVERSION, SDK, CORE, MONGO, LOOP, LOGGING)

_LAYER_OF_PATH: tuple[tuple[str, tuple[str, ...]], ...] = (
    (LOGGING, ("logging/", "flowkit/core/log.py")),
    (CONVERSION, ("temporalio/converter", "temporalio/contrib/pydantic", "temporalio/bridge/_visitor")),
    (CONVERSION, ("_command_aware_visitor", "payload_converter.py", "json/", "pydantic", "protobuf/")),
    (MONGO, ("pymongo/", "bson/", "motor/")),
    (SDK, ("temporalio/",)),
    (OWN, ("flowkit/", "benchmarks/")),
    (LOOP, ("asyncio/", "uvloop/", "concurrent/futures/", "threading.py", "queue.py")),
)
"""Parts of paths, in the order in which they are looked for. Other files, such as those of the standard library, belong
to the layer of their caller."""

_WAITING = (
    *(
        "_worker (concurrent/futures/thread.py",
        "Runner.run (asyncio/runners.py",
        "_run (pymongo/periodic_executor",
    ),
    *(
        "recv_into (pymongo/network_layer.py",
        "wait (threading.py",
        "select (selectors.py",
        "join (threading.py",
    ),
)
"""Frames in which a thread waits. A sampler on a busy machine takes a thread that was just woken for one that runs."""

_THREAD = re.compile(r"^thread \((\d+)\)(?:: (.*))?$")

Stack = tuple[str, ...]
"""The frames, from the outermost to the innermost one."""


def parse(text: str) -> dict[int, tuple[str, Counter[Stack]]]:
    """Return the name and the stacks of each thread, by its id, from what `py-spy record --threads` wrote as `raw`."""
    threads: dict[int, tuple[str, Counter[Stack]]] = {}
    for line in text.splitlines():
        frames, _, count = line.rpartition(" ")
        first, *rest = frames.split(";")
        if found := _THREAD.match(first):
            name = re.sub(r"[-_]?\d+(_\d+)?$", "", found[2] or "")
            threads.setdefault(int(found[1]), (name, Counter()))[1][tuple(rest)] += int(count)
    return threads


def layer_of(stack: Sequence[str]) -> str | None:
    """Return the layer of the innermost frame that has one; None for a thread that waits."""
    if not stack or any(mark in stack[-1] for mark in _WAITING):
        return None
    for frame in reversed(stack):
        for layer, parts in _LAYER_OF_PATH:
            if any(part in frame for part in parts):
                return layer
    return LOOP


def by_layer(
    seconds: Mapping[int, float], sampled: Mapping[int, tuple[str, Counter[Stack]]]
) -> dict[str, float]:
    """Return the seconds of each layer.

    `seconds` has the processor time of all threads, by id. That of a Python thread is divided as the samples of all
    threads with its name. A thread without Python is one of Temporal's core.
    """
    shares: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, stacks in sampled.values():
        shares[name] += _layers(stacks.items())
    used = dict.fromkeys(LAYERS, 0.0)
    for thread, spent in seconds.items():
        if thread not in sampled:
            used[CORE] += spent
            continue
        share = shares[sampled[thread][0]] or Counter({LOOP: 1})
        for layer, samples in share.items():
            used[layer] += spent * samples / share.total()
    return used


def _layers(stacks: Iterable[tuple[Stack, int]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for stack, count in stacks:
        if (layer := layer_of(stack)) is not None:
            found[layer] += count
    return found
