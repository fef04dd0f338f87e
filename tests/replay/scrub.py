"""Removes the data of the recording machine from a history. Pure."""

from __future__ import annotations

import base64
import re
from typing import Any

_HOSTED = re.compile(r"\b(engine)-(?:\d+@[^\s\"']+|[0-9a-f]{8}\b)")
_WORKER = re.compile(r"\bw-[0-9a-f]{8}\b")
_DROPPED = frozenset({"stackTrace", "workerVersion", "meteringMetadata", "requestId"})
"""`sdkMetadata` stays: without its flags, a replay does not detect changed activities."""

RECORDER = "recorder"


def scrubbed(value: Any, secrets: list[str]) -> Any:
    """Return `value` without identities, stack traces and `secrets`, also inside payloads."""
    if isinstance(value, list):
        return [scrubbed(item, secrets) for item in value]
    if isinstance(value, str):
        return _text(value, secrets)
    if not isinstance(value, dict):
        return value
    if set(value) == {"metadata", "data"}:
        return {**value, "data": _payload(value["data"], secrets)}
    kept = {key: scrubbed(item, secrets) for key, item in value.items() if key not in _DROPPED}
    if "identity" in kept:
        kept["identity"] = RECORDER
    if kept.get("kind") == "TASK_QUEUE_KIND_STICKY":
        kept["name"] = "sticky"
    return kept


def _text(text: str, secrets: list[str]) -> str:
    text = _WORKER.sub("w-00000000", _HOSTED.sub(r"\1", text))
    for secret in secrets:
        text = re.sub(rf"(?<![\w-]){re.escape(secret)}(?![\w-])", RECORDER, text)
    return text


def _payload(data: str, secrets: list[str]) -> str:
    """Return a payload without secrets. A stored graph is binary, which the error handler keeps as it is."""
    text = _text(base64.b64decode(data).decode(errors="surrogateescape"), secrets)
    return base64.b64encode(text.encode(errors="surrogateescape")).decode()


def payload_texts(value: Any) -> list[str]:
    """Yield the text of every payload in `value`."""
    if isinstance(value, list):
        return [text for item in value for text in payload_texts(item)]
    if not isinstance(value, dict):
        return []
    if set(value) == {"metadata", "data"}:
        return [base64.b64decode(value["data"]).decode(errors="surrogateescape")]
    return [text for item in value.values() for text in payload_texts(item)]
