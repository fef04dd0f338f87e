"""`flowkit validate` and `flowkit schema`, which need no server."""

from typing import Annotated

import typer

from flowkit.cli import output
from flowkit.cli.errors import Exit, shown_problems
from flowkit.cli.inputs import read_task
from flowkit.cli.options import AsJson, Verbose
from flowkit.errors import GraphError
from flowkit.models import Graph
from flowkit.schema import graph_schema

GraphFile = Annotated[
    str,
    typer.Argument(metavar="GRAPH", help="JSON file with a graph, or with params and graph; - reads stdin."),
]


def validate(
    graph: GraphFile,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as errors.")] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Check a graph without servers, with the same rules and messages as `run`."""
    problems: list[str] = []
    checked: Graph | None = None
    try:
        checked = read_task(graph).checked()
    except GraphError as error:
        problems = shown_problems(error)
    warnings = list(checked.warnings) if checked else []
    valid = not problems and not (strict and warnings)
    if as_json:
        output.document(
            {"valid": valid, "problems": problems, "warnings": warnings, "routes": _routes(checked)}
        )
    else:
        for warning in warnings:
            (output.error if strict else output.warn)(warning)
        for problem in problems:
            output.error(problem)
        if checked and valid:
            _print_graph(graph, checked)
    raise typer.Exit(Exit.OK if valid else Exit.USAGE)


def _routes(graph: Graph | None) -> dict[str, dict[str, list[str]]]:
    """Return the targets of each node that routes, without lists that FlowKit ignores."""
    routers = [node for node in (graph.nodes if graph else ()) if node.on_success or node.on_failure]
    return {
        node.node_id: {"on_success": list(node.on_success), "on_failure": list(node.on_failure)}
        for node in routers
    }


def _print_graph(path: str, graph: Graph) -> None:
    nodes = len(graph.nodes)
    output.echo(f"{'stdin' if path == '-' else path} is valid: {nodes} node{'' if nodes == 1 else 's'}")
    for router, lists in _routes(graph).items():
        shown = [f"{key} starts {', '.join(targets)}" for key, targets in lists.items() if targets]
        output.echo(f"  {router}: {'; '.join(shown)}")


def schema() -> None:
    """Print the JSON Schema of a graph (draft 2020-12), for editors and other tools."""
    output.document(graph_schema())
