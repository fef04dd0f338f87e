"""Read graphs and params, in JSON or YAML, from files and from the command line."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from flowkit.activities.params_checks import ParamsChecks
from flowkit.cli.errors import add_remedy
from flowkit.cli.loading import is_flow_name, load_flow, refuse_python_file
from flowkit.errors import ConfigError, GraphError
from flowkit.graph.params import PARAMS_SCHEMA, complete_params
from flowkit.graph.scheduled import evaluate_params, format_nominal
from flowkit.graph.submission import parse_input, validate_input
from flowkit.limits import FILE_BYTES
from flowkit.text import printed
from flowkit.validation.documents import Document
from flowkit.validation.json_keys import EqualKeys, JsonRefused, load_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flowkit.flow import Flow
    from flowkit.models import Graph

_HERE = "this-file"
"""Placeholder for the task id while only graph and params are checked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenTask:
    """The graph and params in a file."""

    graph: Any
    params: Any = field(default_factory=dict)
    document: Document | None = None
    """The text with the graph, if there is one."""
    path: tuple[str, ...] = ("nodes",)
    """The keys in the text that lead to the nodes."""

    def checked(self, *, params_given: bool = True) -> Graph:
        """Return the validated graph.

        Raise GraphError, with the texts of `create_task` and the lines of the nodes, if it is invalid.

        Without `params_given`, the params follow later, so they need not match the `params_schema` of the graph.
        """
        try:
            parsed = validate_input(_HERE, {"params": self.params, "graph": self.graph})
            asyncio.run(ParamsChecks().check(self.graph, self.params if params_given else None))
        except GraphError as error:
            raise type(error)(self.locate(error.problems)) from None
        return replace(parsed, warnings=tuple(self.locate(parsed.warnings)))

    def locate(self, problems: Iterable[str]) -> list[str]:
        """Return problems of the graph, with the line before each whose place in the file is known."""
        if self.document is None:
            return list(problems)
        nodes = self.graph.get("nodes") if isinstance(self.graph, dict) else None
        return self.document.locate(problems, nodes, self.path)


def read_task(
    path: str, params: str | None = None, single: Sequence[str] = (), *, scheduled: bool = False
) -> GivenTask:
    """Return the task in a file (`-` is stdin): a graph, or `{"params": …, "graph": …}`; or the graph of module:flow.

    The keys of `params` override those of the file, and those of `single` (`key=value`) override both. Raise
    ConfigError if the file cannot be read, or is neither JSON nor YAML, and GraphError if the outer structure is
    invalid. With `scheduled`, params may hold expressions that read `task.scheduled_at`.
    """
    if is_flow_name(path):
        return read_flow(load_flow(path), _read_given(params, single), scheduled=scheduled)
    refuse_python_file(path)
    document = _read(path, "graph file")
    given = document.load()
    if isinstance(given, dict) and "nodes" not in given and {"graph", "params"} & given.keys():
        new = parse_input(_HERE, given)
        task = GivenTask(graph=new.graph, params=new.params, document=document, path=("graph", "nodes"))
    else:
        task = GivenTask(graph=given, document=document)
    if params is None and not single:
        return task
    return replace(task, params={**task.params, **_read_given(params, single)})


def _read_given(params: str | None, single: Sequence[str]) -> dict[str, Any]:
    """Return the params of the command line."""
    more = {} if params is None else read_params(params)
    return {**more, **read_pairs(single, "--param", "day=2026-01-31")}


def read_flow(flow: Flow[Any], params: dict[str, Any], *, scheduled: bool = False) -> GivenTask:
    """Return the task of a flow, with the default values of its params. Without any params, they may follow later.

    Those of a schedule keep their expressions. Their type checks them with values in place of these.
    """
    graph = flow.to_dict()
    try:
        if scheduled:
            flow.dump_params(evaluate_params(params, format_nominal(datetime.now(UTC))))
            return GivenTask(graph=graph, params=complete_params(graph, params, of_schedule=True))
        return GivenTask(graph=graph, params=flow.dump_params(params))
    except GraphError:
        if params or not graph.get(PARAMS_SCHEMA, {}).get("required"):
            raise
        return GivenTask(graph=graph)


def read_params(text: str) -> dict[str, Any]:
    """Return params from JSON or YAML, or from a file given as `@file`. Raise ConfigError if they are no object."""
    return read_object(text, "--params", """params are an object, for example '{"day": "2026-01-31"}'""")


def read_change(path: str) -> dict[str, Any]:
    """Return the object in a file (`-` is stdin) that changes the graph of a task. Raise ConfigError if it is none."""
    document = _read(path, "file")
    value = document.load()
    if not isinstance(value, dict):
        problem = ConfigError(f"{document.name} holds {_name(value)}, not an object")
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
    """Return the object in an option's JSON or YAML text, or in a file given as `@file`.

    Raise ConfigError with the given remedy if it is no object.
    """
    value, place = _read_option(text, option)
    if not isinstance(value, dict):
        raise add_remedy(ConfigError(f"{place} holds {_name(value)}, not an object"), remedy)
    return value


def read_objects(text: str, option: str, remedy: str) -> list[dict[str, Any]]:
    """Return the list of objects in an option's JSON or YAML text, or in a file given as `@file`.

    Raise as `read_object` does.
    """
    value, place = _read_option(text, option)
    if not isinstance(value, list):
        raise add_remedy(ConfigError(f"{place} holds {_name(value)}, not a list of objects"), remedy)
    for each in value:
        if not isinstance(each, dict):
            problem = ConfigError(f"the list in {place} holds {_name(each)}, not only objects")
            raise add_remedy(problem, remedy)
    return value


def _read_option(text: str, option: str) -> tuple[Any, str]:
    """Return the value of an option that is a text or `@file`, and the place to name in an error."""
    given = Document(name=option, text=text)
    document = _read(text[1:], f"file of {option}") if text.startswith("@") else given
    return document.load(), document.name


def _read(path: str, what: str) -> Document:
    if path == "-":
        return _read_stdin()
    try:
        return Document.read(path, f"{what} {path!r}")
    except FileNotFoundError:
        problem = ConfigError(f"there is no {what} {path!r}")
        raise add_remedy(problem, "give the path of a JSON or YAML file") from None


def _read_stdin() -> Document:
    if buffer := getattr(sys.stdin, "buffer", None):
        return Document.of_bytes("stdin", buffer.read(FILE_BYTES + 1))
    return Document(name="stdin", text=sys.stdin.read())


def _name(value: object) -> str:
    return {
        dict: "an object",
        list: "a list",
        str: "a string",
        type(None): "null",
        bool: "true or false",
    }.get(type(value), "a number")
