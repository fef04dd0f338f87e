"""Types of users as JSON: reads values of a type and writes them, with errors that name the field. Pure."""

from __future__ import annotations

import json
import math
import re
import typing
from collections.abc import Mapping
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, SecretBytes, SecretStr, TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticUserError
from pydantic_core import PydanticSerializationError, from_json, to_json

from flowkit.activities.core_schemas import (
    contains_models,
    find_lost,
    has_any,
    is_lossless,
    may_be_infinite,
    may_merge_keys,
    names_sequences,
    needs_round_trip,
    reads_objects,
)
from flowkit.activities.json_schemas import ContractSchema, RoundTripSchema
from flowkit.activities.lost_values import Difference, LostValue, find_change, find_non_finite
from flowkit.errors import ConfigError
from flowkit.masks import HIDDEN, hide_named, hides_value
from flowkit.models.metas import VALUE, Meta, make_meta
from flowkit.text import printable, printed, truncate
from flowkit.validation.invalid import describe, place_of
from flowkit.validation.json_keys import TOO_DEEP, EqualKeys, is_too_deep, to_json_types

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_VALUE_CHARS = 80
_OBJECTS = frozenset({"object"})

_NO_NUMBER = "return None in its place, or set ser_json_inf_nan='strings' in the model_config of its model"
_NO_FIELD = "name the class that has it as the type, in place of the one that it inherits"
_NO_VALUE = "let the validators and serializers of its type keep it"
_NO_KIND = (
    "name one type in place of several, or tell the members of a union apart by a field, such as "
    "kind: Literal['dog']"
)


class _Shape(StrEnum):
    """What the JSON of a type is."""

    OBJECT = "object"
    OTHER = "other"
    """Never an object: a number, a text, a list, null."""
    MIXED = "mixed"
    ANY = "any"
    """Not known: the type is Any, or pydantic cannot describe it."""


