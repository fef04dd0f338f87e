"""The JSON schema of a task's params, in the key `params_schema` of its graph. Pure.

`create_task`, `flowkit run`, `run_graph`, the admission API and the engine's activity `open_task` check the params. The
workflow does not. All of them use `flowkit.activities.params_checks`, because a schema can make its check endless.
"""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import TYPE_CHECKING, Any

from flowkit.limits import PARAMS_SCHEMA_SEC, PARAMS_SCHEMA_SEC_PER_MB
from flowkit.text import one_line, printable, printed, truncate

if TYPE_CHECKING:
    from collections.abc import Iterator

PARAMS_SCHEMA = "params_schema"
_ENOUGH = 11
_SHOWN_CHARS = 300
_FAILURES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, re.error)
"""What the validator raises for schemas that it cannot apply."""

_CHEAP = frozenset(
    [
        *("$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated"),
        *("readOnly", "writeOnly", "type", "enum", "const", "required", "dependentRequired", "multipleOf"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength"),
        *("minItems", "maxItems", "minProperties", "maxProperties"),
    ]
)
"""Keywords without subschemas whose check takes time in proportion to the schema and the value."""
_CHEAP_FORMATS = frozenset(["date", "date-time", "time", "email", "ipv4", "ipv6", "uuid"])
_SHORT_LIST = 50
"""Number of values of a list up to which it may contain other values than only strings or only numbers.

Dialects demand that the values of some lists differ, and the validator compares each pair of values that it
cannot sort.
"""
_CHEAP_SCHEMA_BYTES = 10_000
_CHEAP_PARAMS_BYTES = 100_000
_CHEAP_PRODUCT = 20_000_000
"""Sizes of a schema and of params, and of both multiplied, up to which a check takes at most a few tenths
of a second."""


def params_problems(graph: dict[str, Any], params: dict[str, Any] | None) -> list[str]:
    """Return the problems of the schema in `graph`, and of `params`, at most eleven.

    With `params` None, check only the schema itself. `$ref` resolves within the schema; nothing is downloaded.
    """
    schema = graph.get(PARAMS_SCHEMA)
    if schema is None:
        return []
    if not isinstance(schema, dict):
        return [f"graph.{PARAMS_SCHEMA} must be a JSON schema, which is an object, not {printed(schema)}"]
    return list(islice(_check(schema, params), _ENOUGH))


def needs_process(graph: dict[str, Any], params: dict[str, Any] | None) -> bool:
    """Return whether `params_problems` could take long, so that a process must do it that can be killed.

    It is quick for small schemas of cheap keywords, in which each value is checked against one subschema. Patterns can
    take time that grows exponentially with the value, and so can references and combinators with their nesting.
    """
    schema = graph.get(PARAMS_SCHEMA)
    if not isinstance(schema, dict):
        return False
    sizes = _size(schema), _size(params or {})
    if (
        sizes[0] > _CHEAP_SCHEMA_BYTES
        or sizes[1] > _CHEAP_PARAMS_BYTES
        or sizes[0] * sizes[1] > _CHEAP_PRODUCT
    ):
        return True
    return not _is_cheap(schema)


def check_sec(graph: dict[str, Any], params: dict[str, Any] | None) -> float:
    """Return the most processor time, in seconds, that the check of params against their schema may take."""
    size = _size(graph[PARAMS_SCHEMA]) + _size(params or {})
    return PARAMS_SCHEMA_SEC + PARAMS_SCHEMA_SEC_PER_MB * size / 1_000_000


def _size(value: object) -> int:
    return len(json.dumps(value))


def _is_cheap(schema: object) -> bool:
    if not isinstance(schema, dict):
        return True  # true and false; others are not valid
    return all(_is_cheap_keyword(keyword, value) for keyword, value in schema.items())


def _is_cheap_keyword(keyword: str, value: Any) -> bool:
    match keyword, value:
        case ("properties", dict()):
            return all(map(_is_cheap, value.values()))
        case ("prefixItems" | "items", list()):
            return all(map(_is_cheap, value))
        case ("items" | "additionalProperties", _):
            return _is_cheap(value)
        case ("format", str()):
            return value in _CHEAP_FORMATS
        case ("type", list()):
            # draft 3 has schemas there
            return _is_cheap_list(value) and not any(isinstance(each, dict) for each in value)
        case (_, list()):
            return keyword in _CHEAP and _is_cheap_list(value)
        case ("dependentRequired", dict()):
            return all(_is_cheap_list(each) for each in value.values() if isinstance(each, list))
    return keyword in _CHEAP


def _is_cheap_list(values: list[Any]) -> bool:
    kinds = {type(each) for each in values}
    return len(values) <= _SHORT_LIST or kinds == {str} or kinds <= {int, float}


def _check(schema: dict[str, Any], params: dict[str, Any] | None) -> Iterator[str]:
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.exceptions import UnknownType
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    if not isinstance(dialect := schema.get("$schema", ""), str):
        yield f"graph.{PARAMS_SCHEMA}['$schema'] is {printed(dialect)}; use the address of a dialect, as a string"
        return
    validator = validator_for(schema, default=Draft202012Validator)
    try:
        validator.check_schema(schema)
        if params is not None:
            checked = validator(schema, registry=Registry(), format_checker=validator.FORMAT_CHECKER)
            yield from (
                f"params{error.json_path[1:]}: {_shown(error.message)}"
                for error in checked.iter_errors(params)
            )
    except SchemaError as error:
        yield f"graph.{PARAMS_SCHEMA}{error.json_path[1:]} is not valid in a JSON schema: {_shown(error.message)}"
    except Unresolvable as error:
        yield (
            f"graph.{PARAMS_SCHEMA} refers to {printed(error.ref)}, which it does not contain; put "
            "the definition into $defs"
        )
    except (*_FAILURES, UnknownType) as error:  # for example if a reference leads to no schema
        shown = _shown(one_line(error))
        yield f"graph.{PARAMS_SCHEMA} cannot be applied: {shown}; correct its types, patterns and references"


def _shown(message: str) -> str:
    return truncate(printable(message), _SHOWN_CHARS)
