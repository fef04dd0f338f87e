"""Starting and stopping several processes at the same time."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack

from flowkit.local.process import ServerProcess

OnStarted = Callable[[ServerProcess], None]


def start_all(processes: Sequence[ServerProcess], on_started: OnStarted = lambda process: None) -> None:
    """Start all processes at the same time and return when all are ready.

    `on_started` runs for each process as soon as it is ready, on any thread. If a process does not
    start, or the caller is interrupted, all other processes are stopped and the first error is raised.
    """
    if not processes:
        return
    with ThreadPoolExecutor(len(processes), thread_name_prefix="start") as pool:
        starts = [pool.submit(_start, process, on_started) for process in processes]
        try:
            _wait_for(starts)
        except BaseException:
            for process in processes:
                process.cancel_start()
            wait(starts)
            stop_all(processes)
            raise


def stop_all(processes: Sequence[ServerProcess]) -> None:
    """Stop all processes at the same time and return when all have exited, even if one stop fails."""
    if not processes:
        return
    with ThreadPoolExecutor(len(processes), thread_name_prefix="stop") as pool, ExitStack() as stack:
        for process in processes:
            stack.callback(pool.submit(process.stop).result)


def _start(process: ServerProcess, on_started: OnStarted) -> None:
    process.start()
    on_started(process)


def _wait_for(starts: Sequence[Future[None]]) -> None:
    done, _ = wait(starts, return_when=FIRST_EXCEPTION)
    for start in starts:
        if start in done:
            start.result()
