"""Check the input of a new task in the client, before it starts the workflow. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticSerializationError, to_jsonable_python

from flowkit import limits
from flowkit.errors import GraphError
from flowkit.graph.conditions import condition_problems
from flowkit.graph.document_size import document_problem, external_problem
from flowkit.graph.external_roles import external_warnings
from flowkit.graph.task_input import parse_input
from flowkit.graph.validation import parse_graph, raise_if
from flowkit.storable import storage_problems
from flowkit.text import clean, shorten

if TYPE_CHECKING:
    from collections.abc import Collection

    from flowkit.graph.task_input import NewTask
    from flowkit.models import Graph

_REASON_CHARS = 300


def checked(
    task_id: str,
    given: object,
    *,
    max_nodes: int | None = limits.MAX_NODES,
    external_roles: Collection[str] = (),
) -> Graph:
    """Return the validated graph of a new task. Its warnings include those about nodes of `external_roles`.

    Raise GraphError if the input is not valid or contains something that MongoDB cannot store, or if the task document
    would become too large.
    """
    new = parse_input(task_id, given)
    graph = parse_graph(new.graph, params=new.params, max_nodes=max_nodes, max_bytes=None)
    problem = external_problem(new.graph["nodes"], external_roles)
    raise_if([problem] if problem else condition_problems(new.graph, graph))
    raise_if(storage_problems({"params": new.params, "graph": new.graph}))
    raise_if(_document_problems(new, graph))
    return replace(graph, warnings=(*graph.warnings, *external_warnings(graph, external_roles)))


def _document_problems(new: NewTask, graph: Graph) -> list[str]:
    problem = document_problem(new.params, new.graph, [node.depends_on for node in graph.nodes])
    return [problem] if problem else []


def jsonable(name: str, value: Any) -> Any:
    """Return a copy of `value` in JSON types: tuples become lists, and datetimes become ISO text.

    Raise GraphError, which contains `name`, if JSON cannot represent the value.
    """
    try:
        return to_jsonable_python(value)
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        text = shorten(clean(str(error)), _REASON_CHARS)
        raise GraphError([f"{name} cannot be written as JSON: {text}"]) from None
