"""Run the cases of the benchmark in other engines too, in turns with FlowKit's ordinary and inline nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks import figures, inline
from benchmarks.cases import CASES, Case, sample
from benchmarks.nodes import row
from benchmarks.peers.engines import ENGINES, SIDE, Engine, TookTooLong
from benchmarks.rows import Side, Sides, Target, measure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping
    from pathlib import Path

    from benchmarks.peers.engines import Peer
    from benchmarks.processes import Processes
    from benchmarks.rows import Row

ROUNDS = 5
"""Largest number of samples per side, after a first one that only warms up."""

TARGETS = {
    "chain of 30": Target(ratio="<= 0.60", processor="<= 0.90"),
    "100 tasks x 10 nodes": Target(ratio=">= 1.30"),
}
"""What FlowKit's inline nodes have to reach beside DBOS. Only these cases run inline."""

FLOWKIT = "flowkit"

Count = dict[str, int]
"""The number of documents by collection."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What measurements share."""

    processes: Processes
    ordinary: Callable[[Case], Awaitable[None]]
    """Runs one task of a case on FlowKit, in a worker."""
    inline: Callable[[Case], Awaitable[None]]
    """Runs one task of a case on FlowKit, in the engine."""
    clean: Callable[[], Awaitable[None]]
    """Empties the collections."""
    count: Callable[[str], Awaitable[Count]]
    """Counts the documents of a database."""
    folder: Path
    """For the files of the other engines."""
    say: Callable[[str], None]
    """Prints a sentence."""


async def measure_all(setting: Setting, engine_name: str, only: str, rounds: int) -> list[figures.Result]:
    """Measure the cases of roles on FlowKit and on each other engine in turn. `only` selects cases by name.

    Only one other engine runs at a time, because Prefect's server needs the processor even when no flow runs.
    """
    results = []
    for engine in (each for each in ENGINES if engine_name in each.name):
        if cases := list(_cases(engine, only)):
            if absent := engine.missing():
                setting.say(absent)
            else:
                results += await _measured(setting, engine, cases, rounds)
    return results


def _cases(engine: Engine, only: str) -> Iterator[Case]:
    for case in CASES:
        if only in case.name and not case.functions and case.tasks <= engine.most_tasks:
            yield replace(case, rounds=min(case.rounds, ROUNDS))


async def _measured(setting: Setting, engine: Engine, cases: list[Case], rounds: int) -> list[figures.Result]:
    results = []
    with engine.start(setting.processes, setting.folder) as peer:
        for case in cases:
            sides = Sides(sides=_sides(setting, engine, case, peer), clean=setting.clean)
            try:
                measured = await measure(
                    _row(engine, case), sides, setting.processes, min(rounds, case.rounds)
                )
            except TookTooLong as error:
                setting.say(f"skipping the remaining cases of {engine.name}: {error}")
                break
            results.append(figures.result(measured))
            setting.say(f"{engine.name}, {case.name}: {results[-1]['took_sec']:.0f} s")
    return results


def _row(engine: Engine, case: Case) -> Row:
    targets = {inline.SIDE: TARGETS[case.name]} if engine.judged and case.name in TARGETS else {}
    return replace(row(case), name=f"{case.name} beside {engine.name}", targets=targets)


def _sides(setting: Setting, engine: Engine, case: Case, peer: Peer) -> Mapping[str, Side]:
    def side(database: str, programs: str, run: Callable[[], Awaitable[float]]) -> Side:
        async def figure() -> float:
            seconds = await run()
            return seconds * 1_000 if case.per_node else 1 / seconds

        return Side(run=figure, programs=programs, check=partial(_check, setting, case, database))

    sides = {
        figures.BASELINE: side(engine.database, SIDE, partial(peer.sample, case)),
        FLOWKIT: side(FLOWKIT, FLOWKIT, partial(sample, case, setting.ordinary)),
    }
    if case.name in TARGETS:
        sides[inline.SIDE] = side(FLOWKIT, inline.SIDE, partial(sample, case, setting.inline))
    return sides


async def _check(setting: Setting, case: Case, database: str) -> None:
    """Raise RuntimeError if a side has not stored what all sides must store."""
    stored, expected = await setting.count(database), documents(case)
    if stored != expected:
        raise RuntimeError(f"after a sample of {case.name!r}, {database} holds {stored}, not {expected}")


def documents(case: Case) -> Count:
    """Return how many documents each side stores for one sample: the writes that all sides must make."""
    runs = case.tasks * case.repeats
    nodes = runs * case.nodes
    return {"tasks": runs, "finished_nodes": nodes, "metrics_raw": nodes, "artifacts": 2 * nodes}


async def count(mongo: Any, name: str) -> Count:
    """Count the documents of a database, and the finished nodes in its task documents."""
    database = mongo[name]
    finished = {"$match": {"graph.nodes.status": "finished"}}
    pipeline = [{"$unwind": "$graph.nodes"}, finished, {"$count": "nodes"}]
    found = await database.tasks.aggregate(pipeline).to_list(None)
    stored = {each: await database[each].count_documents({}) for each in ("metrics_raw", "artifacts")}
    tasks = await database.tasks.count_documents({"status": "finished"})
    return {"tasks": tasks, "finished_nodes": sum(each["nodes"] for each in found), **stored}
