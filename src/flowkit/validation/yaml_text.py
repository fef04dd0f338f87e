"""Read the value of a YAML text: YAML 1.2 with its core schema, as far as JSON has the value. Pure.

libyaml splits a text into events, and this module makes the value from them. The loaders of PyYAML follow YAML 1.1, in
which `no` is false and `2026-01-31` a date.
"""

from __future__ import annotations

import re
from math import isinf
from typing import TYPE_CHECKING, Any, Final

import yaml
from yaml import events

from flowkit.errors import ConfigError
from flowkit.limits import YAML_LEVELS, YAML_VALUES
from flowkit.text import printed, shown_path
from flowkit.validation.json_places import PLACE_LEVELS

if TYPE_CHECKING:
    from collections.abc import Callable

_PARSER: Final[Any] = getattr(yaml, "CBaseLoader", None)
"""The parser of libyaml; None if PyYAML was built without it. PyYAML's own parser is slow, and reads some texts
otherwise."""

Path = tuple[str | int, ...]
"""The keys and indexes that lead to a value."""

Places = dict[Path, tuple[int, int]]
"""The line and the column, from 1, at which the key of a value begins, or the value itself in a list."""

_TAG: Final = "tag:yaml.org,2002:"
_CONSTANTS: Final = {
    **dict.fromkeys(["", "~", "null", "Null", "NULL"]),
    **dict.fromkeys(["true", "True", "TRUE"], True),
    **dict.fromkeys(["false", "False", "FALSE"], False),
}
_NUMBER_STARTS: Final = frozenset("0123456789+-.")
_INTEGER: Final = re.compile(r"[-+]?[0-9]+")
_OTHER_BASE: Final = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_DIGITS: Final = 4_300
"""Digits of the longest number that Python reads."""
_DIGITS_OF_OTHER_BASE: Final = 3_500
"""The same for a number of base 8 or 16, which has at most 1.21 times as many digits in base 10."""
_INTEGERS: Final = ((_INTEGER, 10, _DIGITS), (_OTHER_BASE, 0, _DIGITS_OF_OTHER_BASE))
_NOT_FINITE: Final = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_UNREADABLE: Final = re.compile(
    "[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
)
"""Characters that YAML does not allow, and U+0085, U+2028 and U+2029, which are line breaks for libyaml only."""

_TAG_DIRECTIVE: Final = re.compile(r"^%TAG\b", re.MULTILINE)
"""libyaml compares each of these lines with all others."""

_REMEDIES: Final = {
    "mapping values are not allowed in this context": "check the indentation, or put a text with `: ` in quotes",
    "did not find expected key": "check the indentation, or put a text with quotes or `: ` in quotes",
    "did not find expected '-' indicator": "check the indentation",
    "could not find expected ':'": "write `key: value`",
    "did not find expected ',' or ']'": "put a comma between two values, or close the list",
    "did not find expected ',' or '}'": "put a comma between two values, or close the object",
    "found a tab character that violates indentation": "indent with spaces",
    "found a tab character where an indentation space is expected": "indent with spaces",
    "did not find expected node content": "write a value, or close the list or object",
    "found invalid Unicode character escape code": r"write the character itself, or its code as in \U0001f600",
}


_CONTEXTS: Final = {
    "while parsing a block collection": "in the list",
    "while parsing a block mapping": "in the object",
    "while parsing a flow mapping": "in the object",
    "while parsing a flow sequence": "in the list",
    "while scanning a plain scalar": "in the text",
    "while scanning a simple key": "in the key",
}


class YamlRefused(ValueError):
    """A text is not YAML, or has a value that FlowKit does not read, at an offset in the text."""

    def __init__(self, problem: str, mark: Any, *, is_yaml: bool = True, shown: str = "") -> None:
        self.problem, self.is_yaml = problem, is_yaml
        self.shown = shown
        """The part of the problem that shows a value of the text; empty if it shows none."""
        self.offset: int = mark if isinstance(mark, int) else mark.index
        super().__init__(problem)


