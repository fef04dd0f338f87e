"""Check the graph of a flow, and name the lines of the program that its problems concern.

Beside what the graph itself must fulfil, expressions are checked against the types of params and variables, the items
of `maps` against the type of the list, and inputs against what the handlers read.
"""

from __future__ import annotations

import ast
import re
import types
from collections.abc import Collection, Mapping
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, TypeAdapter

from flowkit.activities.contracts import check_contracts, reads_own_input
from flowkit.activities.handlers import prepares_input
from flowkit.activities.hook_calls import RESERVED
from flowkit.errors import AdapterError, BadCondition, GraphError
from flowkit.flow.specs import walk_places
from flowkit.flow.values import Cel
from flowkit.graph import cel
from flowkit.graph.contracts import CONVERTS
from flowkit.graph.expressions import MAP_OVER, find_expressions, is_expression
from flowkit.graph.submission import validate_input
from flowkit.models.graphs import FAILED_NODES_KEY
from flowkit.text import add_caret, names, one_line, printable, printed, suggestion, truncate
from flowkit.validation.invalid import place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from flowkit.activities.handlers import RoleHandler
    from flowkit.flow.nodes import FlowNode
    from flowkit.flow.places import Place
    from flowkit.models import Graph, Node

    Schema = dict[str, Any]
    Found = tuple[str, str, str]
    """The id of a node, the path of a part of it, and what is wrong there."""
    from flowkit.validation.invalid import InvalidValue

HERE = "this-flow"
"""Placeholder for the task id while only the graph is checked."""

_KNOWN_PARAMS = ("pipeline_name", "priority")
"""Params that FlowKit reads itself, whatever the type of the params is."""
_ENOUGH = 11
_PROBLEM_CHARS = 300

_ID = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_NODE_PROBLEM = re.compile(rf"node {_ID}(?:: ([a-z_]+[a-z_.]*)?| (pulls) from )")
_EDGE_PROBLEM = re.compile(rf"graph\.edges_ex {_ID} -> {_ID}: ")
_PLAIN_PATH = re.compile(rf"{cel.PARAMS}((?:\.[A-Za-z_][A-Za-z0-9_]*)+)")
_UNKNOWN_TYPE: Any = object()


def check_graph(
    graph: dict[str, Any],
    place: Place,
    nodes: Sequence[FlowNode[Any, Any]],
    handlers: Mapping[str, RoleHandler[Any, Any]],
    functions: Mapping[str, Callable[..., Any]],
    params: Any,
    variables: Any,
) -> None:
    """Raise GraphError, whose problems name lines, if the graph of a flow is not valid.

    `place` is the line of the flow itself; `params` and `variables` are types, or None if they are not known.
    """
    by_id = {node.node_id: node for node in nodes}
    try:
        parsed = validate_input(HERE, {"params": {}, "graph": graph})
    except GraphError as error:
        raise type(error)([_locate(problem, by_id, place) for problem in error.problems]) from None
    if unfit := check_contracts(parsed, handlers):
        raise GraphError([_locate(problem, by_id, place) for problem in unfit])
    schemas = {root: TypeAdapter(kind).json_schema() for root, kind in _known_roots(params, variables)}
    problems = chain(
        _find_problems(parsed, by_id, handlers, schemas, params), _function_problems(parsed, functions)
    )
    found = [*islice(problems, _ENOUGH)]
    if found:
        raise GraphError([_name_line(by_id[node_id], path, text, place) for node_id, path, text in found])


def _known_roots(params: Any, variables: Any) -> Iterator[tuple[str, Any]]:
    if params is not None:
        yield cel.PARAMS, params
    if variables is not None:
        yield cel.VARS, variables


