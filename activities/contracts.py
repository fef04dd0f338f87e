"""What typed handlers announce about their input and output, and whether the handlers of a graph fit each other."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import logging
import textwrap
from typing import TYPE_CHECKING

from pydantic.json_schema import GenerateJsonSchema

from flowkit.adapters.worker_registry import AnnouncedContract
from flowkit.core.user_code import contained, error_text, shorten_path
from flowkit.errors import ConfigError
from flowkit.graph.contracts import CONVERTS, Contract, data_edges, find_unfit
from flowkit.text import one_line, truncate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import core_schema

    from flowkit.activities.handlers import RoleHandler
    from flowkit.graph.contracts import Schema, Unfit
    from flowkit.models import Graph

_logger = logging.getLogger("flowkit.worker")

SCHEMA_BYTES = 64 * 1024
"""Largest JSON of a schema that a process announces."""
PROCESS_BYTES = 2 * 1024 * 1024
"""Largest JSON of all schemas that a process announces: they are in one row of `worker_registry`."""
_HASH_CHARS = 12
_REASON_CHARS = 300


class ContractSchema(GenerateJsonSchema):
    """Generates the JSON Schema of a type as pydantic does, and says where values may have another form.

    Otherwise a schema would require what the type does not: a validator that runs first may convert any value, a field
    with an alias may be given by its name, and decimal numbers look like any text.
    """

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


def contract_of(handler: RoleHandler) -> Contract:
    """Return the schemas of a handler. Raise what its methods raise."""
    with contained:
        return Contract(input=handler.input_schema(), output=handler.output_schema())


def announce(handlers: Mapping[str, RoleHandler]) -> dict[str, AnnouncedContract]:
    """Return what a process announces about its typed roles. Log what it leaves out, and why."""
    announced: dict[str, AnnouncedContract] = {}
    room = PROCESS_BYTES
    for role, handler in handlers.items():
        given = _encode(role, "input", handler.input_schema), _encode(role, "output", handler.output_schema)
        size = sum(len(each.encode()) for each in given)
        if size > room:
            _logger.warning(
                "role %s announces no schemas: those of all roles of this process exceed %d bytes of JSON, "
                "with which FlowKit would check edges at submission",
                *(role, PROCESS_BYTES),
            )
        elif size:
            room -= size
            digest = hashlib.sha256("\n".join(given).encode()).hexdigest()[:_HASH_CHARS]
            announced[role] = AnnouncedContract(input=given[0], output=given[1], digest=digest)
    return announced


def _encode(role: str, what: str, read: Callable[[], Schema | None]) -> str:
    """Return the JSON of a schema; empty if there is none, or if the process must not announce it."""
    try:
        text = _read(read)
        size = len(text.encode())
        if size > SCHEMA_BYTES:
            raise ConfigError(f"it has {size:,} bytes of JSON, more than {SCHEMA_BYTES:,}")
    except ConfigError as error:
        _logger.warning(
            "role %s announces no schema of its %s, so no edge is checked against it at submission: %s",
            *(role, what, error),
        )
        return ""
    return text


def _read(read: Callable[[], Schema | None]) -> str:
    try:
        with contained:
            schema = read()
        text = "" if schema is None else json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        text.encode()
    except Exception as error:
        text, _, _ = one_line(error_text(error)).partition(" For further information")
        reason = truncate(text, _REASON_CHARS)
        raise ConfigError(f"it cannot be made: {reason}") from error
    return text


def check_contracts(graph: Graph, handlers: Mapping[str, RoleHandler]) -> list[str]:
    """Return a problem for each pair of roles in a graph whose types do not fit; `handlers` are by role.

    Roles without a handler, and handlers without types, fit. A problem names the edge, the fields with both JSON types,
    and the places of both types in the source.
    """
    edges = data_edges(graph)
    roles = {role for edge in edges for role in edge.roles if role in handlers}
    contracts = {role: [contract_of(handlers[role])] for role in roles}
    return [_describe(each, handlers) for each in find_unfit(edges, contracts)]


def _describe(unfit: Unfit, handlers: Mapping[str, RoleHandler]) -> str:
    field = unfit.mismatches[0].path.partition(".")[0].partition("[")[0]
    source, target = handlers[unfit.edge.source_role], handlers[unfit.edge.role]
    return unfit.describe(
        _place(getattr(source, "output_type", None), field) or _place(type(source)),
        _place(getattr(target, "input_type", None), field) or _place(type(target)),
    )


def _place(kind: object, field: str = "") -> str:
    """Return where a class is defined, or the given field of it: `pipeline.py:12`. Empty if it is not known."""
    if not isinstance(kind, type) or kind.__module__.partition(".")[0] == "flowkit":
        return ""
    try:
        path, (lines, first) = inspect.getsourcefile(kind), inspect.getsourcelines(kind)
        [body] = ast.parse(textwrap.dedent("".join(lines))).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return ""
    fields = body.body if isinstance(body, ast.ClassDef) else []
    own = (each.lineno for each in fields if isinstance(each, ast.AnnAssign) and _names(each.target, field))
    return f"{shorten_path(path or '')}:{first + next(own, 1) - 1}"


def _names(target: ast.expr, field: str) -> bool:
    return isinstance(target, ast.Name) and target.id == field
