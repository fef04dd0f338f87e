"""The JSON schema of a task's params, in the key `params_schema` of its graph. Pure.

Whatever starts a task adds the default values of the schema with `complete_params`: a client, the admission queue, a
backfill, a test, and an engine for the tasks of a schedule. `create_task`, `flowkit run`, `run_graph`, the admission
API and the engine's activity `open_task` check the params. The workflow does not. All of them use
`flowkit.activities.params_checks`, because a schema can make its check endless.
"""

from __future__ import annotations

import json
import re
from copy import deepcopy
from itertools import islice
from typing import TYPE_CHECKING, Any

from flowkit.errors import GraphError
from flowkit.graph.expressions import KEY, is_expression
from flowkit.limits import PARAMS_SCHEMA_SEC, PARAMS_SCHEMA_SEC_PER_MB, TASK_DOCUMENT_BYTES
from flowkit.text import one_line, printable, printed, truncate

if TYPE_CHECKING:
    from collections.abc import Iterator

PARAMS_SCHEMA = "params_schema"

FACTORY = "x-flowkit-default-factory"
"""Keyword of a part of a schema whose value a function of the type makes for each task, so that it has no default."""

NAMES = "x-flowkit-names"
"""Keyword of a field with several names: the one by which its type writes it, and the others that the type reads."""

_ENOUGH = 11
_SHOWN_CHARS = 300
_FAILURES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, re.error)
"""What the validator raises for schemas that it cannot apply."""

