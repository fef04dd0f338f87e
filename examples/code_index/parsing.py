"""Parse files in processes, outside the event loop."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from code_index.facts import FileFacts, facts_of

MAX_PROCESSES = 4


class Parser:
    """A process pool that starts at the first use and ends with the process that owns it."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    async def facts(self, root: str, paths: list[str]) -> list[FileFacts]:
        """Return the facts of the files `paths` below `root`, in the same order."""
        pool = self._started()
        loop = asyncio.get_running_loop()
        try:
            return await asyncio.gather(*(loop.run_in_executor(pool, facts_of, root, path) for path in paths))
        except BrokenProcessPool:
            self._pool = None
            raise

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            # Spawn, do not fork: a forked child would inherit locks that threads of the worker hold.
            self._pool = ProcessPoolExecutor(
                max_workers=min(MAX_PROCESSES, os.cpu_count() or 1),
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_prepare,
            )
        return self._pool


def _prepare() -> None:
    # Syntax trees have no reference cycles, so the garbage collector would only cost time.
    gc.disable()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent process has ended, even if it was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