class JsonType:
    """A type that a user has named. Values are validated as JSON, so that strict types accept dates and sets, too."""

    def __init__(self, kind: Any, owner: str) -> None:
        """Prepare the type. Raise ConfigError, which names `owner`, if pydantic cannot validate it."""
        self.kind = kind
        self.name = type_name(kind)
        self.is_any = kind is Any
        self._is_class = isinstance(kind, type) and typing.get_origin(kind) is None
        self._is_model = self._is_class and (
            issubclass(kind, BaseModel) or hasattr(kind, "__dataclass_fields__")
        )
        try:
            self.adapter: TypeAdapter[Any] = TypeAdapter(kind)
        except PydanticUserError as error:
            raise ConfigError(
                f"{owner}: pydantic cannot validate {self.name}: {error.message.partition(chr(10))[0]}; use a "
                "pydantic model, a dataclass, a TypedDict or a type of JSON values"
            ) from None

    def schema(self, mode: Any) -> dict[str, Any] | None:
        """Return the JSON Schema for `validation` or `serialization`; None if pydantic cannot describe the type."""
        if self.is_any:
            return None
        try:
            generator = RoundTripSchema if self._round_trips else ContractSchema
            return self.adapter.json_schema(mode=mode, schema_generator=generator)
        except (PydanticInvalidForJsonSchema, PydanticUserError):
            return None

    @cached_property
    def _input_shape(self) -> _Shape:
        return _shape_of(self.schema("validation"))

    @cached_property
    def is_list(self) -> bool:
        """Whether a value can be a list."""
        return "array" in _json_types(self.schema("validation"))

    def from_json(self, value: Any) -> Any:
        """Return the value for one in JSON types. Raise ValidationError if it does not fit."""
        if self.is_any:
            return value
        if self._reads_objects:
            return self.adapter.validate_python(value)
        return self.adapter.validate_json(to_json(value, fallback=str))

    @cached_property
    def _reads_objects(self) -> bool:
        """Whether objects in JSON types give the same value as their JSON text, which takes longer to read."""
        try:
            return reads_objects(self.adapter.core_schema)
        except PydanticUserError:
            return False

    def from_meta(self, meta: Any) -> Any:
        """Return the value that a `meta` holds. Raise ValidationError if it does not fit."""
        return self.from_json(self._unwrap(meta))

    def _unwrap(self, meta: Any) -> Any:
        """Return the JSON of the value that a `meta` holds, as its writer says, or else as the type suggests.

        A type that has only objects, or none, reads either form.
        """
        if not isinstance(meta, dict) or meta.keys() != {VALUE}:
            return meta
        shape = self._input_shape
        if shape in (_Shape.MIXED, _Shape.ANY) and isinstance(meta, Meta):
            unwraps = meta.wrapped
        else:
            unwraps = shape in (_Shape.OTHER, _Shape.MIXED)
        return meta[VALUE] if unwraps else dict(meta)

    def to_meta(self, value: Any) -> dict[str, Any]:
        """Return the `meta` for a value: its JSON, in an object `{"value": …}` if it is none.

        Raise ValueError if the value is none of the type, or has no JSON, and LostValue if a reader would get another
        value from its JSON.
        """
        return make_meta(self._to_json(value, reveals=False))

    def to_input(self, value: Any) -> dict[str, Any]:
        """Return the `meta` for a value that FlowKit is given, with its secrets, which `to_meta` masks.

        Raise ValueError as `to_meta` does.
        """
        return make_meta(self._to_json(value, reveals=self.holds_secrets))

    def _to_json(self, value: Any, *, reveals: bool) -> Any:
        if self.is_any:
            stored = to_json_types(value)
            if (found := _non_finite(stored)) is not None:
                raise LostValue(found)
            return stored
        is_own = self._is_model and isinstance(value, self.kind)
        checked = value if is_own else self.adapter.validate_python(value)
        stored = self._dump(checked)
        if reveals:
            stored = _reveal(stored, self.adapter.dump_python(checked, by_alias=True))
        if self._may_be_infinite and (found := _non_finite(stored)) is not None:
            stored = self._dump_non_finite(checked, found)
        if not self._is_kept(checked, stored):
            self._check(checked, stored)
        return stored

    def _is_kept(self, value: Any, stored: Any) -> bool:
        """Return whether the type proves that its JSON keeps a value. What it cannot prove is to be compared."""
        if not self._is_lossless or self.holds_secrets:
            return False
        if not self._contains_models and not (self._is_model and type(value) is not self.kind):
            return True
        whole = self.adapter.dump_python(
            value, mode="json", by_alias=True, warnings="none", serialize_as_any=True
        )
        return bool(whole == stored)

    def _dump_non_finite(self, value: Any, found: Difference) -> Any:
        """Return the JSON of a value with the number `found`, which JSON lacks, if its type writes another form."""
        text = self.adapter.dump_json(value, by_alias=True, round_trip=self._round_trips, warnings="none")
        stored = from_json(text)
        try:
            self._check(value, stored)
        except LostValue:
            raise LostValue(found) from None
        if find_non_finite(stored) is not None:
            raise LostValue(found)
        return stored

    def _check(self, value: Any, stored: Any) -> None:
        """Raise LostValue if a reader gets another value from the JSON of one."""
        try:
            read = self.from_json(stored)
        except ValidationError as error:
            raise LostValue from error
        change = find_change(
            value,
            read,
            is_open=self._is_open,
            has_same_json=lambda: bool(self._dump(read) == stored),
            takes_tuples=names_sequences(self.adapter.core_schema),
        )
        if change is not None:
            raise LostValue(change)

    @cached_property
    def _is_lossless(self) -> bool:
        return is_lossless(self.adapter.core_schema)

    @cached_property
    def _contains_models(self) -> bool:
        return contains_models(self.adapter.core_schema)

    @cached_property
    def _may_be_infinite(self) -> bool:
        return may_be_infinite(self.adapter.core_schema)

    @cached_property
    def _is_open(self) -> bool:
        return has_any(self.adapter.core_schema)

    @cached_property
    def _round_trips(self) -> bool:
        """Whether the JSON of a value has only what the type reads, and so no computed fields."""
        return needs_round_trip(self.adapter.core_schema)

    def lost_problem(self, what: str) -> str | None:
        """Return why JSON would lose a field of each value of the type, which the error calls `what`, or None."""
        return lost_problem(what, self.adapter)

    @cached_property
    def holds_secrets(self) -> bool:
        """Whether the JSON of a value has a mask in place of a secret, as for pydantic's SecretStr."""
        return _has_mask(self.schema("serialization"))

    def _dump(self, value: Any) -> Any:
        """Return the JSON of a value. For one with a field of another type, raise the ValidationError that names it.

        Raise EqualKeys if two keys of a dict are the same text in JSON.
        """
        if self._may_merge_keys:
            to_json_types(value)
        trip = self._round_trips
        try:
            return self.adapter.dump_python(
                value, mode="json", by_alias=True, round_trip=trip, warnings="error"
            )
        except PydanticSerializationError:
            self.adapter.validate_json(
                self.adapter.dump_json(value, by_alias=True, round_trip=trip, warnings="none", fallback=str)
            )
            raise

    @cached_property
    def _may_merge_keys(self) -> bool:
        """Whether a value may have a dict with keys that are no text."""
        try:
            return may_merge_keys(self.adapter.core_schema)
        except PydanticUserError:
            return True

    def read_again(self, value: Any) -> Any:
        """Return what a reader gets for a value: read from its JSON, without the fields that only have defaults.

        Raise ValidationError if it cannot be read.
        """
        trip = self._round_trips
        try:
            return self.adapter.validate_json(
                self.adapter.dump_json(value, by_alias=True, round_trip=trip, exclude_unset=True)
            )
        except ValidationError:
            return self.adapter.validate_json(self.adapter.dump_json(value, by_alias=True, round_trip=trip))

    def problems(self, error: ValueError, hide: Callable[[str], str]) -> str:
        """Return what is wrong, for people: the first problems with field, value and what is expected."""
        if isinstance(error, LostValue):
            return self._lost(error, hide)
        if not isinstance(error, ValidationError):
            return hide(_problem_of_json(error))
        return describe(error, hides=self._hides, hide=hide)

    def _lost(self, error: LostValue, hide: Callable[[str], str]) -> str:
        """Return what JSON would lose, and how to keep it."""
        change = error.change
        if change is None:
            why = self.problems(error.__cause__, hide) if isinstance(error.__cause__, ValueError) else ""
            return f"it cannot be read from its own JSON: {why}; let its serializers write what its validators read"
        place = hide(place_of(change.place))
        given, read = change.given, change.read
        shown = [HIDDEN if self._secrets is None else shown_value(each, hide) for each in (given, read)]
        if isinstance(given, float) and not math.isfinite(given):
            return f"{place} is {shown_value(given, str)}, which JSON does not have; {_NO_NUMBER}"
        if change.is_missing:
            return f"{place} is {shown[0]}, and would be missing; {_NO_FIELD}"
        if isinstance(given, type(read)):
            return f"{place} is {shown[0]}, and would be read as {shown[1]}; {_NO_VALUE}"
        kinds = (type_name(type(each)) for each in (given, read))
        return "{} is of the type {}, and would be read as {}; {}".format(place, *kinds, _NO_KIND)

    def _hides(self, path: Sequence[str | int], value: Any) -> bool:
        """Return whether an error must not show the value at a path."""
        return self._secrets is None or hides_value(self._secrets, path, value)

    @cached_property
    def _secrets(self) -> dict[str, Any] | None:
        """The JSON Schema, which says which fields are secret; None if all values must be hidden."""
        schema = self.schema("validation")
        config = getattr(self.kind, "model_config", None) or {}
        if config.get("hide_input_in_errors") or schema is None:
            return None
        return schema


