"""What the schemas by which pydantic reads and writes a type say of all its values. Pure."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Schema = Mapping[str, Any]

_NOT_SCHEMAS = frozenset({"metadata", "serialization", "expected", "members", "default", "ref", "config"})
"""The members of a schema that say nothing of how values are read."""


def walk(schema: Any, config: Schema | None = None) -> Iterator[tuple[Schema, Schema]]:
    """Yield a schema and all that it contains, each with the configuration of the model to which it belongs."""
    if isinstance(schema, (list, tuple)):
        for each in schema:
            yield from walk(each, config)
    elif isinstance(schema, dict):
        own = schema.get("config") or config or {}
        if isinstance(schema.get("type"), str):
            yield schema, own
        for name, each in schema.items():
            if name == "fields" and isinstance(each, dict):
                yield from walk([*each.values()], own)
            elif name not in _NOT_SCHEMAS:
                yield from walk(each, own)


# --- how values are read ---------------------------------------------------------------------------------------------

_SAME_IN_JSON = frozenset(
    {
        *("any", "bool", "date", "datetime", "decimal", "enum", "float", "int", "literal", "none"),
        *("str", "time", "uuid"),
        *("default", "definition-ref", "definitions", "dict", "frozenset", "list", "nullable", "set"),
        *("dataclass", "dataclass-args", "dataclass-field", "model", "model-field", "model-fields"),
        *("typed-dict", "typed-dict-field", "computed-field"),
    }
)
"""The kinds of schemas that accept the same JSON values as objects and as text, unless they are strict."""


def reads_objects(schema: Schema) -> bool:
    """Return whether a type reads the same value from objects in JSON types and from their JSON text."""
    return all(
        each["type"] in _SAME_IN_JSON and not (each.get("strict") or config.get("strict"))
        for each, config in walk(schema)
    )


def may_merge_keys(schema: Schema) -> bool:
    """Return whether a value may have a dict with keys that are no text."""
    return any(
        each["type"] == "any"
        or (each["type"] == "dict" and (each.get("keys_schema") or {}).get("type") != "str")
        for each, _ in walk(schema)
    )


def has_any(schema: Schema) -> bool:
    """Return whether a part of a type may be of any other type, and is then read in JSON types."""
    return any(each["type"] == "any" or _allows_extra(each, config) for each, config in walk(schema))


def names_sequences(schema: Schema) -> bool:
    """Return whether a part of a type is `Sequence`, whose values may be tuples and are read as lists."""
    kinds = (each.get("cls") for each, _ in walk(schema) if each["type"] == "is-instance")
    return any((typing.get_origin(kind) or kind) is Sequence for kind in kinds)


def _allows_extra(schema: Schema, config: Schema) -> bool:
    return schema["type"] in _RECORDS and _extra(schema, config) == "allow"


def _extra(schema: Schema, config: Schema) -> Any:
    return schema.get("extra_behavior") or config.get("extra_fields_behavior")


# --- what JSON loses -------------------------------------------------------------------------------------------------

_RECORDS = frozenset({"model-fields", "dataclass-args", "typed-dict"})
_LOSSLESS = frozenset(
    {
        *("bool", "float", "int", "none", "str", "default", "dict", "list", "nullable"),
        *("model", "model-field", "model-fields", "typed-dict", "typed-dict-field"),
        *("definitions", "definition-ref"),
    }
)
"""The kinds of schemas whose values JSON keeps: another kind may lose the zone of a time or a subclass, for example."""
_SETTINGS = frozenset({"title", "extra_fields_behavior", "frozen", "from_attributes", "validate_by_name"})
"""The settings of a model that change no value. `validate_by_alias` is refused with its names."""
_PARTS = frozenset(
    {
        *("type", "schema", "metadata", "ref", "default", "copy_default", "items_schema", "keys_schema"),
        *("values_schema", "fields", "model_name", "cls", "config", "frozen", "required", "total"),
        *(
            "definitions",
            "schema_ref",
            "extra_behavior",
            "cls_name",
            "generic_origin",
            "default_factory",
            "default_factory_takes_data",
        ),
    }
)
"""The members of such schemas that say nothing of a limit, a conversion or a name of its own."""


def is_lossless(schema: Schema) -> bool:
    """Return whether a schema proves that JSON keeps each value of the type: a model of plain fields, for example.

    No model in the value must be an instance of a subclass. Not-a-number and infinity are not JSON.
    """
    return all(_keeps_values(each, config) for each, config in walk(schema))


def contains_models(schema: Schema) -> bool:
    """Return whether a value may contain models beside itself, which may be instances of subclasses."""
    return any(each["type"] == "model" and each is not schema for each, _ in walk(schema))


def _keeps_values(schema: Schema, config: Schema) -> bool:
    if schema["type"] not in _LOSSLESS or not config.keys() <= _SETTINGS:
        return False
    if schema["type"] == "dict" and (schema.get("keys_schema") or {}).get("type") != "str":
        return False
    is_plain = all(name in _PARTS or given in (None, False, []) for name, given in schema.items())
    return is_plain and not _allows_extra(schema, config)


def may_be_infinite(schema: Schema) -> bool:
    """Return whether a value may have a number that JSON cannot hold."""
    return any(each["type"] not in _FINITE for each, _ in walk(schema))


_FINITE = (_SAME_IN_JSON | _LOSSLESS) - {"any", "float", "decimal"}


def needs_round_trip(schema: Schema) -> bool:
    """Return whether a type refuses to read what it writes of a value, unless pydantic writes it for a round trip.

    Such a type has computed fields and forbids fields that it does not read, or a text that contains JSON.
    """
    return any(
        each["type"] == "json" or (bool(each.get("computed_fields")) and _extra(each, config) == "forbid")
        for each, config in walk(schema)
    )


def find_lost(schema: Schema) -> str | None:
    """Return the name of a field that a type writes to JSON under a name by which it does not read it, or not at all.

    None without one. A model with a serializer of its own says nothing of its fields.
    """
    own = {id(each.get("schema")) for each, _ in walk(schema) if each["type"] in _WRITERS and _converts(each)}
    for each, config in walk(schema):
        if each["type"] in _RECORDS and id(each) not in own and not _converts(each):
            for name, field in fields_of(each):
                if not _reads_itself(name, field, config):
                    return name
    return None


_WRITERS = frozenset({"model", "dataclass"})


def _converts(schema: Schema) -> bool:
    return str((schema.get("serialization") or {}).get("type")).startswith("function")


def fields_of(schema: Schema) -> list[tuple[str, Schema]]:
    """Return the fields of a model, a dataclass or a TypedDict, by name."""
    fields = schema["fields"]
    return [*fields.items()] if isinstance(fields, dict) else [(each["name"], each) for each in fields]


def _reads_itself(name: str, field: Schema, config: Schema) -> bool:
    return not field.get("serialization_exclude") and names_of(name, field, config)[0] in _read_names(
        name, field, config
    )


def list_names(schema: Schema) -> set[str]:
    """Return all names by which a type with fields reads or writes them."""
    record = next(((each, config) for each, config in walk(schema) if each["type"] in _RECORDS), None)
    if record is None:
        return set()
    return {each for name, field in fields_of(record[0]) for each in names_of(name, field, record[1])}


def names_of(name: str, field: Schema, config: Schema) -> list[str]:
    """Return the name by which a type writes a field, and then the others by which it reads it."""
    written = field.get("serialization_alias", name)
    return [written, *(each for each in _read_names(name, field, config) if each != written)]


def _read_names(name: str, field: Schema, config: Schema) -> list[str]:
    alias = field.get("validation_alias")
    if alias is None or field.get("init") is False:
        return [name]
    paths = [[alias]] if isinstance(alias, str) else alias if isinstance(alias[0], list) else [alias]
    by_name = config.get("validate_by_name") or config.get("populate_by_name")
    return [*(path[0] for path in paths if len(path) == 1), *([name] if by_name else [])]