def load_yaml(text: str, places: Places | None = None) -> Any:
    """Return the value of a YAML text with one document. Add the places of its outer values to `places`.

    Raise YamlRefused if it is not valid, or has something that JSON lacks, a key twice, or too much of anything, and
    ConfigError if PyYAML lacks libyaml.
    """
    if _PARSER is None:
        raise ConfigError(
            "PyYAML was built without libyaml; install its wheel: pip install --only-binary :all: pyyaml"
        )
    if found := _UNREADABLE.search(text):
        problem = f"a YAML text cannot contain the character {found[0]!a}"
        raise YamlRefused(f"{problem}; write it as an escape in double quotes", found.start())
    if found := _TAG_DIRECTIVE.search(text):
        raise YamlRefused("FlowKit reads no directive %TAG; remove it", found.start())
    composer = _Composer(text, places)
    try:
        for event in yaml.parse(text, Loader=_PARSER):
            composer.take(event)
    except yaml.MarkedYAMLError as error:
        raise _explain(error, text) from None
    return composer.value


def _explain(error: yaml.MarkedYAMLError, text: str) -> YamlRefused:
    mark: Any = error.problem_mark or error.context_mark
    problem = error.problem or error.context or "it cannot be read"
    if problem == "exceeded maximum nesting depth":
        return YamlRefused(_too_deep(), mark)
    if problem == "found unexpected end of stream":
        problem = "the text in quotes that begins here has no end"
        return YamlRefused(problem, error.context_mark or mark, is_yaml=False)
    if "cannot start any token" in problem:
        character = text[mark.index : mark.index + 1]
        problem, remedy = f"no value starts with {character!r}", "put the text in quotes"
        if character == "\t":
            problem, remedy = "no value starts with a tab", "indent with spaces"
    else:
        remedy = _REMEDIES.get(problem, "")
    begin: Any = error.context_mark
    if error.context and begin and begin.line != mark.line:
        context = _CONTEXTS.get(error.context, error.context)
        problem = f"{problem} {context} that begins in line {begin.line + 1}"
    return YamlRefused(f"{problem}; {remedy}" if remedy else problem, mark, is_yaml=False)


class _Frame:
    """An object or a list whose end is not yet read."""

    __slots__ = ("anchor", "before", "key", "levels", "lines", "takes_key", "value")

    def __init__(self, value: Any, anchor: str | None, before: int) -> None:
        self.value = value
        self.anchor = anchor
        self.before = before
        """How many values were read before this one."""
        self.levels = 1
        self.key = ""
        """The latest key of an object."""
        self.takes_key = type(value) is dict
        """Whether a key comes next, and not a value."""
        self.lines: dict[str, int] = {}
        """The lines of the keys of an object."""


