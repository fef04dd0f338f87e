"""The calls to an admission queue over HTTP, from the models that check their parameters and results."""

from __future__ import annotations

from typing import Any

from flowkit.admission.api import OPERATIONS, TITLE
from flowkit.server.openapi import openapi_document
from reference.gateway_methods import fields_table, name_of, object_part, type_text


def api_text() -> str:
    """Return all calls, and the objects that they use."""
    document = openapi_document(OPERATIONS, {"title": TITLE, "version": ""})
    called = [
        (path, method, operation)
        for path, each in document["paths"].items()
        for method, operation in each.items()
    ]
    everywhere = set.intersection(*(_errors(operation) for _, _, operation in called))
    schemas = document["components"]["schemas"]
    parts = []
    for path, method, operation in called:
        parts.append(f"## `{method.upper()} {path}`\n\n")
        parts.append(_call(operation, schemas, everywhere))
    parts.append(f"## Errors of every call\n\n{_error_table(everywhere)}## Objects\n\n")
    bodies = {name_of(each) for _, _, operation in called for each in _bodies(operation)}
    parts += [object_part(name, schemas[name]) for name in sorted(schemas.keys() - bodies)]
    return "".join(parts).rstrip() + "\n"


def _call(operation: dict[str, Any], schemas: dict[str, Any], everywhere: set[tuple[str, str]]) -> str:
    text = " ".join([operation["summary"], *operation.get("description", "").split()])
    parts = [f"{text}\n\n"]
    given = operation["parameters"]
    if given:
        fields = {each["name"]: {**each["schema"], "description": _place(each)} for each in given}
        required = [each["name"] for each in given if each["required"]]
        parts.append(fields_table("Parameter", _with_bounds({"properties": fields, "required": required})))
    bodies = _bodies(operation)
    for each in bodies:
        schema = schemas[name_of(each)]
        kind = "The body" if len(bodies) == 1 else "One form of the body"
        parts.append(f"{kind}: {schema['description'][0].lower()}{schema['description'][1:]}\n\n")
        parts.append(fields_table("Field", _with_bounds(schema), marked=True))
    result = operation["responses"]["200"]["content"]["application/json"]["schema"]
    parts.append(f"Result: {type_text(result)}.\n\n")
    own = _errors(operation) - everywhere
    return "".join([*parts, _error_table(own)])


def _place(parameter: dict[str, Any]) -> str:
    return f"In the {parameter['in']}. {parameter.get('description', '')}".rstrip()


def _with_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object whose fields have their bounds in the description."""
    fields = {}
    for name, field in schema["properties"].items():
        text = f"{field.get('description', '')} {_bounds(field)}".strip()
        fields[name] = {**field, "description": text}
    return {**schema, "properties": fields}


def _bounds(field: dict[str, Any]) -> str:
    given = {**field, **field.get("anyOf", [{}])[0]}
    if "maximum" in given:
        return f"{given['minimum']:,} to {given['maximum']:,}."
    if "maxLength" in given:
        return f"At most {given['maxLength']:,} characters."
    most = given.get("maxItems") or given.get("maxProperties")
    return f"At most {most:,} entries." if most else ""


def _bodies(operation: dict[str, Any]) -> list[dict[str, Any]]:
    if "requestBody" not in operation:
        return []
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    found: list[dict[str, Any]] = schema.get("oneOf", [schema])
    return found


def _errors(operation: dict[str, Any]) -> set[tuple[str, str]]:
    responses = operation["responses"].items()
    return {(status, each["description"]) for status, each in responses if status != "200"}


def _error_table(errors: set[tuple[str, str]]) -> str:
    rows = [f"| {status} | {text} |" for status, text in sorted(errors)]
    return "\n".join(["| Status | Cause |", "|---|---|", *rows]) + "\n\n" if rows else ""
