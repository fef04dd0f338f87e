"""The data converter of FlowKit's Temporal clients: Temporal's converter for Pydantic, without its cost per workflow task.

The SDK creates the payload converters anew for each workflow task, and derives others for each activity. Instances of
this converter share their parts, and none depends on the workflow or activity.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Self

from temporalio.contrib.pydantic import PydanticPayloadConverter
from temporalio.converter import CompositePayloadConverter, DataConverter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from temporalio.converter import EncodingPayloadConverter, SerializationContext


@cache
def _parts() -> Mapping[bytes, EncodingPayloadConverter]:
    return PydanticPayloadConverter().converters


class SharedPayloadConverter(CompositePayloadConverter):
    """Converts values as `PydanticPayloadConverter` does."""

    def __init__(self) -> None:
        self.converters = _parts()

    def with_context(self, context: SerializationContext) -> Self:
        """Return this converter, because its results do not depend on the context."""
        return self


DATA_CONVERTER = DataConverter(payload_converter_class=SharedPayloadConverter)
"""Compatible with `temporalio.contrib.pydantic.pydantic_data_converter`."""