def _find_problems(
    parsed: Graph,
    nodes: Mapping[str, FlowNode[Any, Any]],
    handlers: Mapping[str, RoleHandler[Any, Any]],
    schemas: Mapping[str, Schema],
    params: Any,
) -> Iterator[Found]:
    for node in parsed.nodes:
        given = nodes[node.node_id]
        for path, text in _list_expressions(node):
            where = (
                f"the edge from {path.partition('.')[2]!r}: when" if path.startswith("edges_ex.") else path
            )
            yield from (
                (node.node_id, path, f"{where}: {problem}") for problem in _access_problems(text, schemas)
            )
        if node.map is not None:
            items = given.mapped_type or _find_item_type(node, handlers.get(node.type))
            if problem := _differing_items(params, node.map.over, items):
                yield node.node_id, MAP_OVER, problem
        if given.handler is not None:
            yield from _input_problems(node, handlers[node.type])


def _find_item_type(node: Node, handler: RoleHandler[Any, Any] | None) -> Any:
    """Return the type of the items that a handler reads, one by one or in lists; None if it is not known."""
    kind = None if handler is None else handler.input_type
    if node.map is None or node.map.batch_size == 1:
        return kind
    return next(iter(get_args(kind)), None)


def _name_line(node: FlowNode[Any, Any], path: str, problem: str, flow: Place) -> str:
    place = next(walk_places(node.spec, path), flow)
    return f"{place}: node {node.node_id!r}: {problem}"


def _locate(problem: str, nodes: Mapping[str, FlowNode[Any, Any]], flow: Place) -> str:
    """Return a problem of the graph with the line that it concerns: that of the part, of the node, or of the flow."""
    node, path = None, ""
    if edge := _EDGE_PROBLEM.match(problem):
        parent, child = map(ast.literal_eval, edge.groups())
        node, path = nodes.get(child), f"edges_ex.{parent}"
    elif match := _NODE_PROBLEM.match(problem):
        path = "input_args" if match[3] else (match[2] or "").rstrip(".")
        node = nodes.get(ast.literal_eval(match[1]))
    place = flow if node is None else next(walk_places(node.spec, path), flow)
    return f"{place}: {problem}"


# --- expressions -----------------------------------------------------------------------------------------------------


def _list_expressions(node: Node) -> Iterator[tuple[str, str]]:
    """Yield the expressions of a node, each with the path of what it is for."""
    if node.when is not None:
        yield "when", node.when
    for parent, text in node.edge_when.items():
        yield f"edges_ex.{parent}", text
    yield from node.expressions


def _access_problems(text: str, schemas: Mapping[str, Schema]) -> Iterator[str]:
    """Yield the params and variables that an expression reads although their types do not have them."""
    if not schemas:
        return
    try:
        accesses = cel.compile_value(text).accesses
    except BadCondition:  # a condition may give what a value must not give
        accesses = cel.compile_expression(text).accesses
    for access in accesses:
        schema = schemas.get(access.root)
        if schema is None or (
            access.root == cel.PARAMS and access.path[:1] in [(key,) for key in _KNOWN_PARAMS]
        ):
            continue
        if (unknown := _find_unknown(schema, access.path, schema)) is not None:
            place, known = unknown
            owner = ".".join((access.root, *access.path[:place]))
            name = access.path[place]
            hint = suggestion(name, known) or f"; it has {names(sorted(known))}"
            yield add_caret(f"{owner} has no {printed(name)}{hint}", text, access.position)


def _find_unknown(
    schema: Schema, path: tuple[str, ...], root: Schema, place: int = 0
) -> tuple[int, list[str]] | None:
    """Return the place in `path` of the first key that a schema does not have, and the keys that it has there.

    None if it has them all, or if the schema does not say.
    """
    if place == len(path):
        return None
    if "$ref" in schema:
        return _find_unknown(_resolve(schema["$ref"], root), path, root, place)
    branches = [
        each for key in ("anyOf", "oneOf") for each in schema.get(key, ()) if each.get("type") != "null"
    ]
    if branches:
        found = [_find_unknown(each, path, root, place) for each in branches]
        return None if None in found else found[0]
    more = schema.get("additionalProperties", "properties" not in schema)
    properties: Schema = schema.get("properties", {})
    if path[place] in properties:
        return _find_unknown(properties[path[place]], path, root, place + 1)
    if isinstance(more, dict):
        return _find_unknown(more, path, root, place + 1)
    return None if more else (place, list(properties))


