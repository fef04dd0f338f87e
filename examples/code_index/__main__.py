"""`python -m code_index`: rank the packages of a source tree with FlowKit, on real servers."""

from __future__ import annotations

import signal
import sysconfig
from pathlib import Path
from typing import Annotated

import typer
from pymongo.errors import PyMongoError
from rich.console import Console

from code_index.demo import Demo, Options
from code_index.errors import DemoError
from code_index.graph import BATCH_SIZE
from flowkit.errors import FlowKitError
from flowkit.local.errors import DevServerError

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130

STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
FOLDER = Path(".flowkit/demo")
REPORT = "report.html"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def code_index(
    source: Annotated[
        Path,
        typer.Option(
            help="Folder of Python source; this Python's standard library if not given.", show_default=False
        ),
    ] = STANDARD_LIBRARY,
    keep: Annotated[bool, typer.Option("--keep", help="Keep everything running until Ctrl-C.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    chaos: Annotated[
        bool, typer.Option("--chaos", help="Kill a worker half-way; another one takes its node over.")
    ] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Files to a batch.")] = BATCH_SIZE,
    folder: Annotated[Path, typer.Option(help="Where the servers keep data and logs.")] = FOLDER,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Where the HTML report goes; report.html in the folder if not given.", show_default=False
        ),
    ] = None,
) -> None:
    """Rank the packages of a source tree by complexity, as one FlowKit task on real servers.

    The servers are started and stopped, unless TEMPORAL_ADDRESS and MONGO_URL say where some already run.
    """
    if not source.is_dir():
        raise DemoError(f"--source: there is no folder {source}; name one that holds Python source")
    options = Options(
        source=source.resolve(),
        folder=folder,
        report=_writable(report or folder / REPORT),
        batch_size=batch_size,
        workers=workers,
        chaos=chaos,
        keep=keep,
    )
    try:
        Demo(options, Console()).run()
    except KeyboardInterrupt:
        _errors().print("\ninterrupted; nothing of the demo runs any more")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _writable(report: Path) -> Path:
    """The path of the report; a DemoError now rather than at the end of the run if it cannot be written."""
    earlier = report.exists()
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.open("a", encoding="utf-8").close()
        if not earlier:
            report.unlink()
    except OSError as error:
        raise DemoError(
            f"--report: {report} cannot be written ({error.strerror}); name another file"
        ) from None
    return report.resolve()


def _errors() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command line; whatever is expected to go wrong is one message and exit code 1."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app()
    except (DemoError, DevServerError, FlowKitError, PyMongoError) as error:
        _errors().print(f"code_index: {error}", style="red", markup=False)
        raise SystemExit(EXIT_ERROR) from error


if __name__ == "__main__":
    main()
