"""`flowkit graph`, which draws the graph of a task or of a file."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowkit.cli import output
from flowkit.cli.errors import add_remedy
from flowkit.cli.json_files import read_task
from flowkit.cli.loading import is_flow_name, is_python_file, module_exists
from flowkit.cli.options import AnyQueue, DeploymentOptions, with_options
from flowkit.errors import ConfigError, UnknownTask
from flowkit.pictures.formats import SUFFIXES, Format, draw
from flowkit.pictures.model import make_picture
from flowkit.pictures.text import COLUMNS, to_text
from flowkit.reading.graphs import view_graph, view_nodes
from flowkit.text import one_line, shell_command, shown_path
from flowkit.validation import arguments
from flowkit.validation.documents import VALUE_SUFFIXES

if TYPE_CHECKING:
    from flowkit.pictures.model import Picture

_STDOUT = "-"


@with_options
def graph(
    source: Annotated[
        str,
        typer.Argument(
            metavar="TASK|GRAPH",
            help="Id of a task, or a graph as for `run`: JSON or YAML file (- reads stdin), or flow as module:flow.",
        ),
    ],
    form: Annotated[
        Format | None,
        typer.Option(
            "--format",
            "-f",
            help="Format of the picture. Default: text, or with --output what the end of the file's name says.",
        ),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="File to write. Default: print the picture."),
    ] = None,
    is_task: Annotated[
        bool, typer.Option("--task", help="The argument is the id of a task, even if a file has this name.")
    ] = False,
    *,
    where: AnyQueue,
) -> None:
    """Draw a graph, with the states of its nodes if it is that of a task.

    A file needs no servers. `svg` and `png` need Graphviz or Chromium; the other formats need nothing.
    """
    target = None if file in (None, _STDOUT) else Path(file)
    if target is not None:
        _check_target(target, source)
    chosen = _choose_format(form, target)
    picture = asyncio.run(_read_task(source, where)) if is_task or _is_task(source) else _read_file(source)
    if target is not None:
        _write_file(target, draw(picture, chosen))
        output.note(f"wrote {target}")
    elif chosen is Format.TEXT:
        print_picture(picture)
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(draw(picture, chosen))


def print_picture(picture: Picture) -> None:
    """Print a picture as text, in the width of the terminal."""
    console = output.console()
    output.echo(to_text(picture, console.width if console.is_terminal else COLUMNS))


def _choose_format(form: Format | None, target: Path | None) -> Format:
    """Return the format. Raise ConfigError if it is not known, or binary for a terminal."""
    if target is None:
        if form is Format.PNG and sys.stdout.isatty():
            problem = ConfigError("--format png is binary, and stdout is a terminal")
            raise add_remedy(problem, "write it to a file, for example with -o graph.png")
        return form or Format.TEXT
    known = form or SUFFIXES.get(target.suffix.lower())
    if known is None:
        problem = ConfigError(f"--output {shown_path(str(target))!r}: the end of its name is no known format")
        raise add_remedy(problem, f"end it in {', '.join(SUFFIXES)}, or give --format")
    return known


def _check_target(target: Path, source: str) -> None:
    """Raise ConfigError if a picture cannot be written there."""
    what = f"--output {shown_path(str(target))!r}"
    if target.is_dir():
        raise add_remedy(ConfigError(f"{what} is a folder"), "name a file in it")
    if target.exists() and not target.is_file():
        problem = ConfigError(f"{what} is no regular file")
        raise add_remedy(problem, "leave --output out, and redirect stdout")
    if not target.parent.is_dir():
        raise add_remedy(ConfigError(f"{what}: there is no folder {str(target.parent)!r}"), "create it")
    if target.exists() and os.path.exists(source) and target.samefile(source):
        raise add_remedy(ConfigError(f"{what} is the graph itself"), "name another file")


def _is_task(source: str) -> bool:
    """Return whether an argument is the id of a task: no file, no name of a JSON or YAML file, and no flow."""
    if source == "-" or source.lower().endswith(VALUE_SUFFIXES) or os.path.isfile(source):
        return False
    return not is_python_file(source) and not (is_flow_name(source) and module_exists(source))


def _read_file(path: str) -> Picture:
    task = read_task(path)
    return make_picture(view_nodes(task.checked(params_given=bool(task.params))))


async def _read_task(task_id: str, where: DeploymentOptions) -> Picture:
    """Return the picture of a task with the states of its nodes. Raise UnknownTask if it does not exist."""
    arguments.require(arguments.task_id_problem(task_id, "TASK"))
    from flowkit.cli.servers import servers
    from flowkit.reading.state import TaskReader

    async with servers(where) as both:
        try:
            reader = await TaskReader.at(both, task_id)
        except UnknownTask as error:
            if pending := await both.tasks.find_pending(task_id):
                problem = ConfigError(f"task {task_id!r} has not started: {pending.text}")
                raise add_remedy(problem, "draw it once it runs, or draw its file") from None
            remedy = "run `flowkit list` to see the existing tasks, or give the path of a JSON or YAML file"
            raise add_remedy(error, remedy) from None
        view = await reader.view()
        document = await both.catalog.document(task_id)
    if document is None:
        missing = UnknownTask(task_id, f"task {task_id!r} has no document yet")
        raise add_remedy(missing, f"`{shell_command('flowkit status', task_id)}` shows what it waits for")
    return make_picture(view_graph(document["graph"]), {node.node_id: node for node in view.nodes})


def _write_file(target: Path, content: bytes) -> None:
    """Replace a file atomically, or the file to which a link leads. Raise ConfigError if it cannot be written."""
    path = target.resolve()
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        beside.write_bytes(content)
        os.replace(beside, path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        problem = ConfigError(f"--output {shown_path(str(target))!r} cannot be written: {one_line(error)}")
        raise add_remedy(problem, "name a file in a folder that you may write") from None
