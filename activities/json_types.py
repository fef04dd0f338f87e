"""Types of users as JSON: reads values of a type and writes them, with errors that name the field. Pure."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Mapping
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, SecretBytes, SecretStr, TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticUserError
from pydantic_core import PydanticSerializationError, to_json

from flowkit.activities.json_schemas import ContractSchema
from flowkit.errors import ConfigError
from flowkit.models.metas import VALUE, Meta, make_meta
from flowkit.text import printable, printed, truncate
from flowkit.validation.json_keys import EqualKeys, to_json_types

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SHOWN_PROBLEMS = 3
"""How many problems an error lists."""
_MOST_PROBLEMS = 10_000
"""Beyond this number, an error only counts the problems: pydantic lists all of them or none, which takes memory."""
_VALUE_CHARS = 80
_HIDDEN = "(hidden)"
_OBJECTS = frozenset({"object"})


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
            return self.adapter.json_schema(mode=mode, schema_generator=ContractSchema)
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
            return _reads_objects(self.adapter.core_schema)
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

        Raise ValueError if the value is none of the type, or has no JSON.
        """
        if self.is_any:
            stored = to_json_types(value)
        else:
            checked = (
                value
                if self._is_model and isinstance(value, self.kind)
                else self.adapter.validate_python(value)
            )
            stored = self._dump(checked)
        return make_meta(stored)

    def to_input(self, value: Any) -> dict[str, Any]:
        """Return the `meta` for a value that FlowKit is given, with its secrets, which `to_meta` masks.

        Raise ValueError as `to_meta` does.
        """
        stored = self.to_meta(value)
        if not self.holds_secrets:
            return stored
        plain = self.adapter.dump_python(value, by_alias=True)
        return make_meta(_reveal(stored if isinstance(plain, Mapping) else stored.get(VALUE), plain))

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
        try:
            return self.adapter.dump_python(value, mode="json", by_alias=True, warnings="error")
        except PydanticSerializationError:
            self.adapter.validate_json(
                self.adapter.dump_json(value, by_alias=True, warnings="none", fallback=str)
            )
            raise

    @cached_property
    def _may_merge_keys(self) -> bool:
        """Whether a value may have a dict with keys that are no text."""
        try:
            return _may_merge_keys(self.adapter.core_schema)
        except PydanticUserError:
            return True

    def read_again(self, value: Any) -> Any:
        """Return what a reader gets for a value: read from its JSON, without the fields that only have defaults.

        Raise ValidationError if it cannot be read.
        """
        try:
            return self.adapter.validate_json(
                self.adapter.dump_json(value, by_alias=True, exclude_unset=True)
            )
        except ValidationError:
            return self.adapter.validate_json(self.adapter.dump_json(value, by_alias=True))

    def problems(self, error: ValueError, hide: Callable[[str], str]) -> str:
        """Return what is wrong, for people: the first problems with field, value and what is expected."""
        if not isinstance(error, ValidationError):
            return hide(_problem_of_json(error))
        if error.error_count() > _MOST_PROBLEMS:
            return f"{error.error_count():,} values do not fit"
        found = error.errors(include_url=False, include_context=False)
        shown = [self._problem(each, hide) for each in found[:SHOWN_PROBLEMS]]
        if len(found) > len(shown):
            more = len(found) - len(shown)
            shown.append(f"and {more} more problem{'' if more == 1 else 's'}")
        return "; ".join(shown)

    def _problem(self, found: Any, hide: Callable[[str], str]) -> str:
        place = _place(found["loc"])
        match found["type"]:
            case "missing" | "missing_argument":
                return f"{place} is missing"
            case "extra_forbidden":
                return f"{place} is not a field of it"
        wanted = re.sub(r"^Input should be ", "expected ", str(found["msg"]))
        wanted = re.sub(r"^(Value error|Assertion failed), ", "", wanted)
        hidden = self._secrets is None or _is_secret(self._secrets, found["loc"], found["input"])
        value = _HIDDEN if hidden else shown_value(found["input"], hide)
        return hide(f"{place} is ") + value + ", " + hide(printable(truncate(wanted, 200)))

    @cached_property
    def _secrets(self) -> dict[str, Any] | None:
        """The JSON Schema if it says which fields are secret; `{}` if none is; None if all values must be hidden."""
        schema = self.schema("validation")
        config = getattr(self.kind, "model_config", None) or {}
        if config.get("hide_input_in_errors") or schema is None:
            return None
        return schema if '"format": "password"' in json.dumps(schema, default=str) else {}


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
    if isinstance(error, UnicodeDecodeError) or "invalid utf-8" in text:
        return "it has bytes that are not UTF-8; set ser_json_bytes and val_json_bytes to 'base64' in its model_config"
    if "surrogates not allowed" in text:
        return "it has a text with half of a surrogate pair, which is not valid UTF-8"
    return "a field has a value of another type than it names"


