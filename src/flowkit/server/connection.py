"""One WebSocket connection of a JSON-RPC client: its calls, its notifications, and the tasks that end with it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from starlette.websockets import WebSocketDisconnect

from flowkit.core.utils import dumps
from flowkit.server.errors import log_unexpected

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from pydantic import BaseModel
    from starlette.websockets import WebSocket

MAX_CONCURRENT_CALLS = 16
"""Maximum number of calls that a connection runs at the same time; further calls wait."""

MAX_WAITING_CALLS = 64
"""Number of calls, running and waiting, from which on the server stops reading the connection."""

MAX_SUBSCRIPTIONS = 100
"""Maximum number of subscriptions of a connection."""

_INTERNAL_ERROR = 1011


class Connection:
    """An open WebSocket connection. Methods use it to notify the client, and to run tasks that end with it.

    When the connection closes, it cancels the tasks of `spawn`, and then runs the callbacks of `on_close`, the last one
    first. Calls in flight finish, so that none is interrupted halfway.
    """

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self._sending = asyncio.Lock()
        self._running = asyncio.Semaphore(MAX_CONCURRENT_CALLS)
        self._room = asyncio.Semaphore(MAX_WAITING_CALLS)
        self._spawned: set[asyncio.Task[None]] = set()
        self._subscriptions: dict[str, asyncio.Task[None]] = {}
        self._on_close: list[Callable[[], Awaitable[None]]] = []
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the client has gone. Notifications are then dropped."""
        return self._closed

    async def notify(self, method: str, params: BaseModel | dict[str, Any]) -> None:
        """Send a notification. Wait while the client is slow to read; do nothing if the connection is closed."""
        await self._send(dumps({"jsonrpc": "2.0", "method": method, "params": params}).decode())

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        """Run a coroutine until it ends or the connection closes. If it fails, log that and close the connection.

        Return its task; None if the connection is closed.
        """
        if self._closed:
            work.close()
            return None
        task = asyncio.create_task(self._watch(work))
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)
        task.add_done_callback(lambda _: work.close())  # if it was cancelled before it began
        return task

    def subscribe(self, subject: str, work: Coroutine[Any, Any, None]) -> bool:
        """Run a coroutine as `spawn` does, and end the one that has run for the same subject.

        Return False, without running it, if the connection has subscriptions to MAX_SUBSCRIPTIONS other subjects.
        """
        earlier = self._subscriptions.pop(subject, None)
        if earlier is not None:
            earlier.cancel()
        if len(self._subscriptions) >= MAX_SUBSCRIPTIONS:
            work.close()
            return False
        task = self.spawn(work)
        if task is not None:
            self._subscriptions[subject] = task
        return True

    def on_close(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Call an async function when the connection has closed, after the tasks of `spawn` have ended."""
        self._on_close.append(callback)

    async def serve(self, answer: Callable[[str | None], Awaitable[str | None]]) -> None:
        """Receive messages until the client disconnects, and send what `answer` returns for each.

        `answer` gets the text of a message, or None for a binary one.
        """
        await self._socket.accept()
        try:
            async with asyncio.TaskGroup() as calls:
                try:
                    while (message := await self._socket.receive())["type"] == "websocket.receive":
                        await self._room.acquire()
                        calls.create_task(self._call(answer, message.get("text")))
                finally:
                    await self._cancel_spawned()
        finally:
            await self._run_callbacks()

    async def _call(self, answer: Callable[[str | None], Awaitable[str | None]], text: str | None) -> None:
        try:
            async with (
                self._running
            ):  # also while it is sent: a client that does not read gets no further response
                response = await answer(text)
                if response is not None:
                    await self._send(response)
        finally:
            self._room.release()

    async def _send(self, text: str) -> None:
        """Send one message at a time. Drop it if the connection is closed."""
        async with self._sending:
            if not self._closed:
                try:
                    await self._socket.send_text(text)
                except (WebSocketDisconnect, RuntimeError):  # RuntimeError: the close was sent already
                    self._closed = True

    async def _watch(self, work: Coroutine[Any, Any, None]) -> None:
        error = await _error_of(work)
        if error is not None:
            reference = log_unexpected(error, "a task of a WebSocket connection")
            with suppress(WebSocketDisconnect, RuntimeError):
                await self._socket.close(_INTERNAL_ERROR, f"unexpected error {reference}")

    async def _cancel_spawned(self) -> None:
        self._closed = True
        for task in self._spawned:
            task.cancel()
        if self._spawned:
            await asyncio.wait(self._spawned)

    async def _run_callbacks(self) -> None:
        for callback in reversed(self._on_close):
            error = await _error_of(callback())
            if error is not None:
                log_unexpected(error, "a callback of a closed connection")


async def _error_of(work: Awaitable[None]) -> Exception | None:
    """Await something. Return its error, or None if it succeeds."""
    outcomes = await asyncio.gather(work, return_exceptions=True)
    return next((each for each in outcomes if isinstance(each, Exception)), None)
