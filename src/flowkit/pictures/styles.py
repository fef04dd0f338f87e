"""How states and kinds of edges look in every picture. Symbols, shapes and words tell them apart; color repeats them.

The page has the same symbols and colors in `words.js` and `style.css`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from flowkit.models import NodeStatus
from flowkit.reading.graphs import EdgeKind

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusStyle:
    """How a node with this status looks."""

    symbol: str
    terminal: str
    """Its style in a terminal, as Rich names it."""
    stroke: str = "#57606a"
    fill: str = "#f6f8fa"
    dashed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeStyle:
    """How an edge of this kind looks."""

    word: str
    """What it means; empty for a plain edge."""
    mark: str = ""
    """The character at its begin in a terminal."""
    terminal: str = ""
    """Its style in a terminal, as Rich names it."""
    color: str = "#57606a"
    line: str = "solid"
    """`solid`, `dashed` or `dotted`."""
    is_wide: bool = False


NO_STATUS: Final = StatusStyle(symbol="", terminal="")
"""A node of a graph that no task runs."""

STATUSES: Final[Mapping[str, StatusStyle]] = {
    NodeStatus.FAILED: StatusStyle(symbol="✕", terminal="red", stroke="#b8400a", fill="#ffe3d6"),
    NodeStatus.CANCELLING: StatusStyle(symbol="◼", terminal="yellow", stroke="#8f4a78", fill="#f6e4ef"),
    NodeStatus.RUNNING: StatusStyle(symbol="▶", terminal="cyan", stroke="#0069b4", fill="#ddf0ff"),
    NodeStatus.DEFERRED: StatusStyle(symbol="◷", terminal="yellow", stroke="#8a5a00", fill="#fff3d6"),
    NodeStatus.QUEUED: StatusStyle(symbol="○", terminal="dim", stroke="#6e7781", dashed=True),
    NodeStatus.CANCELLED: StatusStyle(symbol="⊘", terminal="red", stroke="#8f4a78", fill="#f6e4ef"),
    NodeStatus.SKIPPED: StatusStyle(
        symbol="⤼", terminal="dim", stroke="#6e7781", fill="#ffffff", dashed=True
    ),
    NodeStatus.FINISHED: StatusStyle(symbol="✓", terminal="green", stroke="#00704f", fill="#d9f4ea"),
}
"""The status of a group of nodes is the first of these that one of them has."""

DECISION: Final = "◆"
"""The symbol of a node that waits for a person."""

EDGES: Final[Mapping[EdgeKind, EdgeStyle]] = {
    EdgeKind.PLAIN: EdgeStyle(word=""),
    EdgeKind.STREAMING: EdgeStyle(word="streaming", mark="┃", terminal="cyan", color="#0069b4", is_wide=True),
    EdgeKind.CONDITIONAL: EdgeStyle(word="condition", mark="?", line="dashed"),
    EdgeKind.SUCCESS: EdgeStyle(
        word="on success", mark="✓", terminal="green", color="#00704f", line="dashed"
    ),
    EdgeKind.FAILURE: EdgeStyle(word="on failure", mark="✕", terminal="red", color="#b8400a", line="dotted"),
}
NOT_TAKEN: Final = "#bcc3cb"
"""The color of edges from and to skipped nodes."""


def style_of(status: str | None) -> StatusStyle:
    """Return how a node with this status looks; None is a node without state."""
    return STATUSES.get(status, NO_STATUS) if status is not None else NO_STATUS
