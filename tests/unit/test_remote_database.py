"""A database that another loop calls: every call runs on the loop that owns the database."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.adapters.remote_database import RemoteDatabase
from flowkit.coordinator.hosting import HandlerThread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine


@pytest.fixture
async def thread() -> AsyncIterator[HandlerThread]:
    """A thread with a loop."""
    started = await HandlerThread.started()
    yield started
    await started.stop()


def remote(database: Any) -> Any:
    """Return a database that belongs to the current loop."""
    made = RemoteDatabase(database)
    made.bind()
    return made


class Recording:
    """A database that records the threads of its calls."""

    name = "recorded"

    def __init__(self) -> None:
        self.threads: list[str] = []

    def __getitem__(self, name: str) -> Recording:
        return self

    async def command(self, text: str) -> str:
        """Return the text."""
        self.threads.append(threading.current_thread().name)
        return text

    async def find_one(self) -> None:
        """Fail as a driver does."""
        self.threads.append(threading.current_thread().name)
        raise ConnectionError("away")


async def test_calls_run_on_the_loop_of_the_database_and_pass_errors_on(thread: HandlerThread) -> None:
    database = Recording()
    db = remote(database)

    async def use(call: Coroutine[Any, Any, Any]) -> tuple[str, Any]:
        return threading.current_thread().name, await call

    assert await thread.portal.run(use(db.command("ping"))) == ("flowkit-handlers", "ping")
    with pytest.raises(ConnectionError, match="away"):
        await thread.portal.run(use(db.any_collection.find_one()))
    assert database.threads == [threading.main_thread().name] * 2
    assert (db.name, db.any_collection.name) == ("recorded", "recorded")
    with pytest.raises(AttributeError):
        _ = db._private


async def test_stopping_the_thread_cancels_what_still_runs_on_its_loop() -> None:
    thread, began, ends = await HandlerThread.started(), asyncio.Event(), []
    loop = asyncio.get_running_loop()

    async def wait() -> None:
        loop.call_soon_threadsafe(began.set)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    waiting = asyncio.create_task(thread.portal.run(wait()))
    await began.wait()
    await thread.stop()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ends == ["cancelled"]
