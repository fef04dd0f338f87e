"""From samples to figures: medians, ratios of rounds, and whether a target is met."""

from __future__ import annotations

import dataclasses
import operator
import os
import statistics
import time
from typing import TYPE_CHECKING, Any

from benchmarks.processes import CLIENT, SHARED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.processes import Place
    from benchmarks.rows import Measured, Sample

Result = dict[str, Any]
"""The figures of a row as JSON. `sides` has the samples and the medians, `ratios` those of FlowKit's sides."""

BASELINE = "baseline"
WALL, OWN, ALL = "wall", "own", "all"
"""What a ratio compares: the figure of the row; the processor time of the side's own processes; that of all processes
that work for the side, with the servers and the program that starts the tasks."""
SAME = 0.10
"""Two runs agree if their ratios differ by at most this part."""

_BARS = {"<=": operator.le, ">=": operator.ge}


def result(measured: Measured) -> Result:
    """Return the figures of a row."""
    row = measured.row
    sides = {name: _side(measured, name) for name in measured.samples}
    baseline = sides[BASELINE]
    return {
        "case": row.name,
        "unit": row.unit,
        "item": row.item,
        "rounds": len(measured.samples[BASELINE]),
        "sides": sides,
        "ratios": {
            name: _ratios(row.unit, side, baseline) for name, side in sides.items() if name != BASELINE
        },
        "targets": {name: dataclasses.asdict(target) for name, target in row.targets.items()},
        "took_sec": round(measured.took_sec, 1),
        "load": os.getloadavg()[0],
        "measured_at": time.time(),
    }


def _side(measured: Measured, name: str) -> Result:
    """Return the samples of a side and their medians. Processor time is in milliseconds for each item."""
    samples = [_sample(measured, name, each) for each in measured.samples[name]]
    return {
        "items": measured.items[name],
        "samples": samples,
        "figure": statistics.median(each["figure"] for each in samples),
        OWN: statistics.median(each[OWN] for each in samples),
        ALL: statistics.median(each[ALL] for each in samples),
        "processes": {process: _process_medians(process, samples) for process in samples[0]["processes"]},
        "idle": {
            process: seconds
            for place, seconds in measured.idle.items()
            if (process := _process(measured, name, place))
        },
        "commands": statistics.median(each["commands"] for each in samples),
        "bytes": statistics.median(each["bytes"] for each in samples),
    }


def _process_medians(process: str, samples: Sequence[Result]) -> dict[str, float]:
    return {
        kind: statistics.median(each["processes"][process][kind] for each in samples)
        for kind in ("ms", "user_ms", "system_ms")
    }


def _sample(measured: Measured, name: str, sample: Sample) -> Result:
    """Return one sample. `ms` does not include what a process uses in the same time without work."""
    row, items = measured.row, measured.items[name]
    own = all_ = 0.0
    processes, commands, size = {}, 0, 0
    for place, used in sample.usage.items():
        if process := _process(measured, name, place):
            ms = (used.seconds - measured.idle[place] * sample.seconds) * 1000 / items
            kinds = {"user_ms": used.user * 1000 / items, "system_ms": used.system * 1000 / items}
            processes[process] = {"ms": ms, **kinds}
            is_own = place[0] != SHARED or (row.in_client and process == CLIENT)
            own, all_ = own + ms * is_own, all_ + ms
            commands, size = commands + used.commands, size + used.bytes
    traffic = {"commands": commands / items, "bytes": size / items}
    return {
        "figure": sample.figure,
        "seconds": sample.seconds,
        "processes": processes,
        OWN: own,
        ALL: all_,
        **traffic,
    }


def _process(measured: Measured, name: str, place: Place) -> str:
    """Return the name of a process if it works for a side, otherwise an empty text."""
    side, process = place
    return process if side in (SHARED, measured.programs[name]) else ""


def _ratios(unit: str, side: Result, baseline: Result) -> dict[str, list[float]]:
    """Return the ratios of each round. As in the target of a rate, more is better in all of them."""
    pairs = list(zip(side["samples"], baseline["samples"], strict=True))
    wall = [ours["figure"] / theirs["figure"] for ours, theirs in pairs]
    rounds = {WALL: wall}
    for kind in (OWN, ALL):
        more = [_divided(ours[kind], theirs[kind]) for ours, theirs in pairs]
        rounds[kind] = [_divided(1.0, each) for each in more] if unit.endswith("/s") else more
    return rounds


def _divided(dividend: float, divisor: float) -> float:
    """Return a ratio; NaN if a side has used no measurable time."""
    return dividend / divisor if divisor > 0 else float("nan")


def median(ratios: Sequence[float]) -> float:
    """Return the median of the ratios of the rounds."""
    return statistics.median(ratios)


def is_met(target: str, ratio: float) -> bool:
    """Whether a ratio reaches a target such as `<= 1.05`."""
    bar, _, limit = target.partition(" ")
    return bool(_BARS[bar](round(ratio, 3), float(limit)))


def differ(first: float, second: float) -> float:
    """Return by which part of their mean two figures differ."""
    return abs(first - second) / ((first + second) / 2)


def decides(runs: Sequence[Result], side: str) -> tuple[str, float]:
    """Return which ratio decides about the target of a side, and its mean over these runs of a row.

    It is that of the wall times, or that of all processor times if the wall times of the runs do not agree.
    """
    ratios = [run["ratios"][side] for run in runs]
    walls = [median(each[WALL]) for each in ratios]
    by_wall = any(run["targets"].get(side, {}).get("decided_by_wall") for run in runs)
    kind = ALL if differ(min(walls), max(walls)) > SAME and not by_wall else WALL
    return kind, statistics.mean(median(each[kind]) for each in ratios)
