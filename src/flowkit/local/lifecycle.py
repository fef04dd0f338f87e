"""Processes that are started together and stopped together."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack

from flowkit.local.process import ServerProcess

Told = Callable[[ServerProcess], None]


def start_together(processes: Sequence[ServerProcess], told: Told = lambda process: None) -> None:
    """Start all at once and return when all are ready; `told` hears of each as soon as it is, on any thread.

    If one does not start, or the caller is interrupted, those that run are stopped and the first error is raised.
    """
    if not processes:
        return
    with ThreadPoolExecutor(len(processes), thread_name_prefix="start") as threads:
        starts = [threads.submit(_start, process, told) for process in processes]
        try:
            _wait_for(starts)
        except BaseException:
            for process in processes:
                process.give_up()
            wait(starts)
            stop_together(processes)
            raise


def stop_together(processes: Sequence[ServerProcess]) -> None:
    """Stop all at once and return when all are gone, even if one of them resists."""
    if not processes:
        return
    with ThreadPoolExecutor(len(processes), thread_name_prefix="stop") as threads, ExitStack() as every:
        for process in processes:
            every.callback(threads.submit(process.stop).result)


def _start(process: ServerProcess, told: Told) -> None:
    process.start()
    told(process)


def _wait_for(starts: Sequence[Future[None]]) -> None:
    done, _ = wait(starts, return_when=FIRST_EXCEPTION)
    for start in starts:
        if start in done:
            start.result()
