"""The JSON Schema of a graph, for editors and other tools, from the rows by which validation checks it.

The schema accepts every graph that is structurally valid. It cannot express sizes or relations between nodes
(unknown parents, cycles, counts); `flowkit validate` checks those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowkit.graph.engine_nodes import SETTINGS
from flowkit.graph.fields import GRAPH, NODE
from flowkit.graph.kinds import Field, ValueKind, allow_null, by_name, object_schema
from flowkit.models import APPROVAL, DELAY, RUNTIME_KEYS

if TYPE_CHECKING:
    from flowkit.graph.kinds import Schema

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_NULL: Schema = {"type": "null"}


def graph_schema() -> Schema:
    """Return the JSON Schema of a graph that `create_task` accepts."""
    properties = {name: field.schema for name, field in GRAPH.items()}
    return {
        "$schema": _DRAFT,
        "title": "FlowKit graph",
        "type": "object",
        "required": ["nodes"],
        "properties": {**properties, "nodes": {**properties["nodes"], "items": _node_schema()}},
    }


def _node_schema() -> Schema:
    written = {key: {"description": "Written by an engine; ignored."} for key in sorted(RUNTIME_KEYS)}
    own = {**NODE.schema, "properties": {**NODE.schema["properties"], **written}}
    return {**own, "allOf": [_approval_schema(), _delay_schema()]}


def _approval_schema() -> Schema:
    return _engine_node_schema(APPROVAL, allow_null(_settings_schema(APPROVAL)))


def _delay_schema() -> Schema:
    one = [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in SETTINGS[DELAY]]
    described = _engine_node_schema(DELAY, {**_settings_schema(DELAY), "oneOf": one})
    described["then"]["required"] = ["io"]
    described["then"]["properties"]["io"] |= {"type": "object", "required": ["input_inline"]}
    return described


def _settings_schema(kind: str) -> Schema:
    """Return the schema of the settings of an engine node. Another key may only be null."""
    return object_schema(SETTINGS[kind], additionalProperties=_NULL)


def _engine_node_schema(kind: str, inline: Schema) -> Schema:
    """Return what holds for a node of this type: it has no attempts, and takes only `io.input_inline`."""
    own = by_name(Field("input_inline", ValueKind(schema=inline), nullable=False))
    io = object_schema(own, additionalProperties=_NULL)
    return {
        "if": {"properties": {"type": {"const": kind}}},
        "then": {"properties": {"io": allow_null(io), "retry_policy": _NULL, "timeout_sec": _NULL}},
    }
