"""`python -m code_index.screenshot REPORT PNG`: take a screenshot of the report for the documentation."""

from pathlib import Path
from typing import Annotated

import typer

from code_index.errors import DemoError
from code_index.page.browser import Viewport, take_screenshot


def screenshot(
    report: Annotated[Path, typer.Argument(help="The report that `make demo` wrote.", exists=True)],
    file: Annotated[Path, typer.Argument(help="The PNG file to write.", dir_okay=False)],
    width: Annotated[int, typer.Option(min=200, help="Width of the window.")] = 1240,
    height: Annotated[int, typer.Option(min=200, help="Height of the window.")] = 1400,
    section: Annotated[
        str,
        typer.Option(help="Section to start with: packages or run. Default: the top.", show_default=False),
    ] = "",
    dark: Annotated[bool, typer.Option("--dark", help="Use the dark color scheme.")] = False,
) -> None:
    """Save a screenshot of the report. Requires Chromium on PATH."""
    try:
        take_screenshot(report, file, Viewport(width=width, height=height, section=section, dark=dark))
    except DemoError as error:
        typer.secho(f"screenshot: {error}", err=True, fg="red")
        raise typer.Exit(1) from None
    typer.echo(f"{file}, {file.stat().st_size // 1000} kB")


if __name__ == "__main__":
    typer.run(screenshot)
