"""What typed handlers announce about their input and output, and whether the handlers of a graph fit each other.

`Flow.to_dict` imports this module, so it loads the driver of MongoDB only to announce.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import logging
import textwrap
import typing
from typing import TYPE_CHECKING, Any, cast

from pydantic.errors import PydanticErrorMixin

from flowkit.activities.handlers import prepares_input
from flowkit.activities.hook_calls import RESERVED
from flowkit.core.user_code import contained, error_text, shorten_path
from flowkit.errors import ConfigError
from flowkit.graph.contracts import Contract, data_edges, find_unfit, takes_objects, type_name
from flowkit.graph.expressions import is_expression
from flowkit.text import names, one_line, printed, truncate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from flowkit.activities.handlers import RoleHandler
    from flowkit.adapters.worker_registry import AnnouncedContract
    from flowkit.graph.contracts import Schema, Unfit
    from flowkit.models import Graph, Node

_logger = logging.getLogger("flowkit.worker")

SCHEMA_BYTES = 64 * 1024
"""Largest JSON of a schema that a process announces."""
PROCESS_BYTES = 2 * 1024 * 1024
"""Largest JSON of all schemas that a process announces: they are in one row of `worker_registry`."""
_HASH_CHARS = 12
_REASON_CHARS = 300


def contract_of(handler: RoleHandler) -> Contract:
    """Return the schemas of a handler. Raise what its methods raise."""
    with contained:
        taken, returned = handler.input_schema(), handler.output_schema()
        return Contract(input=taken, output=returned, is_source=handler.is_source)


def announce(handlers: Mapping[str, RoleHandler]) -> dict[str, AnnouncedContract]:
    """Return what a process announces about its typed roles. Log what it leaves out, and why."""
    announced: dict[str, AnnouncedContract] = {}
    room = PROCESS_BYTES
    for role, handler in handlers.items():
        given = _encode(role, "input", handler.input_schema), _encode(role, "output", handler.output_schema)
        size = sum(len(each.encode()) for each in given)
        if size > room:
            _logger.warning(
                "role %s announces no schemas: those of all roles of this process exceed %d bytes of JSON, "
                "with which FlowKit would check edges at submission",
                *(role, PROCESS_BYTES),
            )
        elif size:
            room -= size
            announced[role] = _announcement(*given, is_source=handler.is_source)
    return announced


def _announcement(taken: str, returned: str, *, is_source: bool) -> AnnouncedContract:
    from flowkit.adapters.worker_registry import AnnouncedContract

    known = f"{is_source}\n{taken}\n{returned}".encode()
    digest = hashlib.sha256(known).hexdigest()[:_HASH_CHARS]
    return AnnouncedContract(input=taken, output=returned, digest=digest, is_source=is_source)


def _encode(role: str, what: str, read: Callable[[], Schema | None]) -> str:
    """Return the JSON of a schema; empty if there is none, or if the process must not announce it."""
    try:
        text = _read(read)
        size = len(text.encode())
        if size > SCHEMA_BYTES:
            raise ConfigError(f"it has {size:,} bytes of JSON, more than {SCHEMA_BYTES:,}")
    except ConfigError as error:
        _logger.warning(
            "role %s announces no schema of its %s, so no edge is checked against it at submission: %s",
            *(role, what, error),
        )
        return ""
    return text


def _read(read: Callable[[], Schema | None]) -> str:
    try:
        with contained:
            schema = read()
        text = "" if schema is None else json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        text.encode()
    except Exception as error:
        # The text of pydantic's own errors also has an address, of the pages about this version.
        text = error.message if isinstance(error, PydanticErrorMixin) else error_text(error)
        reason = truncate(one_line(text), _REASON_CHARS)
        raise ConfigError(f"it cannot be made: {reason}") from error
    return text


def check_contracts(graph: Graph, handlers: Mapping[str, RoleHandler]) -> list[str]:
    """Return a problem for each pair of roles in a graph whose types do not fit, and for each node that gets its own
    input, but reads an item that is no object; `handlers` are by role.

    Roles without a handler, and handlers without types, fit. A problem of a pair names the edge, the fields with both
    JSON types, and the places of both types in the source.
    """
    edges = data_edges(graph)
    own = [
        node for node in graph.nodes if node.type in handlers and reads_own_input(node, handlers[node.type])
    ]
    roles = {role for edge in edges for role in edge.roles if role in handlers} | {node.type for node in own}
    contracts = {role: [contract_of(handlers[role])] for role in roles}
    unfit = [_describe(each, handlers) for each in find_unfit(edges, contracts)]
    return unfit + [
        _describe_own(node, taken)
        for node in own
        if (taken := contracts[node.type][0].input) is not None and not takes_objects(taken)
    ]


def reads_own_input(node: Node, handler: RoleHandler) -> bool:
    """Return whether the item of a node is its `io.input_inline`."""
    adapter = (node.io.input_inline or {}).get("input_adapter")
    gets_batches = node.pulls or node.map is not None or is_expression(adapter)
    return not (gets_batches or handler.is_source or prepares_input(handler))


def _describe_own(node: Node, taken: Schema) -> str:
    given = sorted((node.io.input_inline or {}).keys() - RESERVED)
    fields = f", {names(given)}" if given else ""
    return (
        f"node {printed(node.node_id)}: role {printed(node.type)} reads {type_name(taken)}, but the node neither pulls "
        "nor has a map, so its item is its io.input_inline, an object: let it pull from a node or map a list, or let "
        f"the role read a model with the fields of the input{fields}"
    )


def _describe(unfit: Unfit, handlers: Mapping[str, RoleHandler]) -> str:
    field = unfit.mismatches[0].path.replace("[]", "").lstrip(".").partition(".")[0]
    source, target = handlers[unfit.edge.source_role], handlers[unfit.edge.role]
    return unfit.describe(
        _find_place(source, source.output_type, field), _find_place(target, target.input_type, field)
    )


def _find_place(handler: RoleHandler, kind: object, field: str) -> str:
    """Return where the type of a handler is defined, or else the handler: `pipeline.py:12`. Empty if unknown."""
    function = inspect.unwrap(cast("Callable[..., Any]", handler))
    owner = function if inspect.isfunction(function) else type(handler)
    return next(filter(None, (_place(each, field) for each in (*_classes(kind), owner))), "")


def _classes(kind: Any) -> Iterator[type]:
    """Yield the classes in a type: `Page` of `list[Page]`."""
    members = typing.get_args(kind)
    if isinstance(kind, type) and not members:
        yield kind
    for each in members:
        yield from _classes(each)


def _place(found: Any, field: str) -> str:
    """Return the file and the line of a class, of the given field of it, or of a function. Empty if unknown."""
    if found.__module__.partition(".")[0] == "flowkit":
        return ""
    try:
        path, (lines, first) = inspect.getsourcefile(found), inspect.getsourcelines(found)
        [body] = ast.parse(textwrap.dedent("".join(lines))).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return ""
    fields = body.body if isinstance(body, ast.ClassDef) else []
    own = (each.lineno for each in fields if isinstance(each, ast.AnnAssign) and _names(each.target, field))
    return f"{shorten_path(path or '')}:{first + next(own, 1) - 1}"


def _names(target: ast.expr, field: str) -> bool:
    return isinstance(target, ast.Name) and target.id == field
