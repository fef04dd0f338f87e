"""Kinds of values in a graph: which values fit, what they must be in words, and their JSON Schema. Pure.

`flowkit.graph.fields` has a row for each field of a graph, with the kind of its value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

from flowkit import limits
from flowkit.text import did_you_mean, printed
from flowkit.validation.values import SHORTEST_SEC, SWITCH, YEAR_SEC, is_number, is_one_of, is_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

Schema = dict[str, Any]

END: Final = r"(?![\s\S])"
"""Matches only at the end of the text. In some languages `$` also matches before a final line break."""
ANY_VALUE: Final[Schema] = {}
TEXT_SCHEMA: Final[Schema] = {"type": "string"}


def _no_problems(value: object) -> Iterator[str]:
    """Yield nothing."""
    return iter(())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ValueKind:
    """A kind of values. Null means the same as a field that is left out."""

    schema: Schema
    """The JSON Schema of the values."""
    fits: Callable[[Any], object] = lambda _: True
    """Decides whether a value is one of them."""
    must: str = ""
    """What a value must be, for the end of an error."""
    hint: Callable[[Any], str] = lambda _: ""
    """Returns what is probably meant in place of a value that does not fit."""
    more: Callable[[Any], Iterator[str]] = _no_problems
    """Yields the problems of a value that fits which concern several of its parts."""
    counts: Callable[[Any], object] = lambda _: True
    """Decides whether the fields of an object count."""
    fields: Mapping[str, Field] = field(default_factory=dict)
    """The fields of an object by name."""
    remedies: Mapping[str, str] = field(default_factory=dict)
    """Advice for keys of other systems that no field replaces: the keys, separated by blanks, by the advice."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of an object of a graph."""

    name: str
    kind: ValueKind
    text: str = ""
    """What it means, in a few words, for editors."""
    words: str = ""
    """What other systems call it, with blanks between the words."""
    required: bool = False
    nullable: bool = True
    """Whether null means the same as a field that is left out, if it is not required."""

    def passes(self, value: object) -> object:
        """Return whether a look at the value as a whole is enough: it may be missing, or fits and has no parts."""
        kind = self.kind
        if value is None:
            return not self.required
        return not kind.fields and kind.more is _no_problems and kind.fits(value)

    @property
    def schema(self) -> Schema:
        """The JSON Schema of its value."""
        schema = allow_null(self.kind.schema) if self.nullable and not self.required else self.kind.schema
        return {"description": self.text, **schema} if self.text else schema


# --- kinds --------------------------------------------------------------------------------------------------------


def pattern_schema(pattern: str, *, any_case: bool = False) -> Schema:
    """Return the schema of a text that matches a pattern as a whole, for tools without flags of expressions."""
    if any_case:
        pattern = re.sub(r"(?<!\\)[a-z]", lambda letter: f"[{letter[0]}{letter[0].upper()}]", pattern)
    return {"type": "string", "pattern": f"^(?:{pattern}){END}"}


def one_of(*words: str) -> ValueKind:
    """Return the kind of one of these words."""
    last = words[-1]
    return ValueKind(
        schema={"enum": [*words]},
        fits=partial(is_one_of, words=words),
        must=f"{', '.join(map(repr, words[:-1]))} or {last!r}",
    )


def whole(least: int, most: int | None = None, must: str = "") -> ValueKind:
    """Return the kind of a whole number within bounds."""
    bound = {} if most is None else {"maximum": most}
    return ValueKind(
        schema={"type": "integer", "minimum": least, **bound},
        fits=partial(is_whole, least=least, most=most),
        must=must or f"a whole number from {least} to {most:,}",
    )


def number(least: float, most: float | None, must: str) -> ValueKind:
    """Return the kind of a number within bounds, possibly a fraction."""
    bound = {} if most is None else {"maximum": most}
    return ValueKind(
        schema={"type": "number", "minimum": least, **bound},
        fits=lambda value: is_number(value) and least <= value and (most is None or value <= most),
        must=must,
    )


