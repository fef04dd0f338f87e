"""`flowkit init`: a new project that runs and passes its test at once."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowkit.cli import output
from flowkit.cli.project.scaffold import make_project, new_project

if TYPE_CHECKING:
    from flowkit.cli.project.scaffold import Project


def init(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Name of the project; its Python package has '_' in the place of '-'."
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Folder to make it in, empty or not there yet.", show_default="NAME"),
    ] = None,
) -> None:
    """Make a new project: a graph of two nodes, their handlers, a test, a Makefile, a compose file."""
    project = new_project(name)
    where = folder or Path(name)
    files = make_project(project, where.absolute())
    output.say(f"made {name} in {where}: {len(files)} files, among them")
    _tell(_worth_reading(project))
    output.say("next")
    if programs := _not_on_path():
        output.say(
            f"  export PATH={shlex.quote(programs)}:$PATH   # first, in every terminal: flowkit is not on PATH"
        )
    _tell(_next(where))


def _tell(rows: dict[str, str]) -> None:
    width = max(map(len, rows))
    for left, right in rows.items():
        output.say(f"  {left:<{width}}   {right}")


def _worth_reading(project: Project) -> dict[str, str]:
    return {
        "README.md": "how to go on from here",
        "graph.json": "two nodes: extract, then count",
        f"{project.package}/handlers.py": "the two handlers",
        "tests/test_graph.py": "runs the graph without a server",
        "Makefile": "`make` lists what it can do",
        "docker-compose.yml": "the same in containers",
    }


def _next(folder: Path) -> dict[str, str]:
    """What to type now, and what it is good for."""
    entered = f"cd {shlex.quote(str(folder))} && " if folder.absolute() != Path.cwd() else ""
    return {
        f"{entered}make test": "# checks the graph and runs the test, without a server",
        "make up": "# servers, an engine and a worker, until Ctrl-C",
        "make run": "# in a second terminal: starts a task and watches it",
    }


def _not_on_path() -> str:
    """The folder of our programs, which the Makefile calls by name, where the shell finds others or none."""
    programs = Path(sys.executable).parent
    found = shutil.which("flowkit")
    on_path = found is not None and Path(found).parent.resolve() == programs.resolve()
    return "" if on_path else str(programs)
