"""Which commands, options and operators the product sends to MongoDB, noted in all processes of a run of the tests.

The listener knows the product's own commands by their concerns: `durable` (adapters/mongo.py) writes with a journaled
majority and reads with `local`, and the clients of the tests do neither. Commands without a concern count by their
name.

Each process appends what it sees for the first time to a file of its own, at once, so that a killed process
loses nothing. The fork server loads this module by its path: it imports nothing of the tests.
"""

from __future__ import annotations

import json
import os
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pymongo import monitoring

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

FOLDER = "FLOWKIT_TESTS_MONGO_COMMANDS"
"""The variable that names the folder of the files."""

Shape = tuple[str, str]
"""What was sent: its kind, which is a section of docs/mongodb.md, and its name."""

COMMANDS, OPTIONS, QUERY = "Commands", "Options", "Query operators"
UPDATE, PIPELINE, INDEX = "Update operators", "Aggregation", "Index options"
BROKEN = "Rules of MongoDB that a command breaks"
"""The kind of what MongoDB refuses and a stand-in may accept. No row of a table permits it."""

_CONCERNS: tuple[tuple[str, Any], ...] = (
    ("writeConcern", {"w": "majority", "j": True}),
    ("readConcern", {"level": "local"}),
)
_WITH_CONCERN = frozenset(
    {
        *("find", "aggregate", "count", "distinct", "insert", "update", "delete", "findAndModify"),
        *("createIndexes", "dropIndexes", "drop", "dropDatabase", "create", "renameCollection"),
        *("listDatabases", "listCollections"),
    }
)
"""Commands that count only with a concern of the product."""

_PARTS = frozenset(
    {
        *("$db", "filter", "query", "q", "u", "update", "updates", "deletes", "documents", "pipeline"),
        *("key", "indexes"),
    }
)
"""Parts of commands that are not options, beside the name of the command."""

_MODIFIED = ("$push", "$addToSet", "$pull")
"""Update operators whose value may have operators."""

_PARTIAL = frozenset({"$eq", "$exists", "$gt", "$gte", "$lt", "$lte", "$type", "$and"})
"""Operators that `partialFilterExpression` permits in every release."""

_PLACEHOLDER = re.compile(r"\.(\$[^.]*)(?=\.)")
_POSITION = re.compile(r"[^. ]\.\d+\.")
_FIELD = re.compile(r"[^. ]\.[^.\d$ ]")

_ITEMS = 100
"""How many items of a list are read: those of an `$in` may be thousands of values."""