_SAME_IN_JSON = frozenset(
    {
        *(
            "any",
            "bool",
            "date",
            "datetime",
            "decimal",
            "enum",
            "float",
            "int",
            "literal",
            "none",
            "str",
            "time",
            "uuid",
        ),
        *("default", "definition-ref", "definitions", "dict", "frozenset", "list", "nullable", "set"),
        *("dataclass", "dataclass-args", "dataclass-field", "model", "model-field", "model-fields"),
        *("typed-dict", "typed-dict-field"),
    }
)
"""The kinds of pydantic's schemas that accept the same JSON values as objects and as text, unless they are strict."""


def _reads_objects(schema: Any) -> bool:
    """Return whether a schema of pydantic, and all that it contains, give the same for objects and for JSON text."""
    if isinstance(schema, (list, tuple)):
        return all(map(_reads_objects, schema))
    if not isinstance(schema, dict):
        return True
    kind = schema.get("type")
    if schema.get("strict") or (isinstance(kind, str) and kind not in _SAME_IN_JSON):
        return False
    fields = schema.get("fields", ())  # of a dataclass, a list
    if not all(map(_reads_objects, fields.values() if isinstance(fields, dict) else fields)):
        return False
    return all(_reads_objects(each) for name, each in schema.items() if name not in _NOT_SCHEMAS)


_NOT_SCHEMAS = frozenset({"metadata", "serialization", "expected", "members", "default", "fields", "ref"})
"""The members of a schema that say nothing of how values are read."""


def _may_merge_keys(schema: Any) -> bool:
    """Return whether a schema of pydantic contains one of dicts whose keys may be no text, or of any value."""
    if isinstance(schema, (list, tuple)):
        return any(map(_may_merge_keys, schema))
    if not isinstance(schema, dict):
        return False
    kind = schema.get("type")
    if kind == "any" or (kind == "dict" and (schema.get("keys_schema") or {}).get("type") != "str"):
        return True
    return any(
        _may_merge_keys(each) for name, each in schema.items() if name not in ("metadata", "serialization")
    )


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


def _place(loc: Sequence[Any]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return printable(truncate(text, 200)) if text else "it"


def shown_value(value: Any, hide: Callable[[str], str]) -> str:
    """Return a value as JSON with its type, cut. Hidden values are replaced before the cut, which could split them."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
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


def _is_secret(schema: Mapping[str, Any], loc: Sequence[Any], value: Any) -> bool:
    """Return whether an error must not show a value: it is a secret of the schema, or may contain one."""
    if not schema:
        return False
    if isinstance(value, (dict, list, tuple)):
        return True
    definitions = schema.get("$defs") or {}
    found = [*expanded(schema, definitions)]
    for part in loc:
        below = [*_below(found, part)]
        if below:
            found = [every for each in below for every in expanded(each, definitions)]
    return any(_holds_secret(each, definitions, set()) for each in found)


def _holds_secret(schema: Any, definitions: Mapping[str, Any], seen: set[str]) -> bool:
    """Return whether a schema is that of a secret, or has one below it."""
    if isinstance(schema, list):
        return any(_holds_secret(each, definitions, seen) for each in schema)
    if not isinstance(schema, dict):
        return False
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        if name in seen:
            return False
        seen.add(name)
        return _holds_secret(definitions.get(name), definitions, seen)
    if schema.get("format") == "password" or schema.get("writeOnly") is True:
        return True
    return any(_holds_secret(each, definitions, seen) for key, each in schema.items() if key != "$defs")


def _below(schemas: Sequence[Mapping[str, Any]], part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the schemas of a field or of an item; none if `part` is the name of a member of a union."""
    for each in schemas:
        if isinstance(part, int):
            fixed = each.get("prefixItems") or []
            below = fixed[part] if part < len(fixed) else each.get("items")
        else:
            below = (each.get("properties") or {}).get(part, each.get("additionalProperties"))
        if isinstance(below, dict):
            yield below
