"""Showing the progress of an installation on the terminal."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

LINE_EVERY_SECONDS = 20.0


@contextmanager
def report_progress(what: str) -> Iterator[None]:
    """Show on stderr that `what` is being installed, for how long, and whether it succeeded.

    A terminal shows a spinner with the elapsed time. A log file gets a line at the start, one every 20
    seconds and one at the end.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    started = time.monotonic()
    try:
        with _spinner(console, what) if console.is_terminal else _lines(console, what):
            yield
    except BaseException:
        console.print(f"{what}: installation failed after {_elapsed(started)}")
        raise
    console.print(f"{what}: installed in {_elapsed(started)}")


@contextmanager
def _spinner(console: Console, what: str) -> Iterator[None]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        shown.add_task(f"{what}: installing")
        yield


@contextmanager
def _lines(console: Console, what: str) -> Iterator[None]:
    started, done = time.monotonic(), threading.Event()

    def report() -> None:
        while not done.wait(LINE_EVERY_SECONDS):
            console.print(f"{what}: still installing after {_elapsed(started)}")

    console.print(f"{what}: installing")
    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        done.set()
        reporter.join()


def _elapsed(started: float) -> str:
    return f"{time.monotonic() - started:.1f} s"
