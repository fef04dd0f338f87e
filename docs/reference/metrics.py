"""The tables of docs/metrics.md."""

from __future__ import annotations

from flowkit.core.instruments import ALL, Counter, Gauge, Histogram

_KINDS = {Counter: "counter", Gauge: "gauge", Histogram: "histogram"}


def table() -> str:
    """Return a table of all instruments of FlowKit."""
    rows = [
        f"| `{each.name}` | {_KINDS[type(each)]} | {_shown(each.labels)} | {each.text} |"
        for each in sorted(ALL, key=lambda each: each.name)
    ]
    return "\n".join(["| Metric | Type | Labels | Meaning |", "|---|---|---|---|", *rows, ""])


def _shown(labels: tuple[str, ...]) -> str:
    return ", ".join(f"`{label}`" for label in labels) or "none"