def _resolve(reference: str, root: Schema) -> Schema:
    """Return the definition to which a reference leads; one that allows everything if it leads elsewhere."""
    found: Any = root
    for key in reference.removeprefix("#/").split("/"):
        found = found.get(key, {}) if isinstance(found, dict) else {}
    return found if isinstance(found, dict) else {}


# --- inputs ----------------------------------------------------------------------------------------------------------


def _input_problems(node: Node, handler: RoleHandler[Any, Any]) -> Iterator[Found]:
    """Yield how the input of a node differs from what its handler reads from it."""
    schemas = list(_list_input_schemas(node, handler))
    if not schemas:
        return
    inline = {key: value for key, value in (node.io.input_inline or {}).items() if key not in RESERVED}
    properties = {name: (sub, each) for each in schemas for name, sub in each.get("properties", {}).items()}
    reader = f"handler {type(handler).__name__}"
    is_open = any(each.get("additionalProperties") or "properties" not in each for each in schemas)
    for name, value in inline.items():
        path = f"io.input_inline.{name}"
        if name in properties:
            yield from (
                (node.node_id, path, text) for text in _value_problems(name, value, *properties[name])
            )
        elif not is_open and not name.startswith("x-"):
            hint = suggestion(name, properties) or f"; it reads {names(sorted(properties)) or 'nothing'}"
            yield node.node_id, path, f"{reader} reads no input {printed(name)}{hint}"
    required = [name for each in schemas for name in each.get("required", [])]
    for name in required:
        if name not in inline and name != FAILED_NODES_KEY:
            yield (
                node.node_id,
                "io.input_inline",
                f"{reader} requires the input {printed(name)}; give it with input({name}=…)",
            )


def _list_input_schemas(node: Node, handler: RoleHandler[Any, Any]) -> Iterator[Schema]:
    """Yield the JSON Schemas that `input_inline` of a node must fit: that of the item, and that of the parameters."""
    if reads_own_input(node, handler) and (schema := handler.input_schema()) is not None:
        yield schema
    schema = handler.parameters_schema()
    if handler.is_source:
        if not prepares_input(handler):
            yield schema or {"properties": {}}
    elif schema is not None:
        yield schema


def _value_problems(name: str, value: Any, schema: Schema, root: Schema) -> Iterator[str]:
    """Yield why a value does not fit its schema.

    What contains an expression is known only when the task runs, and code of the user may convert any value.
    """
    from jsonschema import Draft202012Validator

    if (
        find_expressions({"input_inline": {"value": value}})
        or _converts(schema)
        or _converts(root.get("$defs"))
    ):
        return
    checked = Draft202012Validator({**schema, "$defs": root.get("$defs", {})})
    for error in islice(checked.iter_errors(value), 1):
        shown = truncate(printable(one_line(error.message)), _PROBLEM_CHARS)
        yield f"input {name!r} is {printed(value)}: {shown}"


def _converts(schema: Any) -> bool:
    """Return whether a part of a schema allows values of another form, which code of the user converts."""
    if isinstance(schema, list):
        return any(map(_converts, schema))
    return isinstance(schema, dict) and (bool(schema.get(CONVERTS)) or any(map(_converts, schema.values())))


def _function_problems(parsed: Graph, functions: Mapping[str, Callable[..., Any]]) -> Iterator[Found]:
    """Yield how the arguments of function nodes differ from the parameters of the program's functions."""
    if not functions:
        return
    from flowkit.activities.function_attempt import (
        check_arguments,
        has_parameter,
    )  # loads the database driver

    for node in parsed.nodes:
        function = functions.get(node.io.fn or "")
        if function is None:
            continue
        optional: dict[str, Any] = {FAILED_NODES_KEY: []} if has_parameter(function, FAILED_NODES_KEY) else {}
        try:
            check_arguments(str(node.io.fn), function, HERE, {**optional, **(node.io.fn_args or {})})
        except AdapterError as error:
            yield node.node_id, "io.fn_args", str(error)


