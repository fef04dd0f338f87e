"""Checks results against the OpenRPC document of a server."""

from __future__ import annotations

from typing import Any

from jsonschema import Draft202012Validator


def validate_result(openrpc: dict[str, Any], method: str, result: Any) -> None:
    """Raise jsonschema's ValidationError if a result does not have the form that the document promises."""
    [described] = [each for each in openrpc["methods"] if each["name"] == method]
    schema = {**described["result"]["schema"], "components": openrpc["components"]}
    Draft202012Validator(schema).validate(result)