class _Composer:
    """Makes the value of a document from its events."""

    def __init__(self, text: str, places: Places | None) -> None:
        self.value: Any = None
        self._text, self._places = text, places
        self._frames: list[_Frame] = []
        self._anchors: dict[str, tuple[Any, int, int] | None] = {}
        """By anchor the value, how many values and how many levels it has; None until its end is read."""
        self._documents = self._values = 0
        self._methods: dict[type[events.Event], Callable[[Any], None]] = {
            events.ScalarEvent: self._scalar,
            events.MappingStartEvent: self._start,
            events.SequenceStartEvent: self._start,
            events.MappingEndEvent: self._end,
            events.SequenceEndEvent: self._end,
            events.AliasEvent: self._alias,
            events.DocumentStartEvent: self._document,
            events.StreamEndEvent: self._stream_end,
        }

    def take(self, event: events.Event) -> None:
        """Read the next event."""
        if method := self._methods.get(type(event)):
            method(event)

    # --- documents ----------------------------------------------------------------------------------------------

    def _document(self, event: events.DocumentStartEvent) -> None:
        self._documents += 1
        if self._documents > 1:
            raise YamlRefused("a second document begins; put each into a file of its own", event.start_mark)
        if event.version == (1, 1):
            raise YamlRefused(
                "FlowKit reads YAML 1.2; remove the line, and check values such as `no`", event.start_mark
            )

    def _stream_end(self, event: events.StreamEndEvent) -> None:
        if not self._documents:
            raise YamlRefused("the text has no value", event.start_mark)

    # --- values -------------------------------------------------------------------------------------------------

    def _scalar(self, event: events.ScalarEvent) -> None:
        value = event.value if not event.implicit[0] and event.tag is None else self._resolve(event)
        if event.anchor is not None:
            self._check_anchor(event)
            self._anchors[event.anchor] = (value, 1, 0)
        self._add(value, event, 1)

    def _check_anchor(self, event: events.ScalarEvent) -> None:
        """Raise YamlRefused for an anchor such as `&a:b`, of which libyaml takes only `&a` for the anchor."""
        mark: Any = event.start_mark
        name = f"&{event.anchor}"
        end = self._text.index(name, mark.index) + len(name)
        if self._text[end : end + 1].strip(" \t\r\n,]}"):
            raise YamlRefused("the name of an anchor has only letters, digits, - and _; rename it", mark)

    def _start(self, event: events.CollectionStartEvent) -> None:
        is_object = type(event) is events.MappingStartEvent
        if event.tag not in (None, "!", f"{_TAG}{'map' if is_object else 'seq'}"):
            raise _foreign_tag(event.tag, event)
        frame = _Frame({} if is_object else [], event.anchor, self._values)
        self._add(frame.value, event, 1)
        self._frames.append(frame)
        if len(self._frames) > YAML_LEVELS:
            raise YamlRefused(_too_deep(), event.start_mark)
        if event.anchor is not None:
            self._anchors[event.anchor] = None

    def _end(self, event: events.CollectionEndEvent) -> None:
        ended = self._frames.pop()
        if ended.anchor is not None:
            self._anchors[ended.anchor] = (ended.value, 1 + self._values - ended.before, ended.levels)
        if self._frames:
            self._frames[-1].levels = max(self._frames[-1].levels, ended.levels + 1)

    def _alias(self, event: events.AliasEvent) -> None:
        """Add a copy of what an alias stands for, so that a change of one does not change the other."""
        if event.anchor not in self._anchors:
            shown = f"&{event.anchor}"
            problem = f"nothing before it has the anchor {shown}; add it, or put the text in quotes"
            raise YamlRefused(problem, event.start_mark, shown=shown)
        if (held := self._anchors[event.anchor]) is None:
            raise YamlRefused("the value contains itself by this alias; remove it", event.start_mark)
        value, values, levels = held
        if len(self._frames) + levels > YAML_LEVELS:
            raise YamlRefused(_too_deep(), event.start_mark)
        if self._frames:
            self._frames[-1].levels = max(self._frames[-1].levels, levels + 1)
        self._add(value, event, values)

    def _add(self, value: Any, event: events.NodeEvent, values: int) -> None:
        """Add a value to the innermost object or list. It counts as `values` values."""
        self._values += values
        if self._values > YAML_VALUES:
            problem = f"the text has more than {YAML_VALUES:,} values, with those that its aliases stand for"
            raise YamlRefused(f"{problem}; use fewer", event.start_mark)
        frame = self._frames[-1] if self._frames else None
        if frame is not None and frame.takes_key:
            frame.key, frame.takes_key = self._read_key(value, event, frame), False
            return
        if self._places is not None and len(self._frames) <= PLACE_LEVELS:
            mark: Any = event.start_mark
            self._places.setdefault(self._path(), (mark.line + 1, mark.column + 1))
        if type(event) is events.AliasEvent:
            value = _copy(value)
        if frame is None:
            self.value = value
        elif type(frame.value) is dict:
            frame.value[frame.key] = value
            frame.takes_key = True
        else:
            frame.value.append(value)

    def _read_key(self, key: object, event: events.NodeEvent, frame: _Frame) -> str:
        mark: Any = event.start_mark
        if not isinstance(key, str):
            raise YamlRefused(f"a key is {_kind(key)}; {_quoted(key, event)}", mark)
        if self._text[mark.index - 1 : mark.index] == "?":  # for libyaml, the end of `[?a]` is a key
            raise YamlRefused("put a text that begins with ? in quotes", mark)
        if key == "<<" and isinstance(event, events.ScalarEvent) and event.implicit[0]:
            problem = "`<<` is no merge key in YAML 1.2; write the keys out, or use aliases for single values"
            raise YamlRefused(problem, mark)
        if key in frame.lines:
            first = frame.lines[key]
            place = shown_path(spelled(self._path())) or "the top level"
            raise YamlRefused(
                f"{place} has the key {printed(key)} twice, first on line {first}; remove one", mark
            )
        frame.lines[key] = mark.line + 1
        if self._places is not None and len(self._frames) <= PLACE_LEVELS:
            self._places[(*self._path(), key)] = (mark.line + 1, mark.column + 1)
        return key

    def _path(self) -> Path:
        """Return the path of the value that comes next, or that of the object whose key does."""
        steps = [len(each.value) - 1 if type(each.value) is list else each.key for each in self._frames]
        if self._frames and self._frames[-1].takes_key:
            steps.pop()
        elif steps and isinstance(steps[-1], int):
            steps[-1] += 1
        return tuple(steps)

    # --- scalars ------------------------------------------------------------------------------------------------

    def _resolve(self, event: events.ScalarEvent) -> Any:
        """Return the value of a scalar without quotes, or with a tag."""
        text, tag = event.value, event.tag
        if tag == "!" or tag == f"{_TAG}str":
            return text
        value = self._plain(text, event)
        if tag is None:
            return value
        kind = str(tag).removeprefix(_TAG)
        if kind == "float" and type(value) is int:
            return float(value)
        if kind not in _KINDS:
            raise _foreign_tag(tag, event)
        if type(value) is not _KINDS[kind]:
            problem = f"{printed(text)} is no {kind}; correct it, or remove the tag"
            raise YamlRefused(problem, event.start_mark, shown=printed(text))
        return value

    def _plain(self, text: str, event: events.ScalarEvent) -> Any:
        """Return the value of a text without quotes by the core schema."""
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if text[0] not in _NUMBER_STARTS:
            return text
        for form, base, digits in _INTEGERS:
            if form.fullmatch(text):
                if len(text) > digits:
                    problem = f"numbers have at most {digits:,} digits; put a text in quotes"
                    raise YamlRefused(problem, event.start_mark)
                return int(text, base)
        return self._float(text, event)

    def _float(self, text: str, event: events.ScalarEvent) -> Any:
        """Return the number, if the text is one, and otherwise the text."""
        if _NOT_FINITE.fullmatch(text):
            problem = f"JSON has no number {printed(text)}; use null, or put a text in quotes"
            raise YamlRefused(problem, event.start_mark, shown=printed(text))
        if not _FLOAT.fullmatch(text):
            return text
        if isinf(number := float(text)):
            problem = f"{printed(text)} is beyond the range of numbers; put it in quotes"
            raise YamlRefused(problem, event.start_mark, shown=printed(text))
        return number


