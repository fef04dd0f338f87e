"""`flowkit validate` and `flowkit schema`, which need no server."""

from typing import Annotated

import typer

from flowkit.cli import output
from flowkit.cli.errors import Exit, shown_problems
from flowkit.cli.inputs import read_task
from flowkit.cli.options import AsJson, Verbose
from flowkit.errors import GraphError
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
    warnings: list[str] = []
    nodes = 0
    try:
        task = read_task(graph)
        warnings = task.warnings()
        nodes = len(task.graph["nodes"])
    except GraphError as error:
        problems = shown_problems(error)
    valid = not problems and not (strict and warnings)
    if as_json:
        output.document({"valid": valid, "problems": problems, "warnings": warnings})
    else:
        _print_result(graph, nodes, problems, warnings, strict)
    raise typer.Exit(Exit.OK if valid else Exit.USAGE)


def _print_result(path: str, nodes: int, problems: list[str], warnings: list[str], strict: bool) -> None:
    for warning in warnings:
        (output.error if strict else output.warn)(warning)
    for problem in problems:
        output.error(problem)
    if not problems and not (strict and warnings):
        output.echo(f"{'stdin' if path == '-' else path} is valid: {nodes} node{'' if nodes == 1 else 's'}")


def schema() -> None:
    """Print the JSON Schema of a graph (draft 2020-12), for editors and other tools."""
    output.document(graph_schema())
