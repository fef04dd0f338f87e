"""Figures about the run over time. Pure."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from code_index.page.attempts import AttemptEnd, AttemptRun
from code_index.page.figures import GRAY, LEGEND, NODE_COLORS, Figure, axis, escape, figure, vertical

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

END_COLORS = {
    AttemptEnd.DONE: "#2f9e68",
    AttemptEnd.FAILED: "#d9a21b",
    AttemptEnd.LOST: "#d9485f",
    AttemptEnd.HANDED_OVER: GRAY,
    AttemptEnd.CANCELLED: GRAY,
}
WAIT_COLOR = "rgba(138,148,163,0.28)"
BINS = 60
"""Approximate number of intervals in which the throughput is counted."""

AXIS_START = math.log10(0.4)
"""Start of the logarithmic axis, low enough to show a bar of one batch."""

_STEPS = (0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 300, 900, 3600)


def gantt(attempts: Sequence[AttemptRun], seconds: float) -> Figure:
    """Return a Gantt chart with a bar for each attempt, and for each wait before the next attempt."""
    top_down = [*reversed(attempts)]
    rows = {id(attempt): row for row, attempt in enumerate(top_down)}
    labels = [f"{_name(attempt)} · {escape(attempt.worker)}" for attempt in top_down]
    bars = [_bars(end, [one for one in attempts if one.end is end], rows, seconds) for end in AttemptEnd]
    return figure(
        "gantt",
        [*(bar for bar in bars if bar["y"]), *_waits(attempts, rows)],
        barmode="overlay",
        bargap=0.35,
        xaxis=axis("seconds since the task started", range=[0, 1.02 * seconds], rangemode="tozero"),
        yaxis=axis(tickvals=[*range(len(labels))], ticktext=labels, showgrid=False),
        legend=LEGEND,
    )


def _bars(
    end: AttemptEnd, attempts: Sequence[AttemptRun], rows: dict[int, int], seconds: float
) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": end.value,
        "base": [attempt.started for attempt in attempts],
        # The minimum width keeps very short attempts visible.
        "x": [max(attempt.seconds, 0.004 * seconds) for attempt in attempts],
        "y": [rows[id(attempt)] for attempt in attempts],
        "marker": {"color": END_COLORS[end]},
        "hovertext": [_hover_text(attempt) for attempt in attempts],
        "hoverinfo": "text",
    }


def _name(attempt: AttemptRun) -> str:
    shard = f", shard {attempt.shard}" if attempt.shard else ""
    return f"{attempt.node} {attempt.epoch}{shard}"


def _hover_text(attempt: AttemptRun) -> str:
    reason = f" ({escape(attempt.reason)})" if attempt.reason else ""
    return (
        f"<b>{_name(attempt)}</b> on {escape(attempt.worker)}<br>"
        f"{attempt.started:.2f} s to {attempt.ended:.2f} s, {attempt.seconds:.2f} s<br>"
        f"{len(attempt.stored):,} batches, {attempt.files:,} files; {attempt.end}{reason}"
    )


def _waits(attempts: Sequence[AttemptRun], rows: dict[int, int]) -> Iterator[dict[str, Any]]:
    """Yield bars for the time between two attempts of a node or of a shard."""
    by_runner = sorted(attempts, key=lambda one: (one.node, one.shard or 0))
    gaps = [
        (one, two)
        for one, two in pairwise(by_runner)
        if (one.node, one.shard) == (two.node, two.shard) and two.started > one.ended
    ]
    if gaps:
        yield {
            "type": "bar",
            "orientation": "h",
            "name": "waiting",
            "base": [one.ended for one, _ in gaps],
            "x": [two.started - one.ended for one, two in gaps],
            "y": [rows[id(one)] for one, _ in gaps],
            "marker": {"color": WAIT_COLOR},
            "hovertext": [
                f"{two.started - one.ended:.2f} s until the next attempt: "
                + ("the lease" if one.end is AttemptEnd.LOST else "the backoff before a retry")
                + (", and the wait for a worker" if one.shard else "")
                for one, two in gaps
            ],
            "hoverinfo": "text",
        }


def throughput(attempts: Sequence[AttemptRun], seconds: float, killed_at: float | None) -> Figure:
    """Return the stored batches of each node over time, above the batches per interval."""
    by_node: dict[str, list[float]] = {}
    for attempt in attempts:
        by_node.setdefault(attempt.node, []).extend(attempt.stored)
    step = bin_seconds(seconds)
    most = max((max(_binned(times, step).values()) for times in by_node.values() if times), default=1)
    traces = [trace for node, times in by_node.items() for trace in _stored(node, sorted(times), step)]
    return figure(
        "throughput",
        traces,
        barmode="overlay",
        bargap=0.05,
        xaxis=axis("seconds since the task started", range=[0, 1.02 * seconds], anchor="y2"),
        yaxis=axis("batches stored", domain=[0.42, 1], rangemode="tozero"),
        # Logarithmic: nodes that only pass data on are a hundred times as fast as the one that parses.
        yaxis2=axis(
            f"in {step:g} s",
            domain=[0, 0.32],
            type="log",
            dtick=1,
            range=[AXIS_START, 0.1 + math.log10(most)],
        ),
        legend=LEGEND,
        shapes=[vertical(killed_at, END_COLORS[AttemptEnd.LOST])] if killed_at is not None else [],
        annotations=[_killed_note(killed_at)] if killed_at is not None else [],
    )


def bin_seconds(seconds: float) -> float:
    """Return a round interval that divides the run into about `BINS` parts."""
    return next((step for step in _STEPS if seconds / step <= BINS), _STEPS[-1])


def _stored(node: str, times: list[float], step: float) -> Iterator[dict[str, Any]]:
    color = NODE_COLORS.get(node, GRAY)
    yield {
        "type": "scatter",
        "mode": "lines",
        "name": node,
        "x": [times[0], *times] if times else [],
        "y": [*range(len(times) + 1)] if times else [],
        "line": {"shape": "hv", "color": color, "width": 2.5},
        "hovertemplate": f"{node}: %{{y:,}} batches at %{{x:.1f}} s<extra></extra>",
    }
    bins = _binned(times, step)
    yield {
        "type": "bar",
        "name": node,
        "showlegend": False,
        "x": [(number + 0.5) * step for number in bins],
        "y": [*bins.values()],
        "width": step,
        "yaxis": "y2",
        "marker": {"color": color},
        "hovertemplate": f"{node}: %{{y:,}} batches in {step:g} s<extra></extra>",
    }


def _binned(times: Sequence[float], step: float) -> Counter[int]:
    """Return the number of times in each interval, by the number of the interval."""
    return Counter(math.floor(time / step) for time in times)


def _killed_note(at: float) -> dict[str, Any]:
    note = {"x": at, "xanchor": "right", "y": 1, "yref": "paper", "yanchor": "top"}
    return {**note, "showarrow": False, "text": "worker killed "}
