"""The event loops of our own processes and threads: uvloop, which wakes up at less cost than asyncio's own.

`FLOWKIT_EVENT_LOOP=asyncio` goes without it, for handlers whose libraries ask for asyncio's loop (nest_asyncio does).
"""

from __future__ import annotations

import asyncio
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from flowkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")

VARIABLE = "FLOWKIT_EVENT_LOOP"
ASYNCIO, UVLOOP = "asyncio", "uvloop"


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A loop of the kind that the environment asks for; uvloop unless it says otherwise, where that is installed.

    ConfigError when it asks for one that there is not.
    """
    if _chosen() == ASYNCIO:
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a loop of ours."""
    try:
        runner = asyncio.Runner(loop_factory=new_event_loop)
        runner.get_loop()
    except ConfigError:
        main.close()
        raise
    with runner:
        return runner.run(main)


def _chosen() -> str:
    installed = find_spec(UVLOOP) is not None
    asked = os.environ.get(VARIABLE) or (UVLOOP if installed else ASYNCIO)
    if asked not in (ASYNCIO, UVLOOP):
        raise ConfigError(f"{VARIABLE} {asked!r} is neither {ASYNCIO!r} nor {UVLOOP!r}; unset it")
    if asked == UVLOOP and not installed:
        raise ConfigError(
            f"{VARIABLE} asks for uvloop, which is not installed; unset it, or pip install uvloop"
        )
    return asked
