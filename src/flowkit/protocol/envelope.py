"""The envelope of every record, and what all parts of a message have in common."""

import uuid
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from flowkit.protocol.kinds import MsgType, Role


class Message(BaseModel):
    """A part of a message. Fields it does not know are ignored, null ones are sent; their order is the wire's."""

    model_config = ConfigDict(extra="ignore")

    def to_json(self) -> bytes:
        """As it travels: compact UTF-8 JSON. A ValueError when a value cannot be written."""
        return self.model_dump_json().encode()


def _new_id() -> str:
    return str(uuid.uuid4())


class Envelope(Message):
    """One Kafka record. Whole numbers may arrive as text, as `1.0` or as true, as workers accept them."""

    v: int = 1
    msg_type: MsgType
    role: Role
    """The sender."""
    corr_id: str = Field(default_factory=_new_id)
    """A reply repeats its query's."""
    dedup_id: str
    task_id: str
    """`*` in announces, as are the next two."""
    node_id: str
    step_type: str
    """The worker role."""
    attempt_epoch: int
    ts_ms: int
    """The sender's clock."""
    payload: dict[str, Any] = Field(default_factory=dict)
    target_worker_id: str | None = None
    """Of signals: the only worker that is meant; None means all."""

    @classmethod
    def from_json(cls, text: bytes | str) -> Self:
        """Read a record's value. pydantic's ValidationError (a ValueError) when it is no envelope."""
        return cls.model_validate_json(text)
