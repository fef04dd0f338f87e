"""A database handle for a loop other than the one that owns it: a driver's handle works only on its own loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowkit.adapters.mongo import durable
from flowkit.core.loop_portal import LoopPortal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


class RemoteDatabase:
    """Makes each call of a database on the loop that called `bind`. It has what the stores of a worker use."""

    def __init__(self, database: Any) -> None:
        self._database = durable(database)
        self._portal: LoopPortal | None = None

    def bind(self) -> None:
        """Make the calls on the current loop, which must own the database."""
        self._portal = LoopPortal()

    @property
    def name(self) -> str:
        """The name of the database."""
        name: str = self._database.name
        return name

    async def command(self, *args: Any, **options: Any) -> Any:
        """Run a database command."""
        return await self.run(lambda: self._database.command(*args, **options))

    def __getitem__(self, name: str) -> RemoteCollection:
        return RemoteCollection(self, self._database[name])

    def __getattr__(self, name: str) -> RemoteCollection:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    async def run(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Await `call()` on the loop of the database."""
        assert self._portal is not None, "the database is used before bind"
        return await self._portal.run(_awaited(call))


class RemoteCollection:
    """A collection of a RemoteDatabase. Its methods are coroutine functions; only `find` returns a cursor."""

    def __init__(self, database: RemoteDatabase, collection: Any) -> None:
        self._database = database
        self._collection = collection
        self.name: str = collection.name

    def find(self, *args: Any, **options: Any) -> RemoteCursor:
        """Return the cursor of a query."""
        return RemoteCursor(self._database, lambda: self._collection.find(*args, **options))

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **options: self._database.run(
            lambda: getattr(self._collection, name)(*args, **options)
        )


class RemoteCursor:
    """The result of a query. It reads all documents at once, because the stores of a worker read whole pages."""

    def __init__(self, database: RemoteDatabase, opened: Callable[[], Any]) -> None:
        self._database = database
        self._opened = opened

    def sort(self, *args: Any) -> RemoteCursor:
        """Sort the documents."""
        return RemoteCursor(self._database, lambda: self._opened().sort(*args))

    def limit(self, most: int) -> RemoteCursor:
        """Return at most this many documents."""
        return RemoteCursor(self._database, lambda: self._opened().limit(most))

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        for document in await self._database.run(lambda: _all(self._opened())):
            yield document


async def _awaited(call: Callable[[], Awaitable[Any]]) -> Any:
    return await call()


async def _all(cursor: Any) -> list[dict[str, Any]]:
    return [document async for document in cursor]