def find_secret(schema: Any, name: str = "params") -> str | None:
    """Return the name of a field in the JSON Schema of a type whose JSON hides the value, such as a SecretStr."""
    if isinstance(schema, list):
        return next((found for each in schema if (found := find_secret(each, name)) is not None), None)
    if not isinstance(schema, dict):
        return None
    if schema.get("writeOnly") is True:
        return name
    parts = [(name, each) for key, each in schema.items() if key != "properties"]
    parts += (schema.get("properties") or {}).items()
    return next((found for key, each in parts if (found := find_secret(each, key)) is not None), None)


def params_problem(found: InvalidValue) -> str:
    """Return what is wrong with a value in params, in one sentence with the place and the value."""
    if is_expression(found.given) or isinstance(found.given, Cel):
        remedy = "pass the graph and these params to Schedules.create, which adds the default values"
        place = place_of(found.path, "params")
        return f"{place} is an expression, which only the tasks of a schedule evaluate: {remedy}"
    return found.text("params")


def _differing_items(params: Any, over: str, items: Any) -> str | None:
    """Return how the items of a list in params differ from the type with which a node maps them.

    None if they fit, or if their type is not known. `params` and `items` are None if they are not known.
    """
    match = _PLAIN_PATH.fullmatch(over.strip())
    if match is None or params is None or items is None:
        return None
    kind = _strip(_find_type(params, match[1].split(".")[1:]))
    if kind is _UNKNOWN_TYPE or kind is Any:
        return None
    found = _find_items(kind)
    if found is None:
        return f"map.over {over!r} is {_name(kind)}, not a list"
    if found is _UNKNOWN_TYPE or _fits(_strip(found), items):
        return None
    return f"map.over {over!r} has items of the type {_name(found)}, but the node reads {_name(items)}"


def _find_type(kind: Any, path: list[str]) -> Any:
    for key in path:
        kind = _find_field(_strip(kind), key)
    return kind


def _find_field(kind: Any, key: str) -> Any:
    if not isinstance(kind, type):
        return _UNKNOWN_TYPE
    if issubclass(kind, BaseModel):
        fields = {info.alias or name: info.annotation for name, info in kind.model_fields.items()}
        return fields.get(key, _UNKNOWN_TYPE)
    try:
        return get_type_hints(kind).get(key, _UNKNOWN_TYPE)
    except (NameError, TypeError):
        return _UNKNOWN_TYPE


def _strip(kind: Any) -> Any:
    """Return a type without its annotations, and without None."""
    if get_origin(kind) is Annotated:
        return _strip(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        others = [each for each in get_args(kind) if each is not type(None)]
        return _strip(others[0]) if len(others) == 1 else _UNKNOWN_TYPE
    return kind


def _find_items(kind: Any) -> Any:
    """Return the type of the items of a list; None if the type is no list."""
    origin, arguments = get_origin(kind), get_args(kind)
    if not isinstance(origin or kind, type):
        return _UNKNOWN_TYPE
    if not issubclass(origin or kind, Collection) or issubclass(origin or kind, (str, bytes, Mapping)):
        return None
    if not arguments or (origin is tuple and arguments[1:] != (...,)):
        return _UNKNOWN_TYPE
    return arguments[0]


def _fits(found: Any, wanted: Any) -> bool:
    """Return whether items of one type may be read as another one; True if that is not known."""
    if not isinstance(found, type) or not isinstance(wanted, type) or found is wanted:
        return True
    if get_origin(found) is not None or get_origin(wanted) is not None:
        return True
    return issubclass(found, wanted) or wanted in (dict, object) or (found, wanted) == (int, float)


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and get_origin(kind) is None else str(kind)
