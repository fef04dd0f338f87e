"""The JSON Schemas of the types of users. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticSerializationError, SchemaError, SchemaSerializer

from flowkit.activities.core_schemas import fields_of, names_of
from flowkit.graph.contracts import CONVERTS
from flowkit.graph.params import FACTORY, NAMES

if TYPE_CHECKING:
    from pydantic.json_schema import JsonSchemaValue, JsonSchemaWarningKind
    from pydantic_core import CoreSchema, core_schema


class ContractSchema(GenerateJsonSchema):
    """Generates the JSON Schema of a type as pydantic does, and says where values may have another form.

    Otherwise a schema would require what the type does not: a validator that runs first may convert any value, a field
    with an alias may be given by its name, and decimal numbers look like any text.
    """

    def emit_warning(self, kind: JsonSchemaWarningKind, detail: str) -> None:
        """Do nothing: a default that JSON cannot hold is no problem here."""

    def field_is_required(
        self,
        field: core_schema.ModelField | core_schema.DataclassField | core_schema.TypedDictField,
        total: bool,
    ) -> bool:
        """Return whether a field is required by the name that the schema has for it."""
        alias = field.get("validation_alias")
        config = self._config.config_dict
        by_name = config.get("populate_by_name") or config.get("validate_by_name")
        if self.mode == "validation" and alias is not None and (by_name or not isinstance(alias, str)):
            return False
        return super().field_is_required(field, total)

    def decimal_schema(self, schema: core_schema.DecimalSchema) -> JsonSchemaValue:
        """Return the schema of a decimal number, with the format of its text."""
        found = super().decimal_schema(schema)
        return {**found, "format": "decimal"} if found.get("type") == "string" else found

    def str_schema(self, schema: core_schema.StringSchema) -> JsonSchemaValue:
        """Return the schema of a text. Its model may allow numbers."""
        found = super().str_schema(schema)
        allows = schema.get("coerce_numbers_to_str") or self._config.config_dict.get("coerce_numbers_to_str")
        return self._converted(found) if allows else found

    def ser_schema(
        self, schema: core_schema.SerSchema | core_schema.IncExSeqSerSchema | core_schema.IncExDictSerSchema
    ) -> JsonSchemaValue | None:
        """Return the schema of what a serializer returns; any value if its function does not say."""
        if schema["type"] in ("function-plain", "function-wrap") and not schema.get("return_schema"):
            return {}
        found = super().ser_schema(schema)
        return found and ({**found, CONVERTS: True} if schema["type"] in ("format", "to-string") else found)

    def function_before_schema(self, schema: core_schema.BeforeValidatorFunctionSchema) -> JsonSchemaValue:
        """Return the schema after a validator that converts first, marked unless it declares its input."""
        found = super().function_before_schema(schema)
        return found if schema.get("json_schema_input_schema") else self._converted(found)

    def function_wrap_schema(self, schema: core_schema.WrapValidatorFunctionSchema) -> JsonSchemaValue:
        """Return the schema around which a validator runs, marked unless it declares its input."""
        found = super().function_wrap_schema(schema)
        return found if schema.get("json_schema_input_schema") else self._converted(found)

    def _converted(self, found: JsonSchemaValue) -> JsonSchemaValue:
        return {**found, CONVERTS: True} if self.mode == "validation" else found


class RoundTripSchema(ContractSchema):
    """Generates the JSON Schema of a type whose JSON has no computed fields, because the type forbids to read them."""

    def model_fields_schema(self, schema: core_schema.ModelFieldsSchema) -> JsonSchemaValue:
        """Return the schema of a model without its computed fields."""
        return super().model_fields_schema({**schema, "computed_fields": []})

    def dataclass_args_schema(self, schema: core_schema.DataclassArgsSchema) -> JsonSchemaValue:
        """Return the schema of a dataclass without its computed fields."""
        return super().dataclass_args_schema({**schema, "computed_fields": []})


class ParamsSchema(GenerateJsonSchema):
    """Generates the JSON Schema of params, which says all that completes them as their type does (`complete_params`).

    Default values are as the type writes them. The empty list that `default_factory=list` makes is one, too.
    """

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """Return the schema with its default value, or with a mark if a function makes the value."""
        found = super().default_schema(schema)
        factory: Any = schema.get("default_factory")
        if factory is not None and not _is_constant(factory):
            return {**found, FACTORY: True}
        if factory is None and "default" not in found:
            return found
        value = schema["default"] if factory is None else factory()
        try:
            return {**found, "default": _write(schema, value)}
        except (PydanticSerializationError, PydanticUserError, SchemaError):  # it refers to a definition
            return found if factory is None else {**found, "default": self.encode_default(value)}

    def model_fields_schema(self, schema: core_schema.ModelFieldsSchema) -> JsonSchemaValue:
        """Return the schema of a model with the other names of its fields."""
        return self._with_names(super().model_fields_schema(schema), schema)

    def dataclass_args_schema(self, schema: core_schema.DataclassArgsSchema) -> JsonSchemaValue:
        """Return the schema of a dataclass with the other names of its fields."""
        return self._with_names(super().dataclass_args_schema(schema), schema)

    def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> JsonSchemaValue:
        """Return the schema of a TypedDict with the other names of its fields."""
        return self._with_names(super().typed_dict_schema(schema), schema)

    def _with_names(self, found: JsonSchemaValue, schema: Any) -> JsonSchemaValue:
        properties = found.get("properties", {})
        for name, field in fields_of(schema):
            names = names_of(name, field, {**self._config.config_dict})
            key = next((each for each in names if each in properties), None)
            if key is not None and names != [key]:
                properties[key] = {**properties[key], NAMES: names}
        return found


_CONSTANTS = (list, dict, set, frozenset, tuple, str, int, float, bool)


def _is_constant(factory: Any) -> bool:
    """Return whether a function that makes a default value makes the same one each time."""
    if isinstance(factory, type) and issubclass(factory, BaseModel):
        made = (each.default_factory for each in factory.model_fields.values())
        return all(each is None or _is_constant(each) for each in made)
    return factory in _CONSTANTS


def _write(schema: CoreSchema, value: Any) -> Any:
    """Return the JSON of a value as a type writes it."""
    return SchemaSerializer(schema).to_python(
        value, mode="json", by_alias=True, round_trip=True, warnings=False
    )
