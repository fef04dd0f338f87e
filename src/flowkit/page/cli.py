"""`flowkit ui`, which serves the page."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from flowkit.cli.errors import EPILOG
from flowkit.cli.health import measure
from flowkit.cli.options import AnyQueue, HealthOptions, Verbose, with_options
from flowkit.cli.output import log_processes
from flowkit.cli.running import run_until_stopped
from flowkit.core.loops import run
from flowkit.page import check_installed

ui = typer.Typer(invoke_without_command=True, epilog=EPILOG, subcommand_metavar="")


@ui.callback(epilog=EPILOG)
@with_options
def serve_page(
    host: Annotated[
        str, typer.Option(help="Address to listen on. Another one than loopback needs tokens.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Port of the page.")] = 9655,
    certificate: Annotated[
        str | None, typer.Option(help="PEM file with a certificate, to serve HTTPS.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="PEM file with the key of the certificate.")] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Show tasks only; the page has no actions.")
    ] = False,
    web_ui: Annotated[
        str | None,
        typer.Option(
            help="Address of Temporal's Web UI, to which the page links. [default: TEMPORAL_UI_URL]"
        ),
    ] = None,
    *,
    where: AnyQueue,
    reports: HealthOptions,
    verbose: Verbose = False,
) -> None:
    """Serve a page that shows tasks and their graphs live, and lets you act on them, until Ctrl-C."""
    log_processes(verbose)
    check_installed()
    from flowkit.cli import servers
    from flowkit.page.process import PageProcess, PageSettings

    settings = PageSettings(
        addresses=[(host, port)],
        certificate=certificate,
        key=key,
        web_ui=web_ui or os.environ.get("TEMPORAL_UI_URL"),
        read_only=read_only,
    )

    async def run_page() -> None:
        metrics = measure(reports, "page", queue="")
        async with servers.servers(where, metrics) as both:
            process = PageProcess(both, settings)
            summary = f"the page is at {'https' if certificate else 'http'}://{host}:{port}/"
            await run_until_stopped(process, summary, reports, metrics)

    run(run_page())
