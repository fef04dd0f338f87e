"""The rows of the benchmark: what a row compares, and how its samples are taken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from benchmarks.latencies import Latency
    from benchmarks.processes import Place, Processes, Usage

ROUNDS = 7
"""Samples of each side of a short row; a row may ask for fewer."""
ROW_SEC = 60.0
"""No round of a row starts after this time, but LEAST_ROUNDS always run."""
LEAST_ROUNDS = 3
IDLE_SEC = 1.5
SETTLE_SEC = 0.25
"""After a sample, the sides finish what they do behind the answer; it counts for the sample."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a side has to reach, as a ratio to the baseline, such as `<= 1.05`. Empty: nothing."""

    ratio: str = ""
    """For the figure of the row. For a rate, a larger ratio is better."""
    decided_by_wall: bool = False
    """Whether the processor time says nothing about it, because the sides only wait in different ways."""
    processor: str = ""
    """For the processor time of the side's own processes, without the servers."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table: a baseline, and one or more sides that are compared with it."""

    name: str
    unit: str
    items: int
    """How many nodes, batches or requests a sample processes."""
    item: str = "node"
    """What they are called."""
    targets: Mapping[str, Target] = field(default_factory=dict)
    """By side."""
    rounds: int = ROUNDS
    in_client: bool = False
    """Whether the sides run in the benchmark's own process, and not in processes of their own."""
    always: bool = True
    """Whether the row runs without `--rows all`."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """How to take a sample of one side."""

    run: Callable[[], Awaitable[float]]
    """Takes a sample and returns its figure, in the unit of the row."""
    programs: str
    """The side whose programs do the work (see `Program.side`)."""
    items: int | None = None
    """How many items a sample processes, unless as many as the row says."""
    warm_up: Callable[[], Awaitable[Any]] | None = None
    """Runs before the first sample; a sample if it is None."""
    prepare: Callable[[], Awaitable[Any]] | None = None
    """Runs before each sample, and is not measured."""
    check: Callable[[], Awaitable[None]] | None = None
    """Runs after each sample, and is not measured. Raises RuntimeError if the side has not done its work."""


@dataclass(frozen=True, kw_only=True)
class Sides:
    """The sides of a row by name. One is called `baseline`."""

    sides: Mapping[str, Side]
    clean: Callable[[], Awaitable[None]]
    """Runs before each sample."""


Opened = Sides | Callable[[], Awaitable[list[float]]]
"""The sides of a row, or a function that takes all samples of a latency, in milliseconds."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all rows share."""

    mongo: Any
    processes: Processes
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows that use the same programs, which run only as long as these rows are measured."""

    rows: tuple[Row | Latency, ...]
    opened: Callable[[Setting], AbstractAsyncContextManager[Mapping[str, Opened]]]
    """Starts the programs, and yields how each row takes its samples, by its name."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample of one side."""

    figure: float
    seconds: float
    """Wall time, with that after the end in which the processes settle."""
    usage: Usage


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The samples of a row."""

    row: Row
    samples: Mapping[str, list[Sample]]
    """By side. The samples with the same index are those of one round."""
    programs: Mapping[str, str]
    """The side whose programs did the work, by side."""
    items: Mapping[str, int]
    """How many items a sample has processed, by side."""
    idle: Mapping[Place, float]
    """The processor time of the processes in one second without work."""
    took_sec: float


COLLECTIONS = (
    *("tasks", "artifacts", "metrics_raw", "stream_progress", "node_shards", "worker_events"),
    *("dispatches", "bare_dispatches", "floor_dispatches", "flows", "flow_messages", "flow_events"),
)


async def emptied(mongo: Any, databases: Sequence[str]) -> None:
    """Delete the documents of earlier samples, because MongoDB's stand-in scans all documents at every update."""
    for database in databases:
        for collection in COLLECTIONS:
            await mongo[database][collection].delete_many({})


async def measure(row: Row, compared: Sides, processes: Processes, rounds: int) -> Measured:
    """Warm up, then take one sample of each side in every round; the order changes from round to round.

    At most `rounds` rounds run, and fewer of a row that takes long.
    """
    began = time.monotonic()
    for side in compared.sides.values():
        await (side.warm_up or side.run)()
    before = await processes.idle(IDLE_SEC)
    samples: dict[str, list[Sample]] = {name: [] for name in compared.sides}
    for round_ in range(rounds):
        if round_ >= LEAST_ROUNDS and time.monotonic() - began > ROW_SEC:
            break
        for name in sorted(compared.sides, reverse=bool(round_ % 2)):
            await compared.clean()
            samples[name].append(await _sample(compared.sides[name], processes))
    # The servers may still tidy up what the warm-up has left, so the quieter time counts.
    after = await processes.idle(IDLE_SEC)
    return Measured(
        row=row,
        samples=samples,
        programs={name: side.programs for name, side in compared.sides.items()},
        items={name: side.items or row.items for name, side in compared.sides.items()},
        idle={place: min(seconds, after[place]) for place, seconds in before.items()},
        took_sec=time.monotonic() - began,
    )


async def _sample(side: Side, processes: Processes) -> Sample:
    if side.prepare is not None:
        await side.prepare()
    before, began = processes.usage(), time.perf_counter()
    figure = await side.run()
    await asyncio.sleep(SETTLE_SEC)
    after, seconds = processes.usage(), time.perf_counter() - began
    if side.check is not None:
        await side.check()
    return Sample(
        figure=figure, seconds=seconds, usage={place: after[place] - before[place] for place in after}
    )
