"""Local servers from the command line: `python -m flowkit.local setup` and `python -m flowkit.local up`."""

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flowkit.local.cache import cache_folder
from flowkit.local.errors import DevServerError
from flowkit.local.stack import Stack
from flowkit.local.stack import setup as install_all

app = typer.Typer(help="Local servers to develop and try FlowKit with.", no_args_is_help=True)


@app.command()
def setup() -> None:
    """Install the servers, so that they later start in a second and without a network."""
    install_all()
    _console().print(f"all servers are installed in {cache_folder()}")


@app.command()
def up(
    temporal_port: Annotated[int, typer.Option(help="Port of the Temporal server.")] = 7233,
    ui_port: Annotated[int, typer.Option(help="Port of Temporal's Web UI.")] = 8233,
    mongo_port: Annotated[int, typer.Option(help="Port of MongoDB.")] = 27017,
    folder: Annotated[Path, typer.Option(help="Where data and logs are kept.")] = Path(".flowkit"),
) -> None:
    """Run the servers until Ctrl-C or SIGTERM; those named in the environment are left to others."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Stack(folder, temporal_port=temporal_port, ui_port=ui_port, mongo_port=mongo_port) as stack:
            _announce(stack)
            _wait_for_an_end(stack)
    except KeyboardInterrupt:
        _console().print("servers stopped")


def _announce(stack: Stack) -> None:
    console = _console()
    for server in stack.servers:
        console.print(f"{server.name} runs; log: {server.log}")
    if stack.temporal is not None:
        console.print(f"Web UI: {stack.temporal.ui_url}")
    for name, value in stack.exports.items():
        typer.echo(f"export {name}={value}")


def _wait_for_an_end(stack: Stack) -> None:
    never = threading.Event()
    while all(server.running for server in stack.servers):
        never.wait(1.0)
    ended = [
        f"{server.name} ended by itself, see {server.log}" for server in stack.servers if not server.running
    ]
    raise DevServerError("; ".join(ended))


def _console() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command line; an expected failure is one message and exit code 1."""
    try:
        app()
    except DevServerError as error:
        _console().print(str(error), style="red", markup=False)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
