"""The JSON Schema of a graph, for editors and other tools, built from the constants that validation uses.

The schema accepts every graph that is structurally valid. It cannot express sizes or relations between nodes
(unknown parents, cycles, counts); `flowkit validate` checks those.
"""

from __future__ import annotations

import re
from typing import Any

from flowkit import limits
from flowkit.graph import expressions, field_checks, input_adapters
from flowkit.graph.engine_nodes import DECISIONS
from flowkit.graph.params import PARAMS_SCHEMA
from flowkit.graph.routes import ROUTING_KEYS
from flowkit.graph.streams import EDGE_MODES
from flowkit.models import (
    APPROVAL,
    DELAY,
    ENGINE_TYPES,
    RESERVED_TYPES,
    RUNTIME_KEYS,
    OnNodeFailure,
    StartWhen,
    VersionPolicy,
)
from flowkit.validation.values import ELEMENT_SUFFIX, SHORTEST_SEC, YEAR_SEC

Schema = dict[str, Any]

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_END = r"(?![\s\S])"
"""Matches only at the end of the text. In some languages `$` also matches before a final line break."""

_TEXT: Schema = {"type": "string"}
_FULL_TEXT: Schema = {"type": "string", "minLength": 1}
_ANY: Schema = {}
_COUNT: Schema = {"type": "integer", "minimum": 1}
_SECONDS: Schema = {"type": "number", "minimum": 0, "maximum": YEAR_SEC}


def graph_schema() -> Schema:
    """Return the JSON Schema of a graph that `create_task` accepts."""
    pair: Schema = {"type": "array", "items": _TEXT, "minItems": 2, "maxItems": 2}
    return {
        "$schema": _DRAFT,
        "title": "FlowKit graph",
        "type": "object",
        "required": ["nodes"],
        "properties": {
            "nodes": {"type": "array", "minItems": 1, "items": _describe_node()},
            "edges": _allow_null({"type": "array", "items": pair}, "[parent, child] pairs of node ids"),
            "edges_ex": _allow_null({"type": "array", "items": _describe_extended_edge()}),
            "name": {"description": "Name of the task if params contain no pipeline_name."},
            "on_node_failure": {"enum": [mode.value for mode in OnNodeFailure]},
            "deadline_sec": _describe_time_limit("seconds from the opening of the task to its end"),
            "hold_sec": _describe_time_limit(
                "how long failures are held that wait for a decision, in seconds"
            ),
            "version_policy": {"enum": [policy.value for policy in VersionPolicy]},
            PARAMS_SCHEMA: _allow_null({"type": "object"}, "JSON Schema of the params"),
        },
    }


def _allow_null(schema: Schema, description: str | None = None) -> Schema:
    """Return `schema` extended to accept null, which means the same as an absent key."""
    kinds = schema.get("type")
    nullable = {**schema, "type": [kinds, "null"]} if kinds else {"anyOf": [schema, {"type": "null"}]}
    return nullable if description is None else {"description": description, **nullable}


def _describe_object(properties: Schema, **more: Any) -> Schema:
    """Return the schema of an object that allows only these keys and keys that start with `x-`."""
    own = {"type": "object", "properties": properties, "patternProperties": {"^x-": _ANY}}
    return {**own, "additionalProperties": False, **more}


def _describe_keys(keys: frozenset[str], schemas: dict[str, Schema]) -> Schema:
    """Return the schema of each key that validation allows. Raise KeyError if a key has no schema."""
    return {key: schemas[key] for key in sorted(keys)}


def _describe_extended_edge() -> Schema:
    properties = {"from": _TEXT, "to": _TEXT, "mode": {"enum": [*EDGE_MODES]}, "on_batch": _ANY}
    properties["when"] = _describe_when("edge")
    return {"type": "object", "required": ["from", "to"], "properties": properties}


def _describe_node() -> Schema:
    own = _describe_keys(field_checks.NODE_KEYS, _describe_node_keys())
    written = {key: {"description": "Written by an engine; ignored."} for key in sorted(RUNTIME_KEYS)}
    engine = [_describe_approval(), _describe_delay()]
    return _describe_object({**own, **written}, required=["node_id", "type"], allOf=engine)


def _describe_approval() -> Schema:
    settings = {
        "text": _allow_null({"type": "string", "maxLength": limits.APPROVAL_TEXT_CHARS}, "what to decide"),
        "default": {"enum": [*DECISIONS, None], "description": "what applies when deadline_sec passes"},
    }
    return _describe_engine_node(APPROVAL, _allow_null(_describe_settings(settings)))


def _describe_delay() -> Schema:
    moment = {"type": "string", "format": "date-time"}
    settings = {
        "sec": _describe_time_limit("how long to wait, in seconds"),
        "until": _allow_null(moment, "until when to wait, in ISO 8601 with the time zone"),
    }
    one = [{"required": [key], "properties": {key: {"not": {"type": "null"}}}} for key in settings]
    described = _describe_engine_node(DELAY, {**_describe_settings(settings), "oneOf": one})
    described["then"]["required"] = ["io"]
    described["then"]["properties"]["io"] |= {"type": "object", "required": ["input_inline"]}
    return described


