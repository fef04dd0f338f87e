"""The `meta` of a typed result, which is an object, also if the result is none. Pure.

The row of a batch says with `wrapped` what its writer knows. Rows without this field, such as those of external
workers, leave it to the type of the reader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

VALUE = "value"
"""The key under which a `meta` holds a result that is no object."""

WRAPPED = "wrapped"
"""The field of a row that says whether its `meta`, `{"value": …}`, stands for the value in it."""


class Meta(dict[str, Any]):
    """A `meta` whose only key is `value`, with what its writer knows of it. Handlers of records see a dict."""

    wrapped: bool
    """Whether it stands for the value in it, which is no object, and not for an object with this key."""

    def __init__(self, meta: Mapping[str, Any], *, wrapped: bool) -> None:
        super().__init__(meta)
        self.wrapped = wrapped


def make_meta(result: Any) -> dict[str, Any]:
    """Return the `meta` for the JSON of a result."""
    if not isinstance(result, dict):
        return Meta({VALUE: result}, wrapped=True)
    return Meta(result, wrapped=False) if result.keys() == {VALUE} else result


def like(given: Mapping[str, Any], converted: dict[str, Any]) -> dict[str, Any]:
    """Return the converted content of a `meta`, with what is known of the `given` one."""
    return Meta(converted, wrapped=given.wrapped) if isinstance(given, Meta) else converted


def row_fields(meta: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a row that store a `meta`."""
    return {"meta": dict(meta), WRAPPED: meta.wrapped} if isinstance(meta, Meta) else {"meta": meta}


def read_meta(row: Mapping[str, Any]) -> Any:
    """Return the `meta` in a row, as its writer knew it."""
    meta, wrapped = row.get("meta"), row.get(WRAPPED)
    if isinstance(wrapped, bool) and isinstance(meta, dict) and meta.keys() == {VALUE}:
        return Meta(meta, wrapped=wrapped)
    return meta
