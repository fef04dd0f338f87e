"""The event loops of FlowKit's processes and threads: uvloop by default, which has less overhead than asyncio's loop.

Set `FLOWKIT_EVENT_LOOP=asyncio` if a handler uses a library that requires asyncio's loop, such as nest_asyncio.
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
    """Return a new event loop of the type that `FLOWKIT_EVENT_LOOP` names; by default uvloop, if installed.

    Raise ConfigError if the named loop is unknown or not installed.
    """
    if _choose_loop() == ASYNCIO:
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` as `asyncio.run` does, on a loop from `new_event_loop`, and return its result."""
    try:
        runner = asyncio.Runner(loop_factory=new_event_loop)
        runner.get_loop()
    except ConfigError:
        main.close()
        raise
    with runner:
        return runner.run(main)


def _choose_loop() -> str:
    installed = find_spec(UVLOOP) is not None
    selected = os.environ.get(VARIABLE) or (UVLOOP if installed else ASYNCIO)
    if selected not in (ASYNCIO, UVLOOP):
        raise ConfigError(f"{VARIABLE} {selected!r} is neither {ASYNCIO!r} nor {UVLOOP!r}; unset it")
    if selected == UVLOOP and not installed:
        raise ConfigError(
            f"{VARIABLE} selects uvloop, which is not installed; unset it, or pip install uvloop"
        )
    return selected