def lost_problem(what: str, adapter: TypeAdapter[Any]) -> str | None:
    """Return why JSON would lose a field of each value of a type, which the error calls `what`, or None."""
    try:
        lost = find_lost(adapter.core_schema)
    except PydanticUserError:
        return None
    if lost is None:
        return None
    return (
        f"{what} has the field {lost!r}, which its own JSON does not have under a name that it reads; use 'alias' for "
        "another name, and no 'exclude'"
    )


def _non_finite(stored: Any) -> Difference | None:
    """Return the first number in a value of JSON types that JSON does not have. Searches only if there is one."""
    try:
        text = to_json(stored, inf_nan_mode="constants")
    except ValueError:  # half of a surrogate pair, which the caller finds
        return find_non_finite(stored)
    return find_non_finite(stored) if b"NaN" in text or b"Infinity" in text else None


def _has_mask(schema: Any) -> bool:
    """Return whether a JSON Schema is that of a mask in place of a secret, or has one below it."""
    if isinstance(schema, list):
        return any(map(_has_mask, schema))
    if not isinstance(schema, dict):
        return False
    is_mask = schema.get("format") == "password" and schema.get("writeOnly") is True
    return is_mask or any(map(_has_mask, schema.values()))


def _reveal(stored: Any, plain: Any) -> Any:
    """Return JSON with the secrets of the same value as Python objects."""
    if isinstance(plain, (SecretStr, SecretBytes)):
        secret = plain.get_secret_value()
        return secret.decode() if isinstance(secret, bytes) else secret
    if isinstance(stored, dict) and isinstance(plain, Mapping):
        return {name: _reveal(held, plain.get(name)) for name, held in stored.items()}
    if isinstance(stored, list) and isinstance(plain, (list, tuple)) and len(stored) == len(plain):
        return list(map(_reveal, stored, plain))
    return stored


