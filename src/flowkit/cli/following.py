"""Print what happens to something that waits, until it no longer does."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

from flowkit.cli import output

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

T = TypeVar("T")

_PAUSE_SEC: Final = 0.5


@contextmanager
def interruptible(request_id: str) -> Iterator[None]:
    """Print that the request continues, if Ctrl-C ends the block."""
    try:
        yield
    except asyncio.CancelledError:
        output.note(f"stopped waiting; request {request_id} continues")
        raise


async def follow(
    known: T,
    find: Callable[[], Awaitable[T | None]],
    *,
    describe: Callable[[T], str],
    until: Callable[[T], bool],
    quiet: bool,
) -> T:
    """Print each change of the description of a record until `until` accepts it, and return it."""
    line = ""
    while True:
        line = _print_change(line, describe(known), quiet=quiet)
        if until(known):
            return known
        await asyncio.sleep(_PAUSE_SEC)
        known = await find() or known


def _print_change(before: str, now: str, *, quiet: bool) -> str:
    if now != before:
        (output.note if quiet else output.echo)(now)
    return now
