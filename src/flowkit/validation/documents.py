"""Graphs, params and settings in JSON or YAML. Errors name the line and the column, and show the line.

The name of a file says what it contains: `.yaml` and `.yml` YAML, `.json` JSON. Any other text, such as stdin or an
option, is JSON if it begins with `{` or `[`, and otherwise YAML. So a shell that drops the quotes of `{"a":"b"}` causes
an error, although `{a:b}` is YAML as well.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flowkit.errors import ConfigError
from flowkit.limits import FILE_BYTES
from flowkit.masks import HIDDEN, SECRET_TEXT, is_secret_name
from flowkit.text import add_caret, one_line, printed
from flowkit.validation import json_places
from flowkit.validation.json_keys import EqualKeys, JsonRefused, load_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

YAML_SUFFIXES: Final = (".yaml", ".yml")
VALUE_SUFFIXES: Final = (".json", *YAML_SUFFIXES)
"""Ends of the names of files with a value."""

_BOM: Final = "\ufeff"
"""With which some editors and shells begin a file."""


_LIKE_YAML: Final = re.compile(r"\s*(#.*\n\s*)*(---|- |[A-Za-z_][\w-]*:(\s|$))")
_IN_MESSAGE: Final = re.compile(r" at line (?P<line>\d+) column (?P<column>\d+)")
_NODE: Final = re.compile(
    r"""node (?P<id>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(graph\.)?nodes\[(?P<index>\d+)\]"""
)
_UNKNOWN_KEY: Final = re.compile(
    r""": (?:(?P<section>[a-z_.]+): )?unknown key (?P<key>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*");"""
)

_REMEDIES: Final = {
    "Expecting ',' delimiter": "put a comma between two values, or close the object or list",
    "Extra data": "remove what follows the first value",
}

_Path = tuple[str | int, ...]


def is_yaml_name(name: str) -> bool:
    """Return whether the name of a file says that it is YAML."""
    return name.lower().endswith(YAML_SUFFIXES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A text in JSON or YAML."""

    name: str
    """The file or the option, as errors name it."""
    text: str

    @classmethod
    def read(cls, path: str | Path, what: str | None = None) -> Document:
        """Return the text of a file.

        Raise FileNotFoundError, or a ConfigError that says `what` cannot be read, and why.
        """
        what = what or str(path)
        try:
            with Path(path).open("rb") as file:
                return cls.of_bytes(str(path), file.read(FILE_BYTES + 1), what)
        except (FileNotFoundError, ConfigError):
            raise
        except (OSError, ValueError) as error:  # ValueError: a path with NUL
            reason = getattr(error, "strerror", None) or one_line(error)
            raise _with_remedy(
                f"{what} cannot be read: {reason}", "give the path of a JSON or YAML file"
            ) from None

    @classmethod
    def of_bytes(cls, name: str, content: bytes, what: str | None = None) -> Document:
        """Return a text of UTF-8. Raise ConfigError if it is too large, or not UTF-8."""
        what = what or name
        if len(content) > FILE_BYTES:
            problem = f"{what} has more than {FILE_BYTES:,} bytes"
            raise _with_remedy(problem, "put data into a store and pass a reference")
        try:
            return cls(name=name, text=content.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise _with_remedy(f"{what} is not UTF-8 in line {line}", "save it in this encoding") from None

    def load(self) -> Any:
        """Return the value. Raise ConfigError, which shows the place of the error, if there is none."""
        text = self.text.removeprefix(_BOM)
        if not is_yaml_name(self.name) and (self.name.lower().endswith(".json") or _begins_like_json(text)):
            return self._load_json(text)
        if _begins_like_json(text):  # YAML lacks pairs of escapes for one character
            try:
                return load_json(text, constants=False)
            except (EqualKeys, JsonRefused):
                return self._load_json(text)
            except ValueError:
                pass
        return self._load_yaml(text)

    def _load_json(self, text: str) -> Any:
        try:
            return load_json(text)
        except json.JSONDecodeError as error:
            problem = self._error(f"not JSON: {error.msg}", text, error.pos)
            problem.add_note(self._suggest_json(text, error.msg))
            raise problem from None
        except (EqualKeys, JsonRefused) as error:
            offset = None
            if error.path is not None:
                offset = json_places.offset_of(text, error.path, again=isinstance(error, EqualKeys))
            message = str(error)
            if offset is None and (found := _IN_MESSAGE.search(message)):
                message = message.replace(found[0], "", 1)
                offset = _offset(text, int(found["line"]), int(found["column"]))
            raise self._error(message, text, offset) from None
        except ValueError as error:  # a lone surrogate, of a command line that is not UTF-8
            raise _with_remedy(f"{self.name} is not JSON: {one_line(error)}", "write it in UTF-8") from None

    def _suggest_json(self, text: str, message: str) -> str:
        """Return how to correct a text that is not JSON."""
        if self.name.lower().endswith(".json") and _LIKE_YAML.match(text):
            return "it looks like YAML: let the name of the file end in .yaml"
        return _REMEDIES.get(
            message, "put names and strings in double quotes; remove comments and trailing commas"
        )

    def _load_yaml(self, text: str, places: dict[_Path, tuple[int, int]] | None = None) -> Any:
        from flowkit.validation.yaml_text import (  # a command that reads no YAML starts faster
            YamlRefused,
            load_yaml,
        )

        try:
            return load_yaml(text, places)
        except YamlRefused as error:
            problem = error.problem if error.is_yaml else f"not YAML: {error.problem}"
            if error.shown and _may_show_secret(text, error.offset):
                problem = problem.replace(error.shown, HIDDEN)
            raise self._error(problem, text, error.offset) from None

    def _error(self, problem: str, text: str, offset: int | None) -> ConfigError:
        """Return the error at an offset of the text, with an excerpt unless it could show a secret."""
        if offset is None:
            return ConfigError(f"{self.name}: {problem}")
        line, column = text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)
        shown = f"{self.name}:{line}:{column}: {problem}"
        if not _line_at(text, offset).strip() or _may_show_secret(text, offset):
            return ConfigError(shown)
        return ConfigError(add_caret(shown, text, offset))

    # --- places -------------------------------------------------------------------------------------------------

    def locate(self, problems: Iterable[str], nodes: object, above: _Path = ("nodes",)) -> list[str]:
        """Return the problems of a graph, with the name of the file and the line before each whose place is known.

        That is the line of the graph, of its nodes or of a node; of an unknown key, its line and its column.
        `nodes` are those of the graph, and `above` leads to them.
        """
        indexes = {}
        if isinstance(nodes, list):
            ids = (each.get("node_id") if isinstance(each, dict) else None for each in nodes)
            indexes = {printed(node_id): index for index, node_id in enumerate(ids)}
        found = [(problem, *_place_of(problem, indexes, above)) for problem in problems]
        places = dict(self._places()) if any(path is not None for _, path, _ in found) else {}
        return [f"{self._prefix(path, key, places)}{problem}" for problem, path, key in found]

    def _prefix(self, path: _Path | None, key: _Path | None, places: Mapping[_Path, tuple[int, int]]) -> str:
        """Return the name of the file with the line and the column of a key, or else the line of a value."""
        if key is not None and key in places:
            line, column = places[key]
            return f"{self.name}:{line}:{column}: "
        return f"{self.name}:{places[path][0]}: " if path is not None and path in places else ""

    def _places(self) -> Iterator[tuple[_Path, tuple[int, int]]]:
        """Yield the lines and columns of the outer values of a text that can be loaded."""
        text = self.text.removeprefix(_BOM)
        if is_json := _begins_like_json(text):
            try:
                json.loads(text)
            except ValueError:
                is_json = False
        if is_json:
            line, before = 1, 0
            for path, offset in json_places.offsets(text).items():
                line, before = line + text.count("\n", before, offset), offset
                yield path, (line, offset - text.rfind("\n", 0, offset))
            return
        places: dict[_Path, tuple[int, int]] = {}
        self._load_yaml(text, places)
        yield from places.items()


def _place_of(problem: str, indexes: dict[str, int], above: _Path) -> tuple[_Path | None, _Path | None]:
    """Return the path of what a problem concerns, and that of an unknown key in it; None for what is not known."""
    if problem.startswith("graph must be "):
        return above[:-1], None
    if problem.startswith("graph.nodes must be "):
        return above, None
    found = _NODE.match(problem)
    index = None if found is None else int(found["index"]) if found["index"] else indexes.get(found["id"])
    if found is None or index is None:
        return None, None
    node = (*above, index)
    if (key := _UNKNOWN_KEY.match(problem, found.end())) is None:
        return node, None
    section = key["section"].split(".") if key["section"] else ()
    return node, (*node, *section, ast.literal_eval(key["key"]))


def _begins_like_json(text: str) -> bool:
    return text.lstrip()[:1] in {"{", "["}


def _offset(text: str, line: int, column: int) -> int:
    start = 0
    for _ in range(line - 1):
        start = text.find("\n", start) + 1
    return min(start + column - 1, len(text))


def _line_at(text: str, offset: int) -> str:
    start, end = text.rfind("\n", 0, offset) + 1, text.find("\n", offset)
    return text[start:] if end < 0 else text[start:end]


def _may_show_secret(text: str, offset: int) -> bool:
    """Return whether the line of an offset, the one before it, or one that contains it looks like one with a secret."""
    start = text.rfind("\n", 0, max(0, text.rfind("\n", 0, offset))) + 1
    end = text.find("\n", offset)
    near = text[max(start, offset - 1_000) : offset + 1_000 if end < 0 else min(end, offset + 1_000)]
    lines = (near, *_outer_lines(text, offset))
    return any(is_secret_name(each) or SECRET_TEXT.search(each) for each in lines)


def _outer_lines(text: str, offset: int) -> Iterator[str]:
    """Yield the lines above an offset that contain its line, as their smaller indentation says."""
    inside = _indentation(_line_at(text, offset))
    end = text.rfind("\n", 0, offset)
    while end > 0 and inside > 0:
        start = text.rfind("\n", 0, end) + 1
        line, end = text[start : min(end, start + 1_000)], start - 1
        if line.strip() and not line.lstrip().startswith("#") and _indentation(line) < inside:
            inside = _indentation(line)
            yield line


def _indentation(line: str) -> int:
    """Return how far a line is indented, in half spaces: a list may be as far indented as the key that holds it."""
    return 2 * (len(line) - len(line.lstrip())) + line.lstrip().startswith("-")


def _with_remedy(problem: str, remedy: str) -> ConfigError:
    error = ConfigError(problem)
    error.add_note(remedy)
    return error