class CommandShapes(monitoring.CommandListener):
    """Appends each shape that this process has not sent yet to a file in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: set[Shape] = set()

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        """Note the shapes of a command of the product."""
        new = set(shapes(event.command_name, event.command)) - self._seen
        if new and self._folder.is_dir():
            self._seen |= new
            text = "".join(json.dumps(shape) + "\n" for shape in sorted(new))
            with open(self._folder / str(os.getpid()), "a", encoding="utf-8") as file:
                file.write(text)

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        """Ignore the answer."""

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        """Ignore the error."""


def collect_into(folder: Path) -> None:
    """Note what all clients send that this process, or one that it forks, creates from now on."""
    monitoring.register(CommandShapes(folder))


def collected(folder: Path) -> set[Shape]:
    """Return what all processes have noted."""
    lines = (line for file in folder.iterdir() for line in file.read_text(encoding="utf-8").splitlines())
    return {(kind, name) for kind, name in map(json.loads, lines)}


def shapes(name: str, command: Mapping[str, Any]) -> Iterator[Shape]:
    """Yield what a command consists of; nothing for one that the tests themselves send."""
    if name in _WITH_CONCERN and all(command.get(option) != concern for option, concern in _CONCERNS):
        return
    yield COMMANDS, name
    yield from ((OPTIONS, option) for option in command.keys() - _PARTS - {name})
    for part in ("filter", "query"):
        yield from _query(command.get(part))
    for part in ("projection", "fields"):
        yield from _projection(command.get(part) or {})
    if name == "findAndModify" and "update" in command:
        yield from _update(command["update"])
    for part, read in _LISTS.items():
        for each in command.get(part, ()):
            yield from read(each)


def _statement(each: Mapping[str, Any]) -> Iterator[Shape]:
    """Yield the shapes of one update or deletion."""
    yield from _query(each["q"])
    if "u" in each:
        yield from _update(each["u"])
    for option in each.keys() - _PARTS:
        if each[option] is not False:
            yield OPTIONS, option


def _query(condition: Any) -> Iterator[Shape]:
    """Yield the operators of a filter, and the special forms of its paths."""
    for key, value in condition.items() if isinstance(condition, dict) else ():
        if key.startswith("$"):
            yield QUERY, key
        elif "." in key:
            yield QUERY, "a.0" if _POSITION.search(f"{key}.") else "a.b"
        if value is None:
            yield QUERY, "null"
        for each in value[:_ITEMS] if isinstance(value, list) else (value,):
            yield from _query(each)


def _projection(shown: Mapping[str, Any]) -> Iterator[Shape]:
    paths = [path for path in shown if path != "_id"]
    if overlap := overlapping(paths):
        yield BROKEN, f"a projection names {overlap[0]} and {overlap[1]}"
    if len({bool(shown[path]) for path in paths}) > 1:
        yield BROKEN, f"a projection shows and hides fields: {sorted(paths)[:5]}"
    for value in shown.values():
        if isinstance(value, dict):
            yield from ((QUERY, operator) for operator in value)


def _update(update: Any) -> Iterator[Shape]:
    """Yield the operators of an update with their modifiers, and the special forms of its paths."""
    if isinstance(update, list):
        yield UPDATE, "pipeline"
    elif not any(key.startswith("$") for key in update):
        yield UPDATE, "replacement"
    else:
        for operator, fields in update.items():
            yield UPDATE, operator if fields else f"empty {operator}"
            if operator in _MODIFIED:
                inner = [value for value in fields.values() if isinstance(value, dict)]
                yield from ((UPDATE, f"{operator} {key}") for each in inner for key in each if key[:1] == "$")
        yield from _paths([path for fields in update.values() for path in fields])


def _paths(paths: list[str]) -> Iterator[Shape]:
    """Yield the special forms of the paths of an update. There may be hundreds, so all are searched together."""
    text = f".{'. .'.join(paths)}."
    for placeholder in {*_PLACEHOLDER.findall(text)}:
        yield UPDATE, placeholder if placeholder in ("$", "$[]") else "$[id]"
    if ".." in text:
        yield BROKEN, f"an update has a path with an empty part: {sorted(paths)[:5]}"
    if _POSITION.search(text):
        yield UPDATE, "a.0"
    if _FIELD.search(text):
        yield UPDATE, "a.b"
    if overlap := overlapping(paths):
        yield BROKEN, f"an update names {overlap[0]} and {overlap[1]}"


def _stage(stage: Mapping[str, Any]) -> Iterator[Shape]:
    for name, value in stage.items():
        yield PIPELINE, name
        if name == "$match":
            yield from _query(value)
        else:
            yield from ((PIPELINE, operator) for operator in _operators(value))


def _operators(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key.startswith("$"):
                yield key
            yield from _operators(inner)
    elif isinstance(value, list):
        for each in value:
            yield from _operators(each)


def _index(index: Mapping[str, Any]) -> Iterator[Shape]:
    for option in index.keys() - {"key", "name"}:
        yield INDEX, option
    for direction in index["key"].values():
        yield INDEX, str(direction)
    for kind, operator in _query(index.get("partialFilterExpression")):
        if kind == QUERY and operator.startswith("$") and operator not in _PARTIAL:
            yield BROKEN, f"partialFilterExpression has {operator}"


_LISTS: Mapping[str, Callable[[Any], Iterator[Shape]]] = {
    "updates": _statement,
    "deletes": _statement,
    "pipeline": _stage,
    "indexes": _index,
}
"""How the lists in a command are read."""


def overlapping(paths: Iterable[str]) -> tuple[str, str] | None:
    """Return two paths of which one is the other, or its parent; None if there are none."""
    ordered = sorted(f"{path}.".replace(".", "\0") for path in paths)
    for one, other in pairwise(ordered):
        if other.startswith(one):
            return _shown(one), _shown(other)
    return None


def _shown(ordered: str) -> str:
    return ordered.rstrip("\0").replace("\0", ".")