def _describe_settings(settings: Schema) -> Schema:
    """Return the schema of the settings of an engine node. Another key may only be null."""
    return _describe_object(settings, additionalProperties={"type": "null"})


def _describe_engine_node(kind: str, inline: Schema) -> Schema:
    """Return what holds for a node of this type: it has no attempts, and takes only `io.input_inline`."""
    io = _describe_object({"input_inline": inline}, additionalProperties={"type": "null"})
    nothing: Schema = {"type": "null"}
    return {
        "if": {"properties": {"type": {"const": kind}}},
        "then": {"properties": {"io": _allow_null(io), "retry_policy": nothing, "timeout_sec": nothing}},
    }


def _describe_map() -> Schema:
    expression: Schema = {"type": "string", "minLength": 1, "maxLength": limits.CONDITION_CHARS}
    schemas = {
        "over": {**expression, "description": "a CEL expression that gives the list of items"},
        "batch_size": _allow_null(
            {"type": "integer", "minimum": 1, "maximum": limits.MAP_BATCH_SIZE}, "items of a batch"
        ),
        "parallel": _allow_null(
            {"type": "integer", "minimum": 1, "maximum": limits.MAX_PARALLEL},
            "number of shards that process the items together",
        ),
    }
    return _allow_null(
        _describe_object(_describe_keys(field_checks.MAP_KEYS, schemas), required=["over"]),
        "the items that the node processes in place of batches of other nodes",
    )


def _describe_quarantine() -> Schema:
    count = {"type": "integer", "minimum": 1, "maximum": limits.MAX_QUARANTINE}
    share = {"type": "string", "pattern": f"^(?:{field_checks.SHARE.pattern}){_END}"}
    schemas = {
        "attempts": _allow_null(
            {"type": "integer", "minimum": 1, "maximum": limits.BATCH_TRIES}, "tries of a batch"
        ),
        "then": {"enum": ["quarantine", None]},
        "max": _allow_null({"anyOf": [count, share]}, "how many batches may be set aside: a number, or 5%"),
    }
    described = _describe_object(_describe_keys(field_checks.QUARANTINE_KEYS, schemas))
    return _allow_null(described, "when the node sets a failed batch aside and continues")


def _describe_node_keys() -> dict[str, Schema]:
    fan_in = f"^(?:{_ignore_case(field_checks.FAN_IN.pattern)}){_END}"
    return {
        "node_id": _describe_node_id(),
        "type": {
            "type": "string",
            "pattern": f"^(?:{limits.ROLE.pattern}){_END}",
            "not": {"enum": sorted(RESERVED_TYPES - ENGINE_TYPES)},
            "description": f"A role, or one of {', '.join(sorted(ENGINE_TYPES))}.",
        },
        "depends_on": _allow_null({"type": "array", "items": _TEXT}, "ids of the parents"),
        "fan_in": _allow_null({"type": "string", "pattern": fan_in}, "all, any, all_done or count:n"),
        "io": _allow_null(_describe_object(_describe_keys(field_checks.IO_KEYS, _describe_io_keys()))),
        "retry_policy": _allow_null(_retry_policy()),
        "routing": _describe_routing(),
        "allow_failure": _allow_null({"type": "boolean"}),
        "when": _describe_when("node"),
        "timeout_sec": _describe_time_limit("time limit of one attempt, in seconds"),
        "deadline_sec": _describe_time_limit("seconds from the opening of the node's gate to its end"),
        "hold_sec": _describe_time_limit("how long a held failure waits for a decision, in seconds"),
        "hold_on_failure": _allow_null({"type": "boolean"}, "whether a failure waits for a decision"),
        "parallel": _allow_null(
            {"type": "integer", "minimum": 1, "maximum": limits.MAX_PARALLEL},
            "number of shards that process the batches of a pulling node together",
        ),
        "map": _describe_map(),
        "on_batch_failure": _describe_quarantine(),
        "prerequisites": _describe_prerequisites(),
        "name": _ANY,
        "meta": _ANY,
    }


def _describe_when(part: str) -> Schema:
    text: Schema = {"type": "string", "minLength": 1, "maxLength": limits.CONDITION_CHARS}
    return _allow_null(text, f"the condition of the {part}, in CEL")


def _describe_time_limit(description: str) -> Schema:
    shortest, longest = SHORTEST_SEC, YEAR_SEC
    return _allow_null({"type": "number", "minimum": shortest, "maximum": longest}, description)


def _describe_prerequisites() -> Schema:
    text: Schema = {
        "type": "string",
        "minLength": 1,
        "maxLength": limits.PREREQUISITE_CHARS,
        "not": {"anyOf": [{"pattern": r"[\u0000-\u001f\u007f-\u009f]"}, {"pattern": r"^\s|\s$"}]},
    }
    listed = {"type": "array", "items": text, "maxItems": limits.PREREQUISITES, "uniqueItems": True}
    return _allow_null(listed, "what must be satisfied before the node starts")


