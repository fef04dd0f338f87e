"""The screen of a command: a display that is redrawn in place on a terminal, and tables."""

from __future__ import annotations

import time
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Concatenate, Generic, ParamSpec, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flowkit.cli.output import Visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console, RenderableType

P = ParamSpec("P")

_MAX_NAME_CHARS = 24
"""Maximum width of a name column."""


class Screen(Protocol[P]):
    """Displays a state that changes."""

    def show(self, *state: P.args, **more: P.kwargs) -> None:
        """Update the display."""


@contextmanager
def open_screen(
    console: Console,
    draw: Callable[Concatenate[int, float, P], list[RenderableType]],
    print_lines: Callable[[], Screen[P]],
) -> Iterator[Screen[P]]:
    """Yield a display that is redrawn in place if the terminal can move its cursor, otherwise what
    `print_lines` returns.

    `draw` returns the parts of a state for the height of the terminal and the seconds since the screen was opened.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        yield print_lines()
        return
    with Live(console=console, auto_refresh=False) as live:
        yield LiveScreen(live, draw)


class LiveScreen(Generic[P]):
    """A display that updates in place; its last state remains on the terminal."""

    def __init__(self, live: Live, draw: Callable[Concatenate[int, float, P], list[RenderableType]]) -> None:
        self._live = live
        self._draw = draw
        self._since = time.monotonic()

    def show(self, *state: P.args, **more: P.kwargs) -> None:
        """Redraw the display."""
        parts = self._draw(self._live.console.height, time.monotonic() - self._since, *state, **more)
        # The terminal prints `^C` on the empty line. On a full line, it would wrap and move the display.
        self._live.update(Visible(Group(*parts, "")), refresh=True)


def plain_table(title: str | None = None, *, wide: bool = True) -> Table:
    """Return an empty table: ruled and as wide as the terminal, or plain for files and pipes."""
    box = SIMPLE_HEAD if wide else None
    text = Text(title, overflow="ellipsis") if title else None
    padding = (0, 2, 0, 0)
    return Table(title=text, title_justify="left", box=box, show_edge=False, padding=padding, expand=wide)


def add_times(table: Table, heading: str) -> None:
    """Add a column for the cells of `format_time`."""
    table.add_column(f"{heading} (UTC)", width=len(format_time(0.0)), no_wrap=True)


def format_time(at: float | None) -> str:
    """Return a time in seconds since the Unix epoch as `2026-01-31 12:00:00` in UTC; None is empty."""
    return "" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def add_names(table: Table, heading: str, names: Sequence[str], most: int = _MAX_NAME_CHARS) -> None:
    """Add a column wide enough for its names, at most `most` characters on a terminal."""
    longest = max(map(len, [heading, *names]))
    table.add_column(heading, width=min(most, longest) if table.expand else longest, no_wrap=True)
