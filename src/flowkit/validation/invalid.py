"""What is wrong with a value: where it stands, the value, and what it must be. Pure.

Every door says it in these words: settings, arguments, actions, requests over HTTP, RPC and Kafka, typed handlers, and
files that are imported.
"""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, get_type_hints

from pydantic import BaseModel
from pydantic_core import PydanticKnownError

from flowkit.masks import HIDDEN
from flowkit.text import count_of, kind_of, printable, shown, shown_address, suggestion, truncate
from flowkit.validation.values import Must

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from pydantic import ValidationError

    Path = Sequence[str | int]

SHOWN_PROBLEMS: Final = 5
"""How many problems of one value an error names."""

_PLACE_CHARS, _WANTED_CHARS, _NAME_CHARS = 200, 300, 100


def sentence(place: str, value: object, wanted: str) -> str:
    """Return the sentence that reports an invalid value. Pass HIDDEN for a value that must not be shown."""
    return f"{place} is {show(value)}; it must be {wanted}"


def show(value: object, hide: Callable[[str], str] = str) -> str:
    """Return a value as an error shows it. Of objects and lists, which may hold secrets, only the size is shown.

    Of a URL, which may hold a password, only the scheme and the hosts are shown, and of a text with one `…`. `hide`
    masks what is secret in a text.
    """
    if value is HIDDEN:
        return HIDDEN
    if isinstance(value, Mapping):
        return f"an object with {count_of(len(value), 'field')}"
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return f"a list of {count_of(len(value), 'value')}"
    if isinstance(value, BaseModel) or is_dataclass(value):
        return kind_of(value)
    return shown(shown_address(value) if isinstance(value, str) and "://" in value else value, hide)


# --- fields with `Must` in their types ----------------------------------------------------------------------------


def musts_of(record: Any) -> Mapping[str, tuple[Must, bool]]:
    """Return what the fields of a class must be, by name, and whether they may be None instead.

    A field that a subclass declares again keeps the rule of its base, unless it has one of its own.
    """
    return _musts_of(record)


@cache
def _musts_of(record: type) -> Mapping[str, tuple[Must, bool]]:
    found: dict[str, tuple[Must, bool]] = {}
    for each in reversed(record.__mro__):
        for name, hint in inspect.get_annotations(each).items():
            for must in getattr(hint := _resolved(each, name, hint), "__metadata__", ()):
                if isinstance(must, Must):
                    found[name] = must, type(None) in getattr(hint.__origin__, "__args__", ())
    return found


def _resolved(owner: type, name: str, hint: Any) -> Any:
    """Return the type of a field; None for one of a user's class that only type checkers know."""
    one = SimpleNamespace(__annotations__={name: hint})
    try:
        return get_type_hints(
            one, vars(sys.modules[owner.__module__]), dict(vars(owner)), include_extras=True
        )[name]
    except NameError:
        return None


def field_problem(record: type, name: str, value: object, place: str) -> str | None:
    """Return why a value cannot be that of a field, or None. `place` names the field for the error."""
    must, may_be_none = musts_of(record).get(name, (None, True))
    if must is None or (value is None and may_be_none):
        return None
    return problem_with(value, must, place, "none, or " if may_be_none else "")


def problem_with(value: object, must: Must, place: str, otherwise: str = "") -> str | None:
    """Return why a value is not what it must be, or None. `otherwise` says what it may be instead."""
    for where, found, wanted in must.find(value):
        return sentence(f"{place}{where}", found, f"{otherwise}{wanted}")
    return None


# --- errors of pydantic -------------------------------------------------------------------------------------------

