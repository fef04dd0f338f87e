"""The envelope of every Kafka record, and the base class of all message parts."""

import uuid
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from flowkit.protocol.kinds import MsgType, Role


class Message(BaseModel):
    """A part of a message. It ignores unknown fields and sends null fields, in the order of the protocol."""

    model_config = ConfigDict(extra="ignore")

    def to_json(self) -> bytes:
        """Return the wire format, compact UTF-8 JSON. Raise ValueError for a value that cannot be serialized."""
        return self.model_dump_json().encode()


def _new_id() -> str:
    return str(uuid.uuid4())


class Envelope(Message):
    """One Kafka record. Integers may also arrive as text, as `1.0` or as true; workers accept these too."""

    v: int = 1
    msg_type: MsgType
    role: Role
    """The role of the sender."""
    corr_id: str = Field(default_factory=_new_id)
    """Correlation id. A reply repeats the id of its query."""
    dedup_id: str
    task_id: str
    """The value is `*` in announcements; so are `node_id` and `step_type`."""
    node_id: str
    step_type: str
    """The worker role."""
    attempt_epoch: int
    ts_ms: int
    """Time in milliseconds by the sender's clock."""
    payload: dict[str, Any] = Field(default_factory=dict)
    target_worker_id: str | None = None
    """For signals: the worker that the signal addresses. None means all workers."""

    @classmethod
    def from_json(cls, text: bytes | str) -> Self:
        """Parse the value of a Kafka record. Raise pydantic's ValidationError (a ValueError) if it is no envelope."""
        return cls.model_validate_json(text)
