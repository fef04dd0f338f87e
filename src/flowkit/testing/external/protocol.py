"""JSON, hashes and incoming messages of the worker protocol, written from its specification alone."""

from __future__ import annotations

import hashlib
import json
import uuid
from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic_core import to_jsonable_python

Fields = dict[str, Any]
"""The fields of a JSON object."""


def compact(value: Any, *, sort_keys: bool = False) -> bytes:
    """Return the UTF-8 JSON of a value without blanks, with non-ASCII characters unescaped."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=sort_keys, separators=(",", ":"))
    return text.encode()


def stable_hash(value: Any) -> str:
    """Return the hash that the protocol uses for ids: BLAKE2b with 20 bytes over the JSON with sorted keys."""
    return hashlib.blake2b(compact(value, sort_keys=True), digest_size=20).hexdigest()


def jsonable(value: Any) -> Any:
    """Return what JSON can hold of a handler's value. Raise an error for a value that has no JSON form."""
    return to_jsonable_python(value, inf_nan_mode="null")


def new_id() -> str:
    """Return a random UUID4 as text."""
    return str(uuid.uuid4())


class Incoming(BaseModel):
    """The envelope of a received record. Integers may arrive as text, as `1.0` or as true."""

    v: int = 1
    msg_type: Literal["cmd", "event", "heartbeat", "query", "reply"]
    role: Literal["coordinator", "worker"]
    corr_id: str = Field(default_factory=new_id)
    dedup_id: str
    task_id: str
    node_id: str
    step_type: str
    attempt_epoch: int
    ts_ms: int
    payload: dict[str, Any] = Field(default_factory=dict)
    target_worker_id: str | None = None


class StartPayload(BaseModel):
    """The payload of TASK_START."""

    input_ref: dict[str, Any] | None = None
    input_inline: dict[str, Any] | None = None
    batching: dict[str, Any] | None = None
    cancel_token: str


class CancelPayload(BaseModel):
    """The payload of TASK_CANCEL."""

    reason: str
    cancel_token: str


class SignalPayload(BaseModel):
    """The payload of a CANCEL signal."""

    sig: str
    reason: str
    cancel_token: str | None = None
    deadline_ts_ms: int | None = None


def read(value: bytes | None) -> Incoming:
    """Parse a record's value. Raise ValueError or TypeError for anything that is no envelope."""
    if value is None:
        raise ValueError("the record has no value")
    return Incoming.model_validate(json.loads(value.decode()))
