"""Stops in the code of a handler under pdb: at the start of a batch, or where an exception was raised."""

from __future__ import annotations

import functools
import inspect
import pdb
import sys
from typing import TYPE_CHECKING, Any

from flowkit.activities.calls import is_coroutine_function
from flowkit.cli.errors import add_remedy
from flowkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType


class Breakpoint:
    """Stops before the first line of a function, each time it is called. Works on any thread."""

    def __init__(self) -> None:
        self._debugger = pdb.Pdb()

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that stops in `function`. Raise ConfigError if its source is not available."""
        self._set(function)
        if is_coroutine_function(function):

            @functools.wraps(function)
            async def call_coroutine(*args: Any, **kwargs: Any) -> Any:
                self._trace()
                try:
                    return await function(*args, **kwargs)
                finally:
                    sys.settrace(None)

            return call_coroutine

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._trace()
            try:
                return function(*args, **kwargs)
            finally:
                sys.settrace(None)

        return call

    def _set(self, function: Callable[..., Any]) -> None:
        code = _code_of(function)
        place = None if code is None else (self._debugger.canonic(code.co_filename), code.co_firstlineno)
        if code is not None and place is not None and place not in self._breaks():
            refused = self._debugger.set_break(*place, funcname=code.co_name)
            place = None if refused else place
        if place is None:
            problem = ConfigError(f"--break cannot stop in {function!r}: its source is not available")
            raise add_remedy(problem, "call breakpoint() in the code")

    def _breaks(self) -> list[tuple[str, int]]:
        return [(path, line) for path, lines in self._debugger.get_all_breaks().items() for line in lines]

    def _trace(self) -> None:
        """Trace the functions that this thread calls from now on, without a stop before the breakpoint."""
        self._debugger.reset()
        self._debugger.botframe = sys._getframe()
        self._debugger.set_continue()
        sys.settrace(self._debugger.trace_dispatch)


def _code_of(function: Callable[..., Any]) -> CodeType | None:
    function = inspect.unwrap(function)
    code: CodeType | None = getattr(getattr(function, "__func__", function), "__code__", None)
    return code


def inspect_error(error: BaseException) -> None:
    """Open pdb where an exception was raised."""
    pdb.post_mortem(error.__traceback__)
