"""The tables of the benchmark."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks.figures import ALL, BASELINE, OWN, WALL, is_met, median
from benchmarks.processes import machine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from benchmarks.figures import Result


console = Console(width=170)


def publish(results: Sequence[Result], out: Path, title: str) -> None:
    """Print the tables of all rows, and write their samples to a file."""
    console.print(ratios([each for each in results if "sides" in each], title))
    if others := [each for each in results if "sides" not in each]:
        console.print(latencies(others))
    console.print(f"Measured on {machine()}.")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=2) + "\n")
    console.print(f"figures: {out}")


def show(result: Result) -> None:
    """Print a row as soon as it is measured."""
    if "sides" in result:
        console.print(processes(result))
        console.print(ratios([result]))


def processes(result: Result) -> Table:
    """Return the processor time and the MongoDB traffic of one row: a line for each process, a column for each side."""
    sides = result["sides"]
    title = (
        f"{result['case']}: processor milliseconds for each {result['item']}, less those of idle processes "
        "(user + system; idle)"
    )
    table = Table("process", *sides, title=title, title_justify="left")
    for name in dict.fromkeys(name for side in sides.values() for name in side["processes"]):
        table.add_row(name, *(_process(side, name) for side in sides.values()))
    table.add_section()
    table.add_row("own processes", *(_spread(side, OWN) for side in sides.values()))
    table.add_row("all", *(_spread(side, ALL) for side in sides.values()))
    table.add_section()
    table.add_row("commands to MongoDB", *(f"{side['commands']:.2f}" for side in sides.values()))
    table.add_row("bytes to MongoDB", *(f"{side['bytes']:,.0f}" for side in sides.values()))
    return table


def _process(side: Result, name: str) -> str:
    if name not in side["processes"]:
        return "–"
    ms, user, system = side["processes"][name].values()
    return f"{ms:.2f} ({user:.2f} + {system:.2f}; {side['idle'][name] * 100:.1f} %)"


def _spread(side: Result, kind: str) -> str:
    values = [sample[kind] for sample in side["samples"]]
    return f"{side[kind]:.2f} ({min(values):.2f}..{max(values):.2f})"


def ratios(results: Sequence[Result], title: str | None = None) -> Table:
    """Return a line for each side that is compared: its figures, its ratios, and whether it meets its targets."""
    heads = (
        "case",
        "baseline",
        "FlowKit",
        "ratio (rounds)",
        "processor time",
        "with servers",
        "target: met?",
        "rounds",
    )
    table = Table(*heads, title=title, show_edge=bool(title))
    for result in results:
        for side, rounds in result["ratios"].items():
            name = result["case"] + ("" if side == "flowkit" else f", {side}")
            figures = [_figure(result, each) for each in (BASELINE, side)]
            shown = [shown_ratio(rounds[kind]) for kind in (WALL, OWN, ALL)]
            table.add_row(name, *figures, *shown, "\n".join(_verdicts(result, side)), str(result["rounds"]))
    return table


def _figure(result: Result, name: str) -> str:
    side = result["sides"][name]
    values = [sample["figure"] for sample in side["samples"]]
    return f"{side['figure']:.1f} ({min(values):.1f}..{max(values):.1f}) {result['unit']}"


def shown_ratio(rounds: Sequence[float]) -> str:
    """Return the median of the ratios of the rounds, with the smallest and the largest."""
    if any(map(math.isnan, rounds)):
        return "–"
    return f"{median(rounds):.2f} ({min(rounds):.2f}..{max(rounds):.2f})"


def _verdicts(result: Result, side: str) -> Iterator[str]:
    """Return for each target of a side whether this run meets it: by wall time, and by the time of all processes."""
    rounds, targets = result["ratios"][side], result["targets"].get(side, {})
    if target := targets.get("ratio"):
        wall, all_ = (_word(is_met(target, median(rounds[kind]))) for kind in (WALL, ALL))
        yield f"{target}: wall {wall}" + ("" if targets["decided_by_wall"] else f", processor {all_}")
    if target := targets.get("processor"):
        yield f"own processor {target}: {_word(is_met(target, median(rounds[OWN])))}"


def _word(met: bool) -> str:
    return "yes" if met else "no"


def latencies(results: Sequence[dict[str, Any]]) -> Table:
    """Return a line for each case that has no baseline."""
    title = "From a stored batch to the child's handler, and from an action to the first attempt"
    table = Table("case", "p50", "p90", "range", "target", "took", "load", title=title)
    for each in results:
        figures = [f"{each[name]:.0f} ms" for name in ("p50", "p90")]
        spread = f"{min(each['samples']):.0f}..{max(each['samples']):.0f} ms"
        table.add_row(
            each["case"], *figures, spread, each["target"], f"{each['took_sec']:.0f} s", f"{each['load']:.1f}"
        )
    return table
