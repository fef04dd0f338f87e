"""Figures about the run: who did what when. Pure."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from code_index.page.attempts import AttemptRun, End
from code_index.page.figures import GREY, LEGEND, NODE_COLOURS, Figure, axis, figure, plain, vertical

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

END_COLOURS = {
    End.DONE: "#2f9e68",
    End.FAILED: "#d9a21b",
    End.LOST: "#d9485f",
    End.HANDED_OVER: GREY,
    End.CANCELLED: GREY,
}
WAIT_COLOUR = "rgba(138,148,163,0.28)"
BINS = 60
"""The throughput is counted in steps of whole or half seconds, about so many."""

LEAST = math.log10(0.4)
"""Where the logarithmic axis begins, so that a bar of one batch can be seen."""

_STEPS = (0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 300, 900, 3600)


def gantt(attempts: Sequence[AttemptRun], seconds: float) -> Figure:
    """A bar for each attempt, from its start to its end, and what passed before the next one."""
    top_down = [*reversed(attempts)]
    rows = {id(attempt): row for row, attempt in enumerate(top_down)}
    labels = [f"{attempt.node} {attempt.epoch} · {plain(attempt.worker)}" for attempt in top_down]
    bars = [_bars(end, [one for one in attempts if one.end is end], rows, seconds) for end in End]
    return figure(
        "gantt",
        [*(bar for bar in bars if bar["y"]), *_waits(attempts, rows)],
        barmode="overlay",
        bargap=0.35,
        xaxis=axis("seconds since the task began", range=[0, 1.02 * seconds], rangemode="tozero"),
        yaxis=axis(tickvals=[*range(len(labels))], ticktext=labels, showgrid=False),
        legend=LEGEND,
    )


def _bars(end: End, attempts: Sequence[AttemptRun], rows: dict[int, int], seconds: float) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": end.value,
        "base": [attempt.began for attempt in attempts],
        # A bar that is no wider than a hair would be no bar at all.
        "x": [max(attempt.seconds, 0.004 * seconds) for attempt in attempts],
        "y": [rows[id(attempt)] for attempt in attempts],
        "marker": {"color": END_COLOURS[end]},
        "hovertext": [_told(attempt) for attempt in attempts],
        "hoverinfo": "text",
    }


def _told(attempt: AttemptRun) -> str:
    reason = f" ({plain(attempt.reason)})" if attempt.reason else ""
    return (
        f"<b>{attempt.node}, attempt {attempt.epoch}</b> on {plain(attempt.worker)}<br>"
        f"{attempt.began:.2f} s to {attempt.ended:.2f} s, {attempt.seconds:.2f} s<br>"
        f"{len(attempt.stored):,} batches, {attempt.files:,} files; {attempt.end}{reason}"
    )


def _waits(attempts: Sequence[AttemptRun], rows: dict[int, int]) -> Iterator[dict[str, Any]]:
    """What passes between two attempts of a node: a pause before the retry, or the rest of a dead worker's lease."""
    gaps = [(one, two) for one, two in pairwise(attempts) if one.node == two.node and two.began > one.ended]
    if gaps:
        yield {
            "type": "bar",
            "orientation": "h",
            "name": "waiting",
            "base": [one.ended for one, _ in gaps],
            "x": [two.began - one.ended for one, two in gaps],
            "y": [rows[id(one)] for one, _ in gaps],
            "marker": {"color": WAIT_COLOUR},
            "hovertext": [
                f"{two.began - one.ended:.2f} s until the next attempt: "
                + ("its lease runs out" if one.end is End.LOST else "the pause before a retry")
                for one, two in gaps
            ],
            "hoverinfo": "text",
        }


def throughput(attempts: Sequence[AttemptRun], seconds: float, killed_at: float | None) -> Figure:
    """Batches that each node has stored by then, and below it batches in each step of time."""
    by_node: dict[str, list[float]] = {}
    for attempt in attempts:
        by_node.setdefault(attempt.node, []).extend(attempt.stored)
    step = bin_seconds(seconds)
    most = max((max(_binned(moments, step).values()) for moments in by_node.values() if moments), default=1)
    traces = [trace for node, moments in by_node.items() for trace in _stored(node, sorted(moments), step)]
    return figure(
        "throughput",
        traces,
        barmode="overlay",
        bargap=0.05,
        xaxis=axis("seconds since the task began", range=[0, 1.02 * seconds], anchor="y2"),
        yaxis=axis("batches stored", domain=[0.42, 1], rangemode="tozero"),
        # From one to many on a logarithm: nodes that hand on are a hundred times as fast as one that parses.
        yaxis2=axis(
            f"in {step:g} s", domain=[0, 0.32], type="log", dtick=1, range=[LEAST, 0.1 + math.log10(most)]
        ),
        legend=LEGEND,
        shapes=[vertical(killed_at, END_COLOURS[End.LOST])] if killed_at is not None else [],
        annotations=[_killed_note(killed_at)] if killed_at is not None else [],
    )


def bin_seconds(seconds: float) -> float:
    """A round step that divides the run into about `BINS`."""
    return next((step for step in _STEPS if seconds / step <= BINS), _STEPS[-1])


def _stored(node: str, moments: list[float], step: float) -> Iterator[dict[str, Any]]:
    colour = NODE_COLOURS.get(node, GREY)
    yield {
        "type": "scatter",
        "mode": "lines",
        "name": node,
        "x": [moments[0], *moments] if moments else [],
        "y": [*range(len(moments) + 1)] if moments else [],
        "line": {"shape": "hv", "color": colour, "width": 2.5},
        "hovertemplate": f"{node}: %{{y:,}} batches at %{{x:.1f}} s<extra></extra>",
    }
    bins = _binned(moments, step)
    yield {
        "type": "bar",
        "name": node,
        "showlegend": False,
        "x": [(place + 0.5) * step for place in bins],
        "y": [*bins.values()],
        "width": step,
        "yaxis": "y2",
        "marker": {"color": colour},
        "hovertemplate": f"{node}: %{{y:,}} batches in {step:g} s<extra></extra>",
    }


def _binned(moments: Sequence[float], step: float) -> Counter[int]:
    """How many moments lie in each step of time, by the number of the step."""
    return Counter(math.floor(moment / step) for moment in moments)


def _killed_note(at: float) -> dict[str, Any]:
    note = {"x": at, "xanchor": "right", "y": 1, "yref": "paper", "yanchor": "top"}
    return {**note, "showarrow": False, "text": "worker killed "}
