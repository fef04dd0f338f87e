"""`python -m benchmarks.agreement FIRST SECOND`: compares two runs, for example of different hours.

For each side, it prints the ratios of both runs, and which ratio decides about the target: that of the wall times if
the runs agree about it, or else that of the processor times of all processes. It exits with 1 if the processor times
of a side's own processes, as a ratio to the baseline, differ by more than a tenth.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from benchmarks.figures import ALL, OWN, SAME, WALL, decides, differ, is_met, median
from benchmarks.report import console

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.figures import Result


def main(
    first: Annotated[str, typer.Argument(help="A file that `make bench` has written.")],
    second: Annotated[str, typer.Argument(help="Another one.")],
) -> None:
    """Compare the rows that both files have."""
    earlier, later = (
        {each["case"]: each for each in json.loads(Path(file).read_text()) if "sides" in each}
        for file in (first, second)
    )
    pairs = [(earlier[name], later[name]) for name in earlier if name in later]
    console.print(agreement(pairs))
    apart = [shown for pair in pairs for shown in _apart(pair)]
    for each in apart:
        console.print(each)
    raise typer.Exit(1 if apart else 0)


def agreement(pairs: list[tuple[Result, Result]]) -> Table:
    """Return a line for each side of each row."""
    heads = (
        "case",
        "wall",
        "own processor",
        "with servers",
        "own ms of FlowKit",
        "of the baseline",
        "target",
    )
    table = Table(*heads, title="Ratios of the first and the second run, and by how much they differ")
    for pair in pairs:
        for side in pair[0]["ratios"]:
            name = pair[0]["case"] + ("" if side == "flowkit" else f", {side}")
            ratios = (_both(*_medians(pair, side, kind)) for kind in (WALL, OWN, ALL))
            milliseconds = (_both(*(run["sides"][each][OWN] for run in pair)) for each in (side, "baseline"))
            table.add_row(name, *ratios, *milliseconds, _verdict(pair, side))
    return table


def _medians(pair: tuple[Result, Result], side: str, kind: str) -> tuple[float, float]:
    first, second = (median(run["ratios"][side][kind]) for run in pair)
    return first, second


def _both(first: float, second: float) -> str:
    if math.isnan(first + second):
        return "–"
    return f"{first:.2f}, {second:.2f} ({differ(first, second):.0%})"


def _verdict(pair: tuple[Result, Result], side: str) -> str:
    target = pair[1]["targets"].get(side, {}).get("ratio")
    if not target:
        return "–"
    kind, ratio = decides(pair, side)
    return f"{target}: {'met' if is_met(target, ratio) else 'missed'} by {kind} {ratio:.2f}"


def _apart(pair: tuple[Result, Result]) -> Iterator[str]:
    """Return a sentence for each side whose processor times do not agree."""
    for side in pair[0]["ratios"]:
        first, second = _medians(pair, side, OWN)
        if not math.isnan(first + second) and (apart := differ(first, second)) > SAME:
            yield f"{pair[0]['case']}, {side}: the ratios of processor time differ by {apart:.0%}"


if __name__ == "__main__":
    typer.run(main)
