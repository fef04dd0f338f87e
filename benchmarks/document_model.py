"""`python -m benchmarks.document_model`: how attempts share their updates of a task document, by a model of MongoDB.

The attempts make their real writes, without a server and in virtual time, so that each run gives the same counts. The
model of the server performs one update of the document at a time, in a millisecond and the time that it takes to
rewrite the document. Attempts begin at the rate at which a small Temporal server hands them out.
"""

from __future__ import annotations

import asyncio
import selectors
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pymongo.results import UpdateResult
from rich.console import Console
from rich.table import Table

from flowkit.adapters.tasks.attempts import Attempts
from flowkit.attempt.supervision import renewal_pause_sec
from flowkit.models import AttemptInput

if TYPE_CHECKING:
    from collections.abc import Mapping

SERVER_BYTES_PER_SEC = 400_000_000
"""How fast the model of the server rewrites a document."""
CALL_SEC = 0.001
STARTS_PER_SEC = 300
HANDLER_SEC = 0.01
"""What an attempt takes between its begin and its end: the handler, and the write of one batch."""
BETWEEN_LAYERS_SEC = 0.02
"""What the workflow takes from the end of a layer to the first attempt of the next one."""
BYTES_OF_A_NODE = 460
RENEWAL_SEC = 20.0
"""The setting `hb_interval_sec`."""


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop whose timers fire at once, in their order. Its clock shows the time at which they are due."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_NoWait(self))

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds


class _NoWait(selectors.DefaultSelector):
    """Advances the clock of a loop instead of waiting."""

    def __init__(self, loop: VirtualTime) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what has happened."""
        if timeout is None:
            raise RuntimeError("everything waits, and no timer is set")
        self._loop.advance(timeout)
        return super().select(0)


class Server:
    """The collection `tasks` of a model that takes time, and counts updates."""

    def __init__(self, document_bytes: int) -> None:
        self._update_sec = CALL_SEC + document_bytes / SERVER_BYTES_PER_SEC
        self._lock = asyncio.Lock()
        self.updates = 0

    async def update_one(self, condition: Mapping[str, Any], update: Mapping[str, Any]) -> UpdateResult:
        """Take the time of one update."""
        async with self._lock:
            await asyncio.sleep(self._update_sec)
        self.updates += 1
        return UpdateResult({"n": 1}, acknowledged=True)

    async def find_one_and_update(self, *given: Any, projection: Any) -> dict[str, Any]:
        """Take the time of one update."""
        await self.update_one({}, {})
        return {}


@dataclass(frozen=True, kw_only=True)
class Modelled:
    """What a task has cost."""

    nodes: int
    updates: int
    document_bytes: int
    seconds: float

    @property
    def rewritten_mb(self) -> float:
        """Return the megabytes that the server rewrites for each node."""
        return self.updates * self.document_bytes / self.nodes / 1e6


def model(
    *, layers: int, width: int, document_bytes: int, waits: bool = True, processes: int = 2
) -> Modelled:
    """Return what a task of so many layers costs. Its attempts run in several processes.

    Concurrent writes of a process wait for each other if `waits`, and the document is large.
    """
    loop = VirtualTime()
    try:
        work = _run(layers, width, document_bytes, document_bytes * waits, processes)
        return loop.run_until_complete(work)
    finally:
        loop.close()


async def _run(layers: int, width: int, document_bytes: int, known_bytes: int, processes: int) -> Modelled:
    server = Server(document_bytes)
    stores = [Attempts(server, reopen=_never_reopen) for _ in range(processes)]
    loop = asyncio.get_running_loop()
    for layer in range(layers):
        await asyncio.sleep(BETWEEN_LAYERS_SEC)
        await asyncio.gather(
            *(
                _attempt(
                    stores[place % processes], layer * width + place, place / STARTS_PER_SEC, known_bytes
                )
                for place in range(width)
            )
        )
    nodes = layers * width
    return Modelled(nodes=nodes, updates=server.updates, document_bytes=document_bytes, seconds=loop.time())


def model_renewals(*, attempts: int, minutes: int, together: bool = True) -> int:
    """Return how many updates renew the leases of so many attempts of one process that run so long.

    Without `together`, each attempt renews its lease at a fixed time after its begin.
    """
    loop = VirtualTime()
    try:
        return loop.run_until_complete(_run_renewals(attempts, minutes * 60.0, together))
    finally:
        loop.close()


async def _run_renewals(attempts: int, seconds: float, together: bool) -> int:
    server = Server(0)
    store, loop = Attempts(server, reopen=_never_reopen), asyncio.get_running_loop()

    async def renew(place: int) -> None:
        await asyncio.sleep(place * RENEWAL_SEC / attempts)
        while loop.time() < seconds:
            await asyncio.sleep(renewal_pause_sec(loop.time(), RENEWAL_SEC) if together else RENEWAL_SEC)
            await store.extend_lease(_input(place), "run", 0, 0.0)

    await asyncio.gather(*map(renew, range(attempts)))
    return server.updates


async def _never_reopen(task_id: str, run_id: str) -> None:
    """Do nothing."""


async def _attempt(store: Attempts, index: int, after_sec: float, document_bytes: int) -> None:
    await asyncio.sleep(after_sec)
    given = _input(index, document_bytes)
    await store.begin(given, "run", {"worker_id": "w"}, 0.0)
    await asyncio.sleep(HANDLER_SEC)
    await store.finish(given, "run", 0.0)


def _input(index: int, document_bytes: int = 0) -> AttemptInput:
    return AttemptInput(
        task_id="t", node_id=f"n{index}", index=index, role="r", epoch=1, document_bytes=document_bytes
    )


def main() -> None:
    """Print a table for documents of several sizes."""
    table = Table("shape", "document, MB", "updates for a node", "MB rewritten for a node", "ms for a node")
    for layers, width in ((10, 100), (250, 4), (500, 2), (1_000, 1)):
        for nodes in (500, 1_000, 5_000, 20_000):
            size = nodes * BYTES_OF_A_NODE
            sides = [
                model(layers=layers, width=width, document_bytes=size, waits=waits) for waits in (False, True)
            ]
            table.add_row(
                f"layers of {width}" if width > 1 else "chain",
                f"{size / 1e6:.2f}",
                " → ".join(f"{each.updates / each.nodes:.3f}" for each in sides),
                " → ".join(f"{each.rewritten_mb:.3f}" for each in sides),
                " → ".join(f"{each.seconds * 1000 / each.nodes:.1f}" for each in sides),
            )
    console = Console(width=120)
    console.print(table)
    for attempts in (10, 50, 100):
        alone, shared = (
            model_renewals(attempts=attempts, minutes=10, together=together) for together in (False, True)
        )
        console.print(f"leases of {attempts} attempts that run ten minutes: {alone} → {shared} updates")


if __name__ == "__main__":
    main()
