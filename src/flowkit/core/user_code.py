"""Calls code that users wrote: handlers, coordinator functions, detectors. Whatever it raises is an ordinary error.

An error that is no `Exception`, such as the SystemExit of `sys.exit` or a panic of native code, passes through every
`except Exception`. SystemExit and KeyboardInterrupt even end the event loop, and with it the process that runs the work
of other tasks. `contained`, `Contained` and `contain_tasks` turn such an error into a UserCodeError where it leaves the
user's code. Only three things pass: cancels of asyncio, the end of a closed generator, and what a handler of SIGINT or
SIGTERM raises, because it stops the process.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path, PurePath
from traceback import walk_stack, walk_tb
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Generic, TypeGuard, TypeVar, cast

from flowkit.text import clean, truncate_start

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator
    from types import FrameType, TracebackType

T = TypeVar("T")

_logger = logging.getLogger("flowkit.worker")

BLOCKED_SEC = 2.0
"""How long user code may keep an event loop before FlowKit warns of it."""

_OUR_FOLDER = str(Path(__file__).parents[1])
_READ_VARIABLE = type(os.environ).__getitem__.__code__
_PLACE_CHARS = 160
"""Longest description of a place; longer ones lose their beginning."""


class UserCodeError(Exception):
    """Stands for an error of user code that is no Exception, or was raised in another process. `error` is that error.

    `place` is where another process raised it.
    """

    def __init__(self, error: BaseException, *, place: str = "") -> None:
        super().__init__(f"user code raised {type(error).__name__}")
        self.error = error
        self.place = place


def original(error: BaseException) -> BaseException:
    """Return the error that user code raised, for one that left `contained`."""
    return error.error if isinstance(error, UserCodeError) else error


class _Containment:
    """Lets only errors out of the block that are an Exception, a cancel, or the stop of the process."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            _contain(error)


contained = _Containment()
"""Use `with contained:` around a call of user code that awaits nothing. Raises UserCodeError."""


def _contain(error: BaseException) -> None:
    """Raise UserCodeError for an error that must not leave user code as it is."""
    if isinstance(error, (Exception, asyncio.CancelledError)) or stops_process(error):
        return
    raise UserCodeError(error) from error


