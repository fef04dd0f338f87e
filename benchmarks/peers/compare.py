"""Run the cases of the benchmark in other engines too, in turns with FlowKit's ordinary and inline nodes."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.cases import CASES, Case, sample
from benchmarks.peers.engines import ENGINES, Engine, TookTooLong

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping
    from pathlib import Path

CASE_SEC = 180.0
"""No round of a case starts after this time. The first round always runs."""

ROUNDS = 5
"""Largest number of samples per side, after a first round that only warms up."""

TARGETS = {"chain of 30": "<= 0.60", "100 tasks x 10 nodes": ">= 1.30"}
"""The ratio of FlowKit's inline nodes to DBOS. Only these cases run inline."""

FLOWKIT = "flowkit"

Count = dict[str, int]
"""The number of documents by collection."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What measurements share."""

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


async def measure(setting: Setting, engine_name: str, only: str, rounds: int) -> list[dict[str, Any]]:
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


async def _measured(setting: Setting, engine: Engine, cases: list[Case], rounds: int) -> list[dict[str, Any]]:
    results = []
    with engine.start(setting.folder) as peer:
        for case in cases:
            sides = {FLOWKIT: Side(FLOWKIT, partial(sample, case, setting.ordinary))}
            if case.name in TARGETS:
                sides["inline"] = Side(FLOWKIT, partial(sample, case, setting.inline))
            sides["peer"] = Side(engine.database, partial(peer.sample, case))
            try:
                results.append(await _result(setting, engine, case, sides, min(rounds, case.rounds)))
            except TookTooLong as error:
                setting.say(f"skipping the remaining cases of {engine.name}: {error}")
                break
            setting.say(f"{engine.name}, {case.name}: {results[-1]['took_sec']:.0f} s")
    return results


@dataclass(frozen=True)
class Side:
    """One side of a comparison."""

    database: str
    run: Callable[[], Awaitable[float]]
    """Runs one sample and returns the seconds per node."""


async def _result(
    setting: Setting, engine: Engine, case: Case, sides: Mapping[str, Side], rounds: int
) -> dict[str, Any]:
    began = time.monotonic()
    seconds = await _samples(setting, case, sides, rounds)
    figures = {name: [_figure(case, each) for each in values] for name, values in seconds.items()}
    return {
        "case": case.name,
        "peer": engine.name,
        "unit": "ms/node" if case.per_node else "nodes/s",
        "samples": figures,
        "median": {name: statistics.median(values) for name, values in figures.items()},
        "target": TARGETS.get(case.name, "") if engine.judged else "",
        "took_sec": time.monotonic() - began,
        "load": os.getloadavg()[0],
    }


async def _samples(
    setting: Setting, case: Case, sides: Mapping[str, Side], rounds: int
) -> dict[str, list[float]]:
    """Return the samples of each side, in seconds per node, without the first, which warms up all sides."""
    samples: dict[str, list[float]] = {name: [] for name in sides}
    began = time.monotonic()
    for round_ in range(rounds + 1):
        if round_ > 1 and time.monotonic() - began > CASE_SEC:
            break
        for name in sorted(sides, reverse=bool(round_ % 2)):
            samples[name].append(await _sample(setting, case, sides[name]))
    return {name: values[1:] for name, values in samples.items()}


def _figure(case: Case, seconds_per_node: float) -> float:
    return seconds_per_node * 1_000 if case.per_node else 1 / seconds_per_node


async def _sample(setting: Setting, case: Case, side: Side) -> float:
    await setting.clean()
    seconds = await side.run()
    stored, expected = await setting.count(side.database), documents(case)
    if stored != expected:
        raise RuntimeError(f"after a sample of {case.name!r}, {side.database} holds {stored}, not {expected}")
    return seconds


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


def table(results: list[dict[str, Any]]) -> Table:
    """Return one row for each case and engine, with the ratios of FlowKit's medians to the engine's."""
    heads = ("case", "engine", "its figure", "FlowKit", "ratio", "FlowKit inline", "ratio", "target", "load")
    shown = Table(*heads, title="FlowKit compared with other engines that make the same writes per node")
    for result in results:
        cells = [cell for name in (FLOWKIT, "inline") for cell in (_cell(result, name), _ratio(result, name))]
        load = f"{result['load']:.1f}"
        first = (f"{result['case']}, {result['unit']}", result["peer"], _cell(result, "peer"))
        shown.add_row(*first, *cells, result["target"] or "–", load)
    return shown


def _cell(result: dict[str, Any], name: str) -> str:
    """Return the median, with the smallest and the largest sample."""
    values = result["samples"].get(name)
    return f"{result['median'][name]:.1f} ({min(values):.1f}..{max(values):.1f})" if values else "–"


def _ratio(result: dict[str, Any], name: str) -> str:
    """Return the ratio of the medians, with the smallest and largest ratio of a single round."""
    if name not in result["samples"]:
        return "–"
    pairs = zip(result["samples"][name], result["samples"]["peer"], strict=True)
    ratios = [ours / theirs for ours, theirs in pairs]
    ratio = result["median"][name] / result["median"]["peer"]
    return f"{ratio:.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