_NOTHING: list[Any] = [None, False, 0, "", [], {}]


def _describe_routing() -> Schema:
    """Return the schema of `routing`. Earlier releases accepted any key with an empty value."""
    assert ROUTING_KEYS == _ROUTES.keys()
    lists = {key: _allow_null({"type": "array", "items": _TEXT}, text) for key, text in _ROUTES.items()}
    empty = {"type": "object", "additionalProperties": {"enum": _NOTHING}}
    return {
        "description": "nodes that this node starts",
        "anyOf": [_describe_object(lists), empty, {"type": "null"}],
    }


_ROUTES = {
    "on_failure": "ids of the nodes that the permanent failure of this node starts",
    "on_success": "ids of the nodes that the success of this node starts",
}


def _describe_node_id() -> Schema:
    refused = [
        {"const": "*"},
        {"pattern": ELEMENT_SUFFIX.pattern},
        {"pattern": r"[\u0000-\u001f\u007f-\u009f]"},
        {"pattern": r"^\s|\s$"},
    ]
    return {"type": "string", "minLength": 1, "maxLength": limits.ID_CHARS, "not": {"anyOf": refused}}


def _ignore_case(pattern: str) -> str:
    """Return a case-insensitive `pattern` for tools without regex flags: each letter in both cases."""
    return re.sub(r"(?<!\\)[a-z]", lambda letter: f"[{letter[0]}{letter[0].upper()}]", pattern)


_START_WHEN = "|".join(word.value for word in StartWhen)


def _describe_io_keys() -> dict[str, Schema]:
    some_object = _allow_null({"type": "object"})
    return {
        "input_ref": some_object,
        "input_inline": _allow_null({"type": "object", "anyOf": _describe_input_routes()}),
        "batching": some_object,
        "start_when": _allow_null({"type": "string", "pattern": f"^(?:{_ignore_case(_START_WHEN)}){_END}"}),
        "max_ahead": _allow_null(_COUNT, "batches that the node may be ahead of its streaming children"),
        "fn": _allow_null(_TEXT, "name of a coordinator function"),
        "fn_args": some_object,
    }


def _describe_input_routes() -> list[Schema]:
    """Return one schema for each input adapter, and one for a node without an adapter."""
    none = {"properties": {"input_adapter": {"enum": [None, input_adapters.NOOP]}}}
    rechunk = {**_describe_input_args(input_adapters._RECHUNK_CHECKS), "required": ["size"]}
    return [
        none,
        _describe_route(
            input_adapters.PULL,
            {"input_args": _allow_null(_describe_input_args(input_adapters._PULL_CHECKS))},
        ),
        _describe_route(input_adapters.RECHUNK, {"input_args": rechunk}, "input_args"),
    ]


def _describe_route(adapter: str, properties: Schema, *required: str) -> Schema:
    named = {"input_adapter": {"const": adapter}, **properties}
    return {"required": ["input_adapter", *required], "properties": named}


def _describe_input_args(checks: dict[str, Any]) -> Schema:
    properties = {
        key: {
            "description": allowed,
            **(_ARGS[key] if key in _NODES else {"anyOf": [_ARGS[key], _EXPRESSION]}),
        }
        for key, (allowed, _) in checks.items()
    }
    both = {"required": ["from_node", "from_nodes"]}
    return {"type": "object", "properties": properties, "additionalProperties": False, "not": both}


_NODES = ("from_nodes", "from_node")
_EXPRESSION: Schema = {
    "description": "a value by expression, in CEL",
    "type": "object",
    "required": [expressions.KEY],
    "properties": {expressions.KEY: {"type": "string", "minLength": 1, "maxLength": limits.CONDITION_CHARS}},
    "additionalProperties": False,
}

_ARGS: dict[str, Schema] = {
    "from_nodes": {"type": "array", "items": _FULL_TEXT},
    "from_node": _FULL_TEXT,
    "poll_ms": _COUNT,
    "eof_on_task_done": {"type": "boolean"},
    "backoff_max_ms": _COUNT,
    "size": _COUNT,
    "meta_list_key": _FULL_TEXT,
}


def _retry_policy() -> Schema:
    assert field_checks.RETRY_KEYS == field_checks.RETRY_CHECKS.keys()
    descriptions = {key: allowed for key, (allowed, _) in field_checks.RETRY_CHECKS.items()}
    return _describe_object(
        {key: _allow_null(_RETRY[key], descriptions[key]) for key in sorted(descriptions)}
    )


_RETRY: dict[str, Schema] = {
    "max": {"type": "integer", "minimum": 0, "maximum": limits.MAX_RETRIES},
    "backoff_sec": _SECONDS,
    "backoff_coefficient": {"type": "number", "minimum": 1},
    "max_backoff_sec": _SECONDS,
    "jitter": {"type": "number", "minimum": 0, "maximum": 1},
    "permanent_on": {"type": "array", "items": _TEXT},
}
