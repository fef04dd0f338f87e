"""The command `flowkit init`, which creates a project that runs and passes its tests."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowkit.cli import output
from flowkit.cli.project.scaffold import (
    DEFAULT_TEMPLATE,
    TEMPLATES,
    describe_templates,
    new_project,
    write_project,
)
from flowkit.text import shell_word

if TYPE_CHECKING:
    from flowkit.cli.project.scaffold import Project


def init(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Name of the project. Its Python package has '_' instead of '-'."
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir", help="Folder of the project. It must be empty or not exist yet.", show_default="NAME"
        ),
    ] = None,
    template: Annotated[
        str,
        typer.Option(
            metavar="TEMPLATE", help="\n\n".join(["What the pipeline shows:", *describe_templates()])
        ),
    ] = DEFAULT_TEMPLATE,
) -> None:
    """Create a project: a typed pipeline of three nodes, its test, a Makefile and a Compose file."""
    project = new_project(name, template)
    target = folder or Path(name)
    files = write_project(project, target.absolute())
    output.echo(f"created {name} in {target}: {len(files)} files, including")
    _print_rows(_highlights(project))
    output.echo("next steps")
    if bin_folder := _missing_path_entry():
        output.echo(
            f"  export PATH={shell_word(bin_folder)}:$PATH   # first, in each terminal: flowkit is not on PATH"
        )
    _print_rows(_next_steps(target))


def _print_rows(rows: dict[str, str]) -> None:
    width = max(map(len, rows))
    for left, right in rows.items():
        output.echo(f"  {left:<{width}}   {right}")


def _highlights(project: Project) -> dict[str, str]:
    return {
        "README.md": "what to do next",
        f"{project.package}/pipeline.py": TEMPLATES[project.template].summary,
        "tests/test_pipeline.py": "runs the pipeline without a server",
        "Makefile": "run `make` to list its targets",
        "docker-compose.yml": "the same setup in containers",
    }


def _next_steps(folder: Path) -> dict[str, str]:
    """Return the next commands with comments."""
    change_folder = f"cd {shell_word(str(folder))} && " if folder.absolute() != Path.cwd() else ""
    return {
        f"{change_folder}make test": "# checks the graph and runs the tests, without a server",
        "make up": "# runs servers, an engine and a worker until Ctrl-C",
        "make run": "# in a second terminal: starts a task and watches it",
    }


def _missing_path_entry() -> str:
    """Return the folder of this `flowkit` if it is not the one on PATH, which the Makefile runs."""
    bin_folder = Path(sys.executable).parent
    found = shutil.which("flowkit")
    on_path = found is not None and Path(found).parent.resolve() == bin_folder.resolve()
    return "" if on_path else str(bin_folder)