_CHEAP = frozenset(
    [
        *("$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated"),
        *("readOnly", "writeOnly", "type", "enum", "const", "required", "dependentRequired", "multipleOf"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength"),
        *("minItems", "maxItems", "minProperties", "maxProperties", FACTORY, NAMES),
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


def complete_params(graph: Any, params: Any, *, of_schedule: bool = False) -> Any:
    """Return params with the default values that the schema in `graph` gives to fields that they lack.

    The fields of objects and lists inside the params count, too. A field that its type also reads by another name gets
    the name by which the type writes it. Expressions stay, and so does what is not valid.

    Raise GraphError if the result would be too large, or, with `of_schedule`, if the type makes a missing value by a
    function.
    """
    schema = graph.get(PARAMS_SCHEMA) if isinstance(graph, dict) else None
    if not isinstance(schema, dict) or not isinstance(params, dict):
        return params
    completion = _Completion(schema)
    completed = completion.complete(schema, params, "params")
    if of_schedule and completion.made:
        raise GraphError(
            [
                f"{place} is missing, and a default_factory of its type would give all tasks of the schedule the same "
                f'value: pass one that they may share, or an expression such as {{"{KEY}": "task.scheduled_at"}}'
                for place in completion.made[:_ENOUGH]
            ]
        )
    return params if completed == params else completed


class _Completion:
    """Adds default values to params, and notes the fields that have none because a function makes them."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._root = schema
        self._steps = 0
        self._bytes = 0
        self.made: list[str] = []
        """The places of these fields."""

    def complete(self, schema: object, value: Any, place: str, depth: int = 0) -> Any:
        """Return the value, or a copy with default values."""
        if is_expression(value) or not isinstance(value, (dict, list)) or depth > _LEVELS:
            return value
        completed = value
        for form in self._forms(schema, value):
            if isinstance(completed, list):
                completed = self._items(form, completed, place, depth)
            else:
                completed = self._fields(form, completed, place, depth)
        return completed

    def _items(self, form: dict[str, Any], value: list[Any], place: str, depth: int) -> list[Any]:
        """Return a list with completed items."""
        first, others = _array(form.get("prefixItems")), form.get("items")
        return [
            self.complete(first[at] if at < len(first) else others, each, f"{place}[{at}]", depth + 1)
            for at, each in enumerate(value)
        ]

    def _fields(self, form: dict[str, Any], value: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        """Return an object with default values."""
        known, others = _object(form.get("properties")), form.get("additionalProperties")
        found, parts = dict(value), dict[str, object]()
        for name, part in known.items():
            self._count()
            written = self._rename(name, _object(part), found)
            if written in found or not isinstance(part, dict):
                parts[written] = part
            elif "default" in part:
                self._count(added=part["default"])
                parts[written], found[written] = None, deepcopy(part["default"])
            elif part.get(FACTORY) is True:
                self.made.append(f"{place}.{written}")
        for name, each in found.items():
            found[name] = self.complete(parts.get(name, others), each, f"{place}.{name}", depth + 1)
        return found

    def _rename(self, name: str, part: dict[str, Any], found: dict[str, Any]) -> str:
        """Give a field the name by which its type writes it. Return that name."""
        names = _array(part.get(NAMES)) or [name]
        given = [each for each in names if each in found]
        if given and given[0] != names[0]:
            found[names[0]] = found.pop(given[0])
        return str(names[0])

    def _forms(self, schema: object, value: Any) -> Iterator[dict[str, Any]]:
        """Yield the schemas that apply to an object or a list, with references and alternatives resolved."""
        waiting, seen = [schema], set[int]()
        while waiting:
            each = self._resolve(waiting.pop())
            if not isinstance(each, dict) or id(each) in seen:
                continue
            seen.add(id(each))
            waiting += _array(each.get("allOf"))
            if "$ref" in each:
                waiting.append({"$ref": each["$ref"]})
            for key in ("anyOf", "oneOf"):
                fitting = [one for one in _array(each.get(key)) if self._may_fit(one, value)]
                waiting += fitting if len(fitting) == 1 else []
            yield each

    def _resolve(self, schema: object) -> object:
        """Return the schema to which a reference leads, if there is nothing beside the reference."""
        for _ in range(_REFERENCES):
            self._count()
            if not isinstance(schema, dict) or schema.keys() != {"$ref"}:
                return schema
            schema = self._find(schema["$ref"])
        return None

    def _find(self, reference: object) -> object:
        if reference == "#":
            return self._root
        place, _, name = reference.rpartition("/") if isinstance(reference, str) else ("", "", "")
        return _object(self._root.get(place.removeprefix("#/"))).get(
            name.replace("~1", "/").replace("~0", "~")
        )

    def _may_fit(self, schema: object, value: Any) -> bool:
        """Return whether a value may be one of these alternatives, by its type, fields and constants."""
        found = self._resolve(schema)
        if not isinstance(found, dict):
            return found is True
        if found.get("type") not in (None, "object" if isinstance(value, dict) else "array"):
            return False
        if isinstance(value, list):
            return True
        known = _object(found.get("properties"))
        names = {name: _array(_object(part).get(NAMES)) or [name] for name, part in known.items()}
        given = {name: each for name in names for each in names[name] if each in value}
        lacks = any(name not in given for name in _array(found.get("required")))
        extra = found.get("additionalProperties") is False and len(given) < len(value)
        self._count(len(known))
        return not (lacks or extra) and all(_has_constant(known[name], value[given[name]]) for name in given)

    def _count(self, steps: int = 1, *, added: Any = None) -> None:
        """Count parts of the schema and bytes of default values, which params can multiply."""
        self._steps += steps
        self._bytes += 0 if added is None else _size(added)
        if self._steps > _STEPS:
            raise GraphError(
                [f"graph.{PARAMS_SCHEMA} has too many parts for these params; simplify it, or pass less data"]
            )
        if self._bytes > TASK_DOCUMENT_BYTES:
            many = f"the default values of graph.{PARAMS_SCHEMA} add more than {TASK_DOCUMENT_BYTES:,} bytes to params"
            raise GraphError([f"{many}; shorten them, or pass fewer objects"])


_STEPS = 2_000_000
"""How many parts of a schema a completion may meet: more than any schema and params of a task that fit a document."""
_REFERENCES = 10
"""How many references may lead from one to the next."""
_LEVELS = 100
"""How deep objects and lists may be inside each other. Deeper ones stay, and cannot be stored."""


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _array(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _has_constant(schema: Any, value: Any) -> bool:
    """Return whether a value is one that its schema lists, if it lists any: the field that tells members of a union."""
    part = _object(schema)
    return ("const" not in part or part["const"] == value) and (
        "enum" not in part or value in _array(part["enum"])
    )


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
