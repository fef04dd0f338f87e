"""The data converter of FlowKit's Temporal clients: the one of `FLOWKIT_DATA_CONVERTER`, or Temporal's for Pydantic.

The payload converter is Temporal's converter for Pydantic, without its cost per workflow task: the SDK
creates the payload converters anew for each workflow task, and derives others for each activity. Instances
of this converter share their parts, and none depends on the workflow or activity.
"""

from __future__ import annotations

import os
import pkgutil
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Self

from temporalio.contrib.pydantic import PydanticJSONPlainPayloadConverter, PydanticPayloadConverter
from temporalio.converter import (
    CompositePayloadConverter,
    DataConverter,
    DefaultFailureConverter,
    DefaultFailureConverterWithEncodedAttributes,
    DefaultPayloadConverter,
)

from flowkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from temporalio.converter import EncodingPayloadConverter, PayloadConverter, SerializationContext

VARIABLE = "FLOWKIT_DATA_CONVERTER"


@cache
def _list_parts() -> Mapping[bytes, EncodingPayloadConverter]:
    return PydanticPayloadConverter().converters


class SharedPayloadConverter(CompositePayloadConverter):
    """Converts values as `PydanticPayloadConverter` does."""

    def __init__(self) -> None:
        self.converters = _list_parts()

    def with_context(self, context: SerializationContext) -> Self:
        """Return this converter, because its results do not depend on the context."""
        return self


DATA_CONVERTER = DataConverter(payload_converter_class=SharedPayloadConverter)
"""Compatible with `temporalio.contrib.pydantic.pydantic_data_converter`."""


def configured_converter() -> DataConverter:
    """Return the data converter that `FLOWKIT_DATA_CONVERTER` names as `module:attribute`, or FlowKit's own.

    Raise ConfigError, which names the variable and its value, if there is no such converter.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return DATA_CONVERTER
    place = f"{VARIABLE} is {name!r}"
    try:
        converter = pkgutil.resolve_name(name)
    except Exception as error:
        how = "name a data converter as module:attribute, in a module that this process can import"
        raise ConfigError(
            f"{place}, which cannot be loaded ({type(error).__name__}: {error}); {how}"
        ) from error
    if not isinstance(converter, DataConverter):
        raise ConfigError(
            f"{place}, which is a {type(converter).__name__}; name a temporalio.converter.DataConverter"
        )
    try:
        return complete_converter(converter, SharedPayloadConverter)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


def complete_converter(
    given: DataConverter, payloads: type[PayloadConverter] = PydanticPayloadConverter
) -> DataConverter:
    """Return a user's converter with what FlowKit needs: `payloads`, and encoded failures if it has a codec.

    A payload converter or a failure converter other than Temporal's defaults stays as it is. Raise ConfigError if the
    payload converter does not derive from Temporal's converter for Pydantic.
    """
    if given.payload_converter_class in (DefaultPayloadConverter, PydanticPayloadConverter):
        given = replace(given, payload_converter_class=payloads)
    elif not uses_pydantic(given):
        raise ConfigError(
            f"the payload converter {given.payload_converter_class.__name__} cannot serialize FlowKit's records: "
            "derive it from temporalio.contrib.pydantic.PydanticPayloadConverter"
        )
    if given.payload_codec is not None and given.failure_converter_class is DefaultFailureConverter:
        given = replace(given, failure_converter_class=DefaultFailureConverterWithEncodedAttributes)
    return given


def uses_pydantic(converter: DataConverter) -> bool:
    """Return whether the converter serializes FlowKit's records."""
    payloads = converter.payload_converter_class()
    json = payloads.converters.get(b"json/plain") if isinstance(payloads, CompositePayloadConverter) else None
    return isinstance(json, PydanticJSONPlainPayloadConverter)