def _is_text_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def texts(must: str) -> ValueKind:
    """Return the kind of a list of texts."""
    return ValueKind(schema={"type": "array", "items": TEXT_SCHEMA}, fits=_is_text_list, must=must)


ANYTHING: Final = ValueKind(schema=ANY_VALUE)
FLAG: Final = ValueKind(schema={"type": "boolean"}, fits=SWITCH.good, must=SWITCH.be)
TEXT: Final = ValueKind(schema=TEXT_SCHEMA, fits=lambda value: isinstance(value, str), must="a text")
OBJECT: Final = ValueKind(
    schema={"type": "object"}, fits=lambda value: isinstance(value, dict), must="an object"
)
SECONDS: Final = number(
    SHORTEST_SEC, YEAR_SEC, f"a number of seconds above 0 ({SHORTEST_SEC} at least, {YEAR_SEC:,} at most)"
)
EXPRESSION_SCHEMA: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": limits.CONDITION_CHARS}


# --- fields -------------------------------------------------------------------------------------------------------


def by_name(*fields: Field) -> dict[str, Field]:
    """Return fields by their names."""
    return {field.name: field for field in fields}


def allow_null(schema: Schema) -> Schema:
    """Return `schema` extended to accept null."""
    kinds = schema.get("type")
    return {**schema, "type": [kinds, "null"]} if kinds else {"anyOf": [schema, {"type": "null"}]}


def object_schema(fields: Mapping[str, Field], **more: Any) -> Schema:
    """Return the schema of an object that allows only these fields and keys that start with `x-`."""
    properties = {name: fields[name].schema for name in sorted(fields)}
    required = [name for name, field in fields.items() if field.required]
    own = {"type": "object", "properties": properties, "patternProperties": {"^x-": ANY_VALUE}}
    return {**own, "additionalProperties": False, **({"required": required} if required else {}), **more}


def object_of(fields: Mapping[str, Field], must: str, **more: Any) -> ValueKind:
    """Return the kind of an object with these fields, and keys that start with `x-`."""
    needs = {name for name, field in fields.items() if field.required}
    own = {
        "schema": object_schema(fields),
        "fits": lambda value: isinstance(value, dict) and needs <= value.keys(),
    }
    return ValueKind(**{**own, "must": must, "fields": fields, **more})


def field_problems(given: Field, value: Any, owner: str = "") -> Iterator[str]:
    """Yield the problems of the value of a field. `owner` names the object that has the field."""
    kind = given.kind
    if not kind.fits(value):
        yield f"{owner}{given.name} {printed(value)} must be {kind.must}{kind.hint(value)}"
        return
    if kind.fields and kind.counts(value):
        place = f"{owner}{given.name}"
        for problem in unknown_keys(value, kind):
            yield f"{place}: {problem}"
        for name, part in kind.fields.items():
            if not part.passes(held := value.get(name)):
                yield from field_problems(part, held, f"{place}.")
    yield from kind.more(value)


def unknown_keys(given: Iterable[Any], kind: ValueKind, others: Collection[str] = ()) -> Iterator[str]:
    """Yield the keys of an object that are none of its fields, with what to write instead. `others` are known, too."""
    for key in given:
        if key not in kind.fields and key not in others and not str(key).startswith("x-"):
            yield f"unknown key {printed(key)}; {_suggest_key(key, kind, others)}"


def _suggest_key(key: object, kind: ValueKind, others: Collection[str]) -> str:
    remedy = _remedies(kind).get(_bare(str(key)))
    return remedy or did_you_mean(key, {*kind.fields, *others}, otherwise="start your own keys with 'x-'")


@cache
def _remedies(kind: ValueKind) -> Mapping[str, str]:
    """Return what to write instead of keys of other systems, by their bare words."""
    fields = {f"did you mean {name!r}?": each.words for name, each in kind.fields.items()}
    every = {**kind.remedies, **fields}
    return {_bare(word): remedy for remedy, words in every.items() for word in words.split()}


def _bare(word: str) -> str:
    """Return a name in lower case and without separators, so that `maxRetries` and `max_retries` are one."""
    return re.sub("[_ -]", "", word).lower()
