"""`make screenshots`: take the screenshots of docs/web-ui.md and docs/ui.md, from real tasks on servers started for
them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowkit.errors import FlowKitError
from flowkit.local import Stack
from screenshots.browser import NoChromium, web_ui
from screenshots.page import page_pictures
from screenshots.pipeline import FORECAST
from screenshots.states import DATABASE, QUEUE, pipeline
from screenshots.tour import tour

if TYPE_CHECKING:
    from screenshots.browser import WebUI

PICTURES = Path(__file__).parents[1] / "img"
_SERVERS = ("TEMPORAL_ADDRESS", "TEMPORAL_NAMESPACE", "MONGO_URL")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def screenshots(
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep tasks and servers running until Ctrl-C.")
    ] = False,
    take: Annotated[bool, typer.Option(help="Take the screenshots; --no-take needs no browser.")] = True,
    only_page: Annotated[
        bool, typer.Option("--only-page", help="Take only those of FlowKit's page.")
    ] = False,
) -> None:
    """Bring one task into each state and take a screenshot of it in Temporal's Web UI, and some of FlowKit's page."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.getLogger("flowkit.worker").setLevel(logging.ERROR)  # the failures are intentional
    for name in _SERVERS:
        os.environ.pop(name, None)
    with tempfile.TemporaryDirectory(prefix="flowkit-screenshots-") as folder, Stack(Path(folder)) as stack:
        os.environ.update(stack.exports)
        assert stack.temporal is not None
        if take:
            asyncio.run(page_pictures(stack.mongo_url, stack.temporal.ui_url, PICTURES))
        if not only_page:
            asyncio.run(_run(stack, stack.temporal.ui_url, Path(folder), keep=keep, take=take))


async def _run(stack: Stack, url: str, folder: Path, *, keep: bool, take: bool) -> None:
    async with pipeline(stack.mongo_url) as tasks:
        shown = await tasks.all_states()
        if take:
            async with web_ui(url, PICTURES) as ui:
                await _take_screenshots(ui, shown)
                await ui.details("routing", await tasks.routing(), "waits for a route")
                await _take_decisions(ui, await tasks.held())
                (folder / "tour").mkdir()
                await tour(ui, stack.mongo_url, folder / "tour")
            typer.echo("the screenshots are in docs/img")
        if keep:
            _print_addresses(stack, url, shown)
            await asyncio.Event().wait()


async def _take_screenshots(ui: WebUI, shown: dict[str, str]) -> None:
    await ui.tasks("list", list(shown.values()))
    await ui.details("running", shown["running"], "Workers of its role")
    await ui.details("waiting-for-retry", shown["waiting-for-retry"], "retry 1 of 2 at")
    await ui.details("no-worker", shown["no-worker"], "Workers of its role")
    await ui.queue("no-worker-queue", f"{QUEUE}.{FORECAST}", "No Workers Found")
    await ui.details("failed", shown["failed"], "bad_input")
    await ui.details("cancelled", shown["cancelled"], "task_cancelled")
    await ui.timeline("finished", shown["finished"], "analyse_revenue")


async def _take_decisions(ui: WebUI, task_id: str) -> None:
    """Decide about an approval in the Web UI, and take pictures before, meanwhile and afterwards."""
    await ui.details("held", task_id, "a decision: failed with bad_input")
    decision = {
        "node_id": "prices_checked",
        "decision": "approve",
        "comment": "checked with Rome",
        "by": "ada",
    }
    await ui.update("update", task_id, "decide", json.dumps(decision, indent=2))
    await ui.details("decided", task_id, "2 finished")


def _print_addresses(stack: Stack, url: str, shown: dict[str, str]) -> None:
    typer.echo(f"Web UI: {url}")
    for state, task_id in shown.items():
        typer.echo(f"  {state:18} {task_id}")
    for name, value in {**stack.exports, "MONGO_DATABASE": DATABASE}.items():
        typer.echo(f"export {name}={value}")
    typer.echo("press Ctrl-C to stop everything")


def main() -> None:
    """Run the command line; print expected errors as one line."""
    try:
        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (NoChromium, FlowKitError) as error:
        typer.echo(f"screenshots: {error}", err=True)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
