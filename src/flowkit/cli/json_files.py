"""Read graphs and params from files and from the command line."""

from __future__ import annotations

import asyncio
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowkit.activities.params_checks import ParamsChecks
from flowkit.cli.errors import add_remedy
from flowkit.errors import ConfigError
from flowkit.graph.submission import parse_input, validate_input
from flowkit.text import one_line, printed
from flowkit.validation.json_keys import EqualKeys, JsonRefused, load_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.models import Graph

_BOM = "\ufeff"
"""With which some editors and shells begin a file."""

_HERE = "this-file"
"""Placeholder for the task id while only graph and params are checked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenTask:
    """The graph and params in a file."""

    graph: Any
    params: Any = field(default_factory=dict)

    def checked(self, *, params_given: bool = True) -> Graph:
        """Return the validated graph. Raise GraphError, with the text of `create_task`, if it is invalid.

        Without `params_given`, the params follow later, so they need not match the `params_schema` of the graph.
        """
        parsed = validate_input(_HERE, {"params": self.params, "graph": self.graph})
        asyncio.run(ParamsChecks().check(self.graph, self.params if params_given else None))
        return parsed


def read_task(path: str, params: str | None = None, single: Sequence[str] = ()) -> GivenTask:
    """Return the task in a file (`-` is stdin): a graph, or `{"params": …, "graph": …}`.

    The keys of `params` override those of the file, and those of `single` (`key=value`) override both. Raise
    ConfigError if the file cannot be read or is not JSON, and GraphError if the outer structure is invalid.
    """
    given = _parse_json(_read(path, "graph file"), path)
    if isinstance(given, dict) and "nodes" not in given and {"graph", "params"} & given.keys():
        new = parse_input(_HERE, given)
        task = GivenTask(graph=new.graph, params=new.params)
    else:
        task = GivenTask(graph=given)
    if params is None and not single:
        return task
    more = {} if params is None else read_params(params)
    own = read_pairs(single, "--param", "day=2026-01-31")
    return GivenTask(graph=task.graph, params={**task.params, **more, **own})


def read_params(text: str) -> dict[str, Any]:
    """Return params from JSON text, or from a file given as `@file`. Raise ConfigError if they are not an object."""
    return read_object(text, "--params", """params are an object, for example '{"day": "2026-01-31"}'""")


def read_change(path: str) -> dict[str, Any]:
    """Return the object in a file (`-` is stdin) that changes the graph of a task. Raise ConfigError if it is none."""
    value = _parse_json(_read(path, "file"), path)
    if not isinstance(value, dict):
        problem = ConfigError(f"{'stdin' if path == '-' else path} holds {_name(value)}, not an object")
        raise add_remedy(
            problem, """a change is an object, for example '{"nodes": [...], "changes": {...}}'"""
        )
    return value


def read_pairs(given: Sequence[str], option: str, example: str) -> dict[str, Any]:
    """Return the values of an option from texts `key=value`. A value is JSON if it parses as JSON, and text otherwise.

    Raise ConfigError, whose remedy shows the example, for another text, and for a key that is given twice.
    """
    values: dict[str, Any] = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not key or not equals:
            problem = ConfigError(f"{option} {printed(each)} is not of the form key=value")
            raise add_remedy(problem, f"write, for example, {option} {example}")
        if key in values:
            raise add_remedy(ConfigError(f"{option} {key} is given twice"), "give each key once")
        values[key] = read_value(value)
    return values


def read_value(text: str) -> Any:
    """Return the value if the text is JSON; otherwise return the text.

    Raise ConfigError for an object with a key twice.
    """
    try:
        return load_json(text, constants=False)
    except (EqualKeys, JsonRefused) as error:
        raise ConfigError(f"the value {printed(text)}: {error}") from None
    except ValueError:  # also NaN and Infinity, which Python accepts but JSON does not
        return text


def read_object(text: str, option: str, remedy: str) -> dict[str, Any]:
    """Return the object in an option's JSON text, or in a file given as `@file`.

    Raise ConfigError with the given remedy if it is not a JSON object.
    """
    value, place = _read_json(text, option)
    if not isinstance(value, dict):
        raise add_remedy(ConfigError(f"{place} holds {_name(value)}, not an object"), remedy)
    return value


def read_objects(text: str, option: str, remedy: str) -> list[dict[str, Any]]:
    """Return the list of objects in an option's JSON text, or in a file given as `@file`.

    Raise as `read_object` does.
    """
    value, place = _read_json(text, option)
    if not isinstance(value, list):
        raise add_remedy(ConfigError(f"{place} holds {_name(value)}, not a list of objects"), remedy)
    for each in value:
        if not isinstance(each, dict):
            problem = ConfigError(f"the list in {place} holds {_name(each)}, not only objects")
            raise add_remedy(problem, remedy)
    return value


def _read_json(text: str, option: str) -> tuple[Any, str]:
    """Return the value of an option that is JSON or `@file`, and the place to name in an error."""
    path = text[1:] if text.startswith("@") else None
    place = option if path is None else path
    return _parse_json(text if path is None else _read(path, f"file of {option}"), place), place


def _read(path: str, what: str) -> str:
    try:
        return (
            sys.stdin.read().removeprefix(_BOM) if path == "-" else Path(path).read_text(encoding="utf-8-sig")
        )
    except FileNotFoundError:
        raise add_remedy(
            ConfigError(f"there is no {what} {path!r}"), "give the path of a JSON file"
        ) from None
    except (OSError, ValueError) as error:
        problem = ConfigError(f"{what} {path!r} cannot be read: {one_line(error)}")
        raise add_remedy(problem, "give the path of a JSON file") from None


def _parse_json(text: str, place: str) -> Any:
    where = "stdin" if place == "-" else place
    try:
        return load_json(text)
    except (EqualKeys, JsonRefused) as error:
        raise ConfigError(f"{where}: {error}") from None
    except ValueError as error:
        problem = ConfigError(f"{where} is not JSON: {one_line(error)}")
        raise add_remedy(problem, _suggest_json(text)) from None


_YAML = re.compile(r"\s*(#.*\n\s*)*(---|- |[A-Za-z_][\w-]*:(\s|$))")


def _suggest_json(text: str) -> str:
    """Return how to correct a text that is not JSON."""
    if _YAML.match(text):
        return (
            "it looks like YAML: convert it, for example with `yq -o=json` or Python's yaml and json modules"
        )
    return "put names and strings in double quotes; remove comments and trailing commas"


def _name(value: object) -> str:
    return {
        dict: "an object",
        list: "a list",
        str: "a string",
        type(None): "null",
        bool: "true or false",
    }.get(type(value), "a number")