_KINDS: Final[dict[str, type[Any]]] = {"null": type(None), "bool": bool, "int": int, "float": float}


def spelled(path: Path) -> str:
    """Return a path as errors show it, such as `nodes[0].io`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


def _copy(value: Any) -> Any:
    match value:
        case dict():
            return {key: _copy(held) for key, held in value.items()}
        case list():
            return [_copy(held) for held in value]
    return value


def _kind(key: object) -> str:
    match key:
        case None:
            return "null"
        case bool():
            return "true or false"
        case dict() | list():
            return "an object or a list"
    return "a number"


def _quoted(key: object, event: events.NodeEvent) -> str:
    if isinstance(event, events.ScalarEvent) and event.value:
        return f'put it in quotes: "{event.value[:40]}"'
    return "keys are texts"


def _foreign_tag(tag: str, event: events.NodeEvent) -> YamlRefused:
    remedy = "remove it" if tag.startswith(_TAG) else "put a text that begins with ! in quotes"
    shown = printed(tag.replace(_TAG, "!!"))
    return YamlRefused(
        f"the tag {shown} is none of YAML's core schema; {remedy}", event.start_mark, shown=shown
    )


def _too_deep() -> str:
    return f"the value is nested deeper than {YAML_LEVELS} levels; make it flatter"
