"""Parsing on all processors, away from the event loop."""

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
    """A pool of processes that is started when it is first needed and ends with the process that owns it."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    async def facts(self, root: str, paths: list[str]) -> list[FileFacts]:
        """Facts of the files `paths` below `root`, in their order."""
        pool = self._started()
        loop = asyncio.get_running_loop()
        try:
            return await asyncio.gather(*(loop.run_in_executor(pool, facts_of, root, path) for path in paths))
        except BrokenProcessPool:
            self._pool = None
            raise

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            # Not forked: a worker has threads, whose locks a forked child would find taken for ever.
            self._pool = ProcessPoolExecutor(
                max_workers=min(MAX_PROCESSES, os.cpu_count() or 1),
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_prepare,
            )
        return self._pool


def _prepare() -> None:
    # Syntax trees hold no cycles: counting references frees them, and the collector would only search them in vain.
    gc.disable()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent is gone, even if that was killed and could not say so."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
