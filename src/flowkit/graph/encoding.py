"""Write values as JSON, and measure them. Pure."""

from __future__ import annotations

import json
from typing import Any

from flowkit.errors import GraphError
from flowkit.text import printed, shown_path

_PATH_STEPS = 20
_PATH_CHARS = 300

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def json_bytes(value: object, name: str = "the input") -> int:
    """Return the size of `value` in bytes of UTF-8 JSON.

    Raise GraphError, which names the first part that JSON cannot represent.
    """
    return len(encode_json(value, name))


def encode_json(value: object, name: str = "the input") -> bytes:
    """Return `value` as UTF-8 JSON. Raise GraphError as `json_bytes` does."""
    try:
        return _encode_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise GraphError([f"{_find_place(value, name, 0)} must be JSON: {error}"]) from None


def _encode_json(value: object) -> bytes:
    return _ENCODER.encode(value).encode()


def _find_place(value: Any, path: str, depth: int) -> str:
    """Return the path to the first part of `value` that JSON cannot represent, with the id of its node."""
    if isinstance(value, dict | list | tuple) and depth < _PATH_STEPS:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in pairs:
            if not _is_json(part):
                step = f".{key}" if isinstance(value, dict) else f"[{key}]"
                owner = f" (node {part['node_id']!r})" if isinstance(part, dict) and "node_id" in part else ""
                return _find_place(part, f"{path}{step}{owner}", depth + 1)
    return f"{shown_path(path, _PATH_CHARS)} = {printed(value)}"


def _is_json(value: object) -> bool:
    try:
        _encode_json(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
