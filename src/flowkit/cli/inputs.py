"""Graphs and params as files and texts on the command line."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowkit.cli.errors import flat, remedied
from flowkit.errors import ConfigError
from flowkit.graph.submission import checked
from flowkit.graph.task_input import parse_input

_HERE = "this-file"
"""Stands for the task's id where only the rest is looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenTask:
    """A task as a file describes it."""

    graph: Any
    params: Any = field(default_factory=dict)

    def warnings(self) -> list[str]:
        """What is odd about it. GraphError when it cannot run, with the text that `create_task` gives."""
        return list(checked(_HERE, {"params": self.params, "graph": self.graph}).warnings)


def read_task(path: str, params: str | None = None) -> GivenTask:
    """The task in a file (`-` is stdin): a graph, or `{"params": …, "graph": …}`; `params` overrides single keys.

    ConfigError when there is no JSON to read, GraphError when the outer shape is wrong.
    """
    given = _json(_read(path, "graph file"), path)
    if isinstance(given, dict) and "nodes" not in given and {"graph", "params"} & given.keys():
        new = parse_input(_HERE, given)
        task = GivenTask(graph=new.graph, params=new.params)
    else:
        task = GivenTask(graph=given)
    return (
        task if params is None else GivenTask(graph=task.graph, params={**task.params, **read_params(params)})
    )


def read_params(text: str) -> dict[str, Any]:
    """Params from JSON, or from a file as `@file`. ConfigError when they are no JSON object."""
    return read_object(text, "--params", """params are an object, for example '{"day": "2026-01-31"}'""")


def read_object(text: str, option: str, remedy: str) -> dict[str, Any]:
    """An option's object, from JSON, or from a file as `@file`. ConfigError when it is none; `remedy` shows one."""
    path = text[1:] if text.startswith("@") else None
    place = option if path is None else path
    value = _json(text if path is None else _read(path, f"file of {option}"), place)
    if not isinstance(value, dict):
        raise remedied(ConfigError(f"{place} holds {_name(value)}, not an object"), remedy)
    return value


def _read(path: str, what: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise remedied(ConfigError(f"there is no {what} {path!r}"), "give the path of a JSON file") from None
    except (OSError, ValueError) as error:
        problem = ConfigError(f"{what} {path!r} cannot be read: {flat(error)}")
        raise remedied(problem, "give the path of a JSON file") from None


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        where = "stdin" if place == "-" else place
        problem = ConfigError(f"{where} is not JSON: {flat(error)}")
        raise remedied(
            problem, "names and texts stand in double quotes; no comments, no comma at the end"
        ) from None


def _name(value: object) -> str:
    return {list: "a list", str: "a text", type(None): "null", bool: "true or false"}.get(
        type(value), "a number"
    )
