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
from code_index.flow import BATCH_SIZE
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
            help="Folder of Python source. Default: this Python's standard library.", show_default=False
        ),
    ] = STANDARD_LIBRARY,
    keep: Annotated[bool, typer.Option("--keep", help="Keep everything running until Ctrl-C.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Number of worker processes.")] = 2,
    chaos: Annotated[
        bool, typer.Option("--chaos", help="Kill a worker half-way; others take over its batches.")
    ] = False,
    external: Annotated[
        bool, typer.Option("--external", help="Run the role grouper on an external worker, through Kafka.")
    ] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Files per batch.")] = BATCH_SIZE,
    folder: Annotated[Path, typer.Option(help="Folder for the data and logs of the servers.")] = FOLDER,
    report: Annotated[
        Path | None,
        typer.Option(
            help="File for the HTML report. Default: report.html in the folder.", show_default=False
        ),
    ] = None,
) -> None:
    """Rank the packages of a source tree by complexity, as one FlowKit task on real servers.

    Starts and stops the servers, unless TEMPORAL_ADDRESS, MONGO_URL and KAFKA_BOOTSTRAP_SERVERS name running ones.
    """
    if not source.is_dir():
        raise DemoError(f"--source: there is no folder {source}; name a folder with Python source")
    options = Options(
        source=source.resolve(),
        folder=folder,
        report=_writable(report or folder / REPORT),
        batch_size=batch_size,
        workers=workers,
        chaos=chaos,
        external=external,
        keep=keep,
    )
    try:
        Demo(options, Console()).run()
    except KeyboardInterrupt:
        _errors().print("\ninterrupted; all processes of the demo have stopped")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _writable(report: Path) -> Path:
    """Return the path of the report; raises DemoError before the run starts if the file is not writable."""
    existed = report.exists()
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.open("a", encoding="utf-8").close()
        if not existed:
            report.unlink()
    except OSError as error:
        raise DemoError(
            f"--report: {report} cannot be written ({error.strerror}); name another file"
        ) from None
    return report.resolve()


def _errors() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command line; an expected error prints one message and exits with code 1."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app()
    except (DemoError, DevServerError, FlowKitError, PyMongoError) as error:
        _errors().print(f"code_index: {error}", style="red", markup=False)
        raise SystemExit(EXIT_ERROR) from error


if __name__ == "__main__":
    main()
