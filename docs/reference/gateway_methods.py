"""The methods of the gateway, from the models that check their parameters and results."""

from __future__ import annotations

from typing import Any

from flowkit.gateway.process import TITLE
from flowkit.gateway.service import Gateway, methods
from flowkit.server.rpc import openrpc_document

_EVERYWHERE = {"InvalidRequest", "InvalidParams", "InternalError", "LimitExceeded", "StorageError"}


def document() -> dict[str, Any]:
    """Return the OpenRPC document of the gateway."""
    nothing: Any = None
    return openrpc_document(
        methods(Gateway(nothing, nothing, nothing, nothing)), {"title": TITLE, "version": ""}
    )


def methods_text() -> str:
    """Return the methods, and the objects that they use."""
    api = document()
    parts = []
    for method in api["methods"]:
        text = " ".join(part for part in (method["summary"], method.get("description")) if part)
        parts.append(f"## `{method['name']}`\n\n{' '.join(text.split())}\n\n")
        if method["params"]:
            given = name_of(method["params"][0]["schema"])
            parts.append(fields_table("Parameter", api["components"]["schemas"][given]))
            parts.append(f"Result: {type_text(method['result']['schema'])}.\n\n")
        errors = [name for each in method["errors"] if (name := name_of(each)) not in _EVERYWHERE]
        if errors:
            parts.append(f"Errors: {', '.join(f'`{each}`' for each in errors)}.\n\n")
    parts.append("## Objects\n\n")
    used = {name_of(method["params"][0]["schema"]) for method in api["methods"] if method["params"]}
    for name, schema in sorted(api["components"]["schemas"].items()):
        if name not in used:
            parts.append(object_part(name, schema))
    return "".join(parts).rstrip() + "\n"


def object_part(name: str, schema: dict[str, Any]) -> str:
    """Return the section about an object or an enumeration."""
    text = f"### {name}\n\n{' '.join(schema.get('description', '').split())}\n\n"
    if "enum" in schema:
        return f"{text}One of {', '.join(f'`{each}`' for each in schema['enum'])}.\n\n"
    return text + fields_table("Field", schema)


def fields_table(head: str, schema: dict[str, Any], *, marked: bool | None = None) -> str:
    """Return a table of the fields of an object. `marked`: required ones are marked, by default those of parameters."""
    marked = head == "Parameter" if marked is None else marked
    properties = schema.get("properties", {})
    if not properties:
        return "Without parameters.\n\n" if head == "Parameter" else ""
    rows = [f"| {head} | Type | Meaning |", "|---|---|---|"]
    for name, field in properties.items():
        needed = " **Required.**" if marked and name in schema.get("required", []) else ""
        default = f" Default: `{_json(field['default'])}`." if field.get("default") not in (None, "") else ""
        rows.append(
            f"| `{name}` | {type_text(field)} | {field.get('description', '')}{default}{needed} |".replace(
                "  ", " "
            )
        )
    return "\n".join(rows) + "\n\n"


def _json(value: object) -> str:
    return str(value).replace("'", '"')


def type_text(schema: dict[str, Any]) -> str:
    """Return the type of a value, with links to the sections about objects."""
    if "$ref" in schema:
        name = name_of(schema)
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(type_text(each) for each in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {type_text(schema['items'])}" if schema.get("items") else "list"
    for values in (schema.get("additionalProperties"), *schema.get("patternProperties", {}).values()):
        if isinstance(values, dict) and "$ref" in values:
            return f"object with values of {type_text(values)}"
    return str(schema.get("type", "any"))


def name_of(schema: dict[str, Any]) -> str:
    """Return the name of the object to which a schema refers."""
    return str(schema["$ref"]).rpartition("/")[2]
