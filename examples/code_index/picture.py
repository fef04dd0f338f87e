"""`python -m code_index.picture REPORT PICTURE`: the report as a picture, for a page that shows what it looks like."""

from pathlib import Path
from typing import Annotated

import typer

from code_index.errors import DemoError
from code_index.page.browser import Window, take_picture


def picture(
    report: Annotated[Path, typer.Argument(help="The report, as `make demo` writes it.", exists=True)],
    file: Annotated[Path, typer.Argument(help="Where the PNG goes.", dir_okay=False)],
    width: Annotated[int, typer.Option(min=200, help="Width of the window.")] = 1240,
    height: Annotated[int, typer.Option(min=200, help="Height of the window.")] = 1400,
    section: Annotated[
        str,
        typer.Option(help="What to begin with: packages or run; the top if not given.", show_default=False),
    ] = "",
    dark: Annotated[bool, typer.Option("--dark", help="As somebody sees it who likes it dark.")] = False,
) -> None:
    """Save what a browser's window shows of the report. Needs Chromium on PATH."""
    try:
        take_picture(report, file, Window(width=width, height=height, section=section, dark=dark))
    except DemoError as error:
        typer.secho(f"picture: {error}", err=True, fg="red")
        raise typer.Exit(1) from None
    typer.echo(f"{file}, {file.stat().st_size // 1000} kB")


if __name__ == "__main__":
    typer.run(picture)
