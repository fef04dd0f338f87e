"""`flowkit validate` and `flowkit schema`, which need no server."""

import asyncio
from typing import Annotated, Any

import typer

from flowkit.cli import output
from flowkit.cli.errors import Exit, add_remedy, shown_problems
from flowkit.cli.json_files import read_task
from flowkit.cli.options import (
    AsJson,
    DeploymentOptions,
    Verbose,
    with_options,
)
from flowkit.cli.tasks.picture import print_picture
from flowkit.errors import ConfigError, GraphError
from flowkit.graph.description import describe, describe_graph
from flowkit.graph.validation import raise_if
from flowkit.models import Graph
from flowkit.pictures.model import make_picture
from flowkit.reading.graphs import view_nodes
from flowkit.schema import graph_schema
from flowkit.text import count_of

GraphFile = Annotated[
    str,
    typer.Argument(
        metavar="GRAPH",
        help="JSON or YAML file with a graph, or with params and graph (- reads stdin), or a flow as module:flow.",
    ),
]


@with_options
def validate(
    graph: GraphFile,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as errors.")] = False,
    picture: Annotated[
        bool, typer.Option("--picture", help="Draw a valid graph, instead of listing its nodes.")
    ] = False,
    handlers: Annotated[
        list[str] | None,
        typer.Option(
            "--handler",
            "--handlers",
            help="Handler of a role, as module:CLASS or module:object, whose types must fit those of the handlers "
            "from which it pulls. Can be repeated.",
        ),
    ] = None,
    as_json: AsJson = False,
    *,
    where: DeploymentOptions,
    verbose: Verbose = False,
) -> None:
    """Check a graph, with the same rules and messages as `run`. Needs no servers.

    With --handler, also check that the output of each handler fits the input of those that pull it. If the servers
    run, it also names the roles that no worker has ever polled, and roles of running workers that do not fit.
    """
    if picture and as_json:
        raise add_remedy(ConfigError("--picture and --json exclude each other"), "leave one of them out")
    problems: list[str] = []
    hints: list[str] = []
    checked: Graph | None = None
    try:
        task = read_task(graph)
        checked = task.checked(params_given=bool(task.params))
        raise_if(task.locate(_check_contracts(checked, handlers or [])))
        hints = task.locate(_find_hints(task.graph, checked, where))
    except GraphError as error:
        problems = shown_problems(error)
    warnings = list(checked.warnings) if checked else []
    valid = not problems and not (strict and warnings)
    if as_json:
        output.document(
            {
                "valid": valid,
                "problems": problems,
                "warnings": warnings,
                "hints": hints,
                **_describe_as_json(checked),
            }
        )
    else:
        for warning in warnings:
            (output.error if strict else output.warn)(warning)
        for problem in problems:
            output.error(problem)
        if checked and valid:
            _print_graph(graph, checked, picture=picture)
        for hint in hints:
            output.warn(hint)
    raise typer.Exit(Exit.OK if valid else Exit.USAGE)


def _check_contracts(graph: Graph, names: list[str]) -> list[str]:
    if not names:
        return []
    from flowkit.activities.contracts import check_contracts
    from flowkit.cli.loading import load_handlers

    return check_contracts(graph, load_handlers(names))


def _find_hints(graph: dict[str, Any], checked: Graph, where: DeploymentOptions) -> list[str]:
    from flowkit.cli.tasks.operations import find_hints

    return asyncio.run(find_hints(graph, checked, where))


def _describe_as_json(graph: Graph | None) -> dict[str, Any]:
    """Return the description of a valid graph for programs."""
    if graph is None:
        return {"nodes": []}
    properties = {key: value for each in describe_graph(graph) for key, value in each.fields.items()}
    return {**properties, "nodes": [node.as_json for node in describe(graph)]}


def _print_graph(path: str, graph: Graph, *, picture: bool) -> None:
    nodes = len(graph.nodes)
    output.echo(f"{'stdin' if path == '-' else path} is valid: {count_of(nodes, 'node')}")
    for each in describe_graph(graph):
        output.echo(each.text)
    from flowkit.cli.tasks.display import graph_table

    console = output.console()
    console.print()
    if picture:
        return print_picture(make_picture(view_nodes(graph)))
    console.print(graph_table(describe(graph), wide=console.is_terminal))
    return None


def schema() -> None:
    """Print the JSON Schema of a graph (draft 2020-12), for editors and other tools."""
    output.document(graph_schema())