_CALL_FAILED = re.compile(r"Error calling function `(?P<name>.*?)`: (?P<error>.*)", re.DOTALL)


def _problem_of_json(error: ValueError) -> str:
    """Return why a value has no JSON, for people."""
    text = str(error)
    if isinstance(error, EqualKeys) or text.startswith("Unable to serialize"):
        return printable(text)
    if failed := _CALL_FAILED.search(text):
        return printable(truncate(f"the serializer {failed['name']} raised {failed['error']}", 200))
    if isinstance(error, UnicodeDecodeError):
        return "it has bytes that are not UTF-8; set ser_json_bytes and val_json_bytes to 'base64' in its model_config"
    if is_too_deep(error):
        return TOO_DEEP
    if "surrogates not allowed" in text:
        return "it has a text with half of a surrogate pair, which is not valid UTF-8"
    return "a field has a value of another type than it names"


def type_name(kind: Any) -> str:
    """Return the name of a type as the user writes it: `Page`, `list[Page]`."""
    if isinstance(kind, type) and typing.get_origin(kind) is None:
        return kind.__name__
    return printable(re.sub(r"(?:[\w<>]+\.)+(?=\w)", "", repr(kind)))


def _json_types(schema: Any) -> frozenset[str]:
    """Return the JSON types that a schema allows; `any` if it does not say."""
    if not isinstance(schema, dict):
        return frozenset({"any"})
    found: set[str] = set()
    for each in expanded(schema, schema.get("$defs") or {}):
        kind = each.get("type")
        if isinstance(kind, str):
            found.add(kind)
        elif isinstance(kind, list):
            found.update(kind)
        elif "const" in each or "enum" in each:
            values = each.get("enum", [each.get("const")])
            found.update("object" if isinstance(value, dict) else "other" for value in values)
        else:
            found.add("any")
    return frozenset(found)


def expanded(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the schemas of which a value fits one, with `$ref`, `anyOf` and `oneOf` resolved."""
    waiting, seen = [schema], set[str]()
    while waiting:
        each = waiting.pop()
        if "$ref" in each:
            name = str(each["$ref"]).rpartition("/")[2]
            if name not in seen:
                seen.add(name)
                waiting.append(definitions.get(name, {}))
        elif alternatives := [*each.get("anyOf", ()), *each.get("oneOf", ()), *each.get("allOf", ())]:
            waiting.extend(alternatives)
        else:
            yield each


def _shape_of(schema: dict[str, Any] | None) -> _Shape:
    found = _json_types(schema)
    if "any" in found:
        return _Shape.ANY if found == {"any"} else _Shape.MIXED
    if found == _OBJECTS:
        return _Shape.OBJECT
    return _Shape.MIXED if found & _OBJECTS else _Shape.OTHER


def shown_value(value: Any, hide: Callable[[str], str]) -> str:
    """Return a value as JSON with its type, cut. Hidden values are replaced before the cut, which could split them."""
    try:
        text = json.dumps(hide_named("", value), ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        text = printed(value)
    return f"{printable(truncate(hide(text), _VALUE_CHARS))} ({_json_kind(value)})"


def _json_kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "text"
        case list() | tuple():
            return "list"
        case dict():
            return "object"
    return type(value).__name__