_MUST: Final = {
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "be a number"),
    "finite_number": "be a finite number",
    **dict.fromkeys(("bool_type", "bool_parsing"), "be true or false"),
    "string_type": "be a text",
    **dict.fromkeys(("list_type", "tuple_type", "set_type", "frozen_set_type"), "be a list"),
    **dict.fromkeys(("dict_type", "mapping_type"), "be an object"),
    **dict.fromkeys(("model_type", "model_attributes_type", "dataclass_type"), "be an object"),
    "none_required": "be null",
    **dict.fromkeys(("literal_error", "enum"), "be {expected}"),
    "greater_than": "be more than {gt}",
    "greater_than_equal": "be at least {ge}",
    "less_than": "be less than {lt}",
    "less_than_equal": "be at most {le}",
    "multiple_of": "be a multiple of {multiple_of}",
    "string_too_short": "have at least {characters}",
    "string_too_long": "have at most {characters}",
    "too_short": "have at least {items}",
    "too_long": "have at most {items}",
    "string_pattern_mismatch": "match {pattern}",
}
"""What a value must be, by the type of pydantic's error and with its context. Of other errors, its text is shown."""
_VALIDATORS: Final = {"value_error": "Value error, ", "assertion_error": "Assertion failed, "}
"""Before the text of the error that a validator has raised, by the type of the error."""
_MISSING: Final = {"missing", "missing_argument"}
_UNKNOWN: Final = {"extra_forbidden", "unexpected_keyword_argument"}
_MOST_ERRORS: Final = 10_000
"""Beyond this number, an error only counts: pydantic lists all of its errors or none, which takes memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InvalidValue:
    """What is wrong with one value, according to pydantic."""

    path: Path
    """Keys and indexes from the whole to the value."""
    kind: str
    """The type of pydantic's error."""
    given: Any = field(repr=False)
    """The value itself, or what lacks it."""
    value: str | None
    """The value as an error shows it; None if there is none."""
    problem: str
    """What is wrong, as a sentence about "it"."""

    @property
    def is_missing(self) -> bool:
        """Whether there is no value."""
        return self.kind in _MISSING

    def text(self, root: str = "") -> str:
        """Return what is wrong, in one sentence. `root` names the whole."""
        place = place_of(self.path, root)
        if self.is_missing:
            return f"{place} is missing"
        return (
            f"{place}: {self.problem}" if self.value is None else f"{place} is {self.value}; {self.problem}"
        )


def place_of(path: Path, root: str = "") -> str:
    """Return where a value stands: `nodes[2].id`."""
    text = root
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return printable(truncate(text, _PLACE_CHARS)) or "it"


def problems_of(
    error: ValidationError,
    *,
    hides: Callable[[Path, Any], bool] = lambda path, value: False,
    hide: Callable[[str], str] | None = None,
    quotes: bool = True,
    known: Collection[str] = (),
) -> Iterator[InvalidValue]:
    """Yield what an error of pydantic says.

    `hides` decides whether a value is secret. The text of a validator, which may quote it, is then left out, unless it
    `quotes` nothing, or `hide` masks what is secret in texts. `known` are the fields of the whole, for a suggestion.
    """
    for found in error.errors(include_url=False):
        path, kind, value = found["loc"], found["type"], found["input"]
        shown: str | None = None
        if kind in _MISSING:
            problem = "it is missing"
        elif kind in _UNKNOWN:
            guess = suggestion(str(path[-1])[:_NAME_CHARS], known) if len(path) == 1 else ""
            problem = f"there is no such field{guess}"
        else:
            is_hidden = hides(path, value)
            shown = HIDDEN if is_hidden else show(value, hide or str)
            may_leak = is_hidden and quotes and hide is None
            problem = _must(found) or ("" if may_leak else _said(found))
        if hide is not None:
            path, problem = tuple(_masked(part, hide) for part in path), hide(problem)
        text = printable(truncate(problem or "it is not valid", _WANTED_CHARS))
        yield InvalidValue(path=path, kind=kind, given=value, value=shown, problem=text)


def describe(error: ValidationError, root: str = "", **options: Any) -> str:
    """Return what an error of pydantic says, in one line, with the options of `problems_of`.

    The first problems are named, and the others are counted.
    """
    count = error.error_count()
    if count > _MOST_ERRORS:
        return f"{count_of(count, 'value')} do not fit"
    found = [each.text(root) for each in islice(problems_of(error, **options), SHOWN_PROBLEMS)]
    rest = [count_of(count - len(found), "more problem")] if count > len(found) else []
    return "; ".join([*found, *rest])


def _masked(part: str | int, hide: Callable[[str], str]) -> str | int:
    masked = hide(str(part))
    return part if masked == str(part) else masked


def _must(found: Mapping[str, Any]) -> str | None:
    """Return what a value must be, for one of pydantic's own errors that has a row. A validator may use their names."""
    kind, context = found["type"], found.get("ctx") or {}
    if kind not in _MUST:
        return None
    try:
        own = PydanticKnownError(kind, context).message()
    except (KeyError, OverflowError, TypeError, ValueError):
        return None
    if own != found["msg"]:
        return None
    number = context.get("min_length", context.get("max_length", 0))
    counts = {"characters": count_of(number, "character"), "items": count_of(number, "item")}
    return f"it must {_MUST[kind].format_map({**context, **counts})}"


def _said(found: Mapping[str, Any]) -> str:
    """Return what pydantic, or a validator, says of a value."""
    text = str(found["msg"]).removeprefix(_VALIDATORS.get(found["type"], ""))
    wanted = text.removeprefix("Input should be")
    return text if wanted == text else f"it must be{wanted}"
