"""A data converter with a codec, as a user would write one. It hides payloads, but is not secure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from temporalio.api.common.v1 import Payload
from temporalio.converter import DataConverter, PayloadCodec

if TYPE_CHECKING:
    from collections.abc import Sequence

ENCODING = b"binary/hidden"


class Hiding(PayloadCodec):
    """Inverts each byte of a payload."""

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Return hidden payloads."""
        return [
            Payload(metadata={"encoding": ENCODING}, data=_inverted(each.SerializeToString()))
            for each in payloads
        ]

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Return the payloads that `encode` has hidden; others stay as they are."""
        return [
            Payload.FromString(_inverted(each.data)) if each.metadata.get("encoding") == ENCODING else each
            for each in payloads
        ]


def _inverted(data: bytes) -> bytes:
    return bytes(255 - each for each in data)


CONVERTER = DataConverter(payload_codec=Hiding())