def stops_process(error: BaseException) -> bool:
    """Return whether a handler of SIGINT or SIGTERM raised the error, on the thread that runs such handlers.

    Nothing distinguishes a Ctrl-C under Python's default handler from a `raise KeyboardInterrupt`, so both stop the
    process. `flowkit worker`, `flowkit engine` and `asyncio.run` set other handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    if isinstance(error, KeyboardInterrupt) and handlers[0] is signal.default_int_handler:
        return True
    codes = {code for handler in handlers if (code := _code_of(handler)) is not None}
    return any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__))


def _code_of(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(getattr(function, "__func__", function), "__code__", None)


class _Caller:
    """The attempt for which user code runs. It warns once of code that blocks the event loop."""

    def __init__(self, description: str) -> None:
        self.description = description
        self.has_warned = False


_caller: ContextVar[_Caller | None] = ContextVar("flowkit_caller", default=None)

_steps: dict[int, Contained[Any]] = {}
"""The coroutine that each thread runs at present."""

_reading_frames = threading.Lock()

_pid = os.getpid()
"""The id of this process, without a call of the system."""


def process_id() -> int:
    """Return the id of this process, for `end_if_forked`."""
    return _pid


def _note_fork() -> None:
    global _pid
    _pid = os.getpid()


os.register_at_fork(after_in_child=_note_fork)


def end_if_forked(pid: int) -> None:
    """End this process if it is not the one with this id: user code has forked it, and returned or raised in it.

    Otherwise the child would go on as a second worker, on the connections and the event loop of the first one.
    """
    if _pid == pid:
        return
    error = sys.exception()
    error = original(error) if error is not None else None
    code = getattr(error, "code", None) if isinstance(error, SystemExit) else None
    failed = error is not None and not isinstance(error, (SystemExit, StopIteration, StopAsyncIteration))
    if failed or (code is not None and not isinstance(code, int)):
        _logger.error("a process that user code forked ends with an error", exc_info=error)
        code = 1
    os._exit((code or 0) & 0xFF)


class Contained(Coroutine[Any, Any, T]):
    """A coroutine that runs `awaitable`, which is user code, and contains its errors.

    A coroutine cannot do this with `with contained:`, because it would also turn the GeneratorExit of its own `close`
    into an error. `name` is what a warning calls the code if it blocks the event loop; by default, the
    coroutine's name.
    """

    def __init__(self, awaitable: Awaitable[T], name: str = "") -> None:
        self._inner = awaitable if is_coroutine(awaitable) else _result_of(awaitable)
        self._name = name
        self._caller = _caller.get()
        self._pid = _pid
        self._began_at = 0.0

    def __await__(self) -> Generator[Any, Any, T]:
        return cast("Generator[Any, Any, T]", self)

    def __iter__(self) -> Contained[T]:
        return self

    def __next__(self) -> Any:
        return self._step(self._inner.send, None)

    def send(self, value: Any) -> Any:
        """Run the coroutine until it waits again."""
        return self._step(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        """Raise an error where the coroutine waits, such as a cancel, and run it until it waits again."""
        return self._step(self._inner.throw, *error)

    def _step(self, run: Callable[..., Any], *given: Any) -> Any:
        thread = threading.get_ident()
        outer, _steps[thread] = _steps.get(thread), self
        self._began_at = time.monotonic()
        try:
            return run(*given)
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:
            _contain(error)
            raise
        finally:
            if _pid != self._pid:
                end_if_forked(self._pid)
            if time.monotonic() - self._began_at >= BLOCKED_SEC:
                self.warn_if_blocking()
            if outer is None:
                del _steps[thread]
            else:
                _steps[thread] = outer

    def close(self) -> None:
        """End the coroutine where it waits."""
        with contained:
            self._inner.close()

    @property
    def is_blocking(self) -> bool:
        """Whether user code has kept its thread for too long, which is not known yet."""
        is_late = time.monotonic() - self._began_at >= BLOCKED_SEC
        return is_late and self._caller is not None and not self._caller.has_warned and not self._is_ours()

    def warn_if_blocking(self, frame: FrameType | None = None) -> None:
        """Log a warning if user code has kept its thread for too long.

        `frame` is what the thread runs, if it still does.
        """
        caller, seconds = self._caller, time.monotonic() - self._began_at
        if caller is None or not self.is_blocking:
            return
        caller.has_warned = True
        stack = [*walk_stack(frame)][::-1] if frame is not None else []
        place = _place_in([*_foreign(stack)])
        name = self._name or getattr(self._inner, "__qualname__", "a coroutine")
        _logger.warning(
            "%s of %s has blocked the event loop for %.1f s%s: other attempts of this process wait, "
            "and so does a cancel; "
            "await what takes long, or write the method with `def`, which runs on a thread",
            name,
            caller.description,
            seconds,
            place and f", at {place}",
            extra={"event": "worker.loop.blocked", "seconds": round(seconds, 1)},
        )

    def _is_ours(self) -> bool:
        """Return whether the coroutine is FlowKit's own, such as the task of a whole attempt."""
        code = getattr(self._inner, "cr_code", None)
        return not self._name and code is not None and code.co_filename.startswith(_OUR_FOLDER)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the coroutine, such as `cr_frame`, for libraries that look at tasks."""
        return getattr(self._inner, name)


def warn_of_blocked_loops() -> None:
    """Log a warning for each hook that blocks an event loop at present. Call this on another thread."""
    blocking = [(thread, step) for thread, step in [*_steps.items()] if step.is_blocking]
    frames = current_frames() if blocking else {}
    for thread, step in blocking:
        step.warn_if_blocking(frames.get(thread))


def current_frames() -> dict[int, FrameType]:
    """Return what each thread runs at present.

    In Python 3.11, a garbage collection during the call may stop the whole process for ever
    (https://github.com/python/cpython/issues/106883), so none begins.
    """
    with _reading_frames:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def is_coroutine(work: Any) -> TypeGuard[Coroutine[Any, Any, Any]]:
    """Return whether `work` is a coroutine. Nearly all come from `async def`, which spares the slower look at bases."""
    return type(work) is CoroutineType or isinstance(work, Coroutine)


async def _result_of(awaitable: Awaitable[T]) -> T:
    return await awaitable


class ContainedItems(Generic[T]):
    """An asynchronous iterator over `items`, which is user code, that contains its errors."""

    def __init__(self, items: AsyncIterator[T]) -> None:
        self._items = items

    def __aiter__(self) -> ContainedItems[T]:
        return self

    def __anext__(self) -> Awaitable[T]:
        with contained:
            return Contained(self._items.__anext__(), getattr(self._items, "__qualname__", "iter_batches"))

    async def aclose(self) -> None:
        """Close the iterator if it is a generator."""
        if inspect.isasyncgen(self._items):
            await Contained(self._items.aclose())


def contain_tasks(caller: str) -> None:
    """Contain the errors of all asyncio tasks that the current task and its tasks create from now on.

    `caller` describes the attempt for which they run, such as `node 'a' of task t`.

    Otherwise nobody would know which attempt a SystemExit belongs to, in a task that user code has created: it leaves
    the loop (flowkit.core.loops).
    """
    _caller.set(_Caller(caller))
    loop = asyncio.get_running_loop()
    factory = loop.get_task_factory()
    if not isinstance(factory, _TaskFactory):
        loop.set_task_factory(_TaskFactory(factory))


class _TaskFactory:
    """Creates tasks as `replaced` does, or as asyncio does; contained ones where `contain_tasks` was called."""

    def __init__(self, replaced: Callable[..., Any] | None) -> None:
        self._create: Callable[..., Any] = replaced or _create_task

    def __call__(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> Any:
        context = options.get("context")
        caller = _caller.get() if context is None else context.get(_caller)
        contains = caller is not None and type(work) is not Contained and is_coroutine(work)
        return self._create(loop, Contained(work) if contains else work, **options)


def _create_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(work, loop=loop, **options)


def error_text(error: BaseException) -> str:
    """Return the type and the message of an exception, even if its `__str__` raises.

    Of a group, such as that of an `asyncio.TaskGroup`, return the first error that it contains, too.
    """
    error = original(error)
    text = f"{type(error).__name__}: {_message_of(error)}"
    if (cause := _first_cause(error)) is not error:
        text = f"{text}: {type(cause).__name__}: {_message_of(cause)}"
    return clean(text)


def _message_of(error: BaseException) -> str:
    with suppress(Exception), contained:
        return str(error)
    return "its message cannot be read"


def _first_cause(error: BaseException) -> BaseException:
    """Return the first error in a group that is no group itself, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = original(error.exceptions[0])
    return error


def place_of(error: BaseException) -> str:
    """Return the line of the user's code that raised the error, such as `handlers.py:12 in Count.process_batch`.

    It is the innermost one: not in Python's library, and in an installed package only if the handler is in
    that package. The path begins at the module's top-level package, so it is the same on every machine.
    Return an empty string if no code of the user is involved.
    """
    if isinstance(error, UserCodeError) and error.place:
        return error.place
    error = original(error)
    cause = _first_cause(error)
    return _place_in([*_foreign(walk_tb(cause.__traceback__))] or [*_foreign(walk_tb(error.__traceback__))])


def _place_in(frames: list[tuple[FrameType, int]]) -> str:
    """Return the innermost line of the user's own code, or an empty string."""
    if not frames:
        return ""
    entry = _package_of(frames[0][0])
    own = [each for each in frames if not _is_installed(each[0])]
    frame, line = (own or [each for each in frames if _package_of(each[0]) == entry])[-1]
    text = f"{_short_path(frame)}:{line} in {frame.f_code.co_qualname.replace('.<locals>', '')}"
    return truncate_start(text, _PLACE_CHARS)


def shorten_path(path: str) -> str:
    """Return a path relative to the current folder, if it is in it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def is_missing_variable(error: BaseException) -> bool:
    """Return whether `error` is the KeyError of `os.environ[name]`."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return isinstance(error, KeyError) and bool(frames) and frames[-1].f_code is _READ_VARIABLE


def _foreign(frames: Iterable[tuple[FrameType, int | None]]) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames that are neither FlowKit's nor of Python's library or uvloop, with their lines."""
    for frame, line in frames:
        package = _package_of(frame)
        is_ours = package in {"flowkit", "uvloop"} or package in sys.stdlib_module_names
        if not is_ours and line is not None and not frame.f_code.co_filename.startswith("<"):
            yield frame, line


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_installed(frame: FrameType) -> bool:
    return bool({"site-packages", "dist-packages"} & {*PurePath(frame.f_code.co_filename).parts})


def _short_path(frame: FrameType) -> str:
    """Return the path of a frame's file from its top-level package on; its name if it is in none."""
    path, depth = PurePath(frame.f_code.co_filename), str(frame.f_globals.get("__name__", "")).count(".")
    if path.stem == "__init__":
        depth += 1
    return "/".join(path.parts[-depth - 1 :])
