"""Conversion of metrics to the form in which FlowKit stores them: JSON types, within the size limit.

MongoDB supports more types, such as dates and ids. But external workers send metrics as JSON, and a node that pulls
must see the same types whichever kind of worker ran its source.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import bson
from bson.errors import BSONError
from pydantic_core import to_jsonable_python

from flowkit import reason_codes
from flowkit.adapters.batch_uids import BadBatchUid
from flowkit.errors import FlowKitError
from flowkit.limits import BATCH_META_BYTES, METRICS_LEVELS
from flowkit.models.metas import like
from flowkit.text import truncate
from flowkit.validation.json_keys import EqualKeys, to_json_types, with_lists
from flowkit.validation.storable import REFERENCE, holds_reference, is_reference

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

EMPTY_BYTES = len(bson.encode({}))
"""Size of empty metrics in bytes."""

_REF = b"$ref\0"
"""The key of a reference, as BSON has it."""

_INT64 = range(-(2**63), 2**63)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_REFUSALS = (ValueError, TypeError, OverflowError, RecursionError, BSONError)
"""Exceptions that pydantic and bson raise for values that they cannot convert."""


class BadMetrics(FlowKitError, ValueError):
    """Raised for metrics or a reference that contain a value which cannot be stored."""

    code = reason_codes.BAD_METRICS


class BatchTooLarge(FlowKitError, ValueError):
    """Raised for metrics of a batch that are too large for the meta of an artifact."""

    code = reason_codes.BATCH_TOO_LARGE


UNSTORABLE = (BadMetrics, BatchTooLarge, BadBatchUid)
"""Errors that a handler's result causes, independently of MongoDB."""


def storable(what: str, given: Any) -> tuple[dict[str, Any], int]:
    """Return `given` converted to JSON types, and its BSON size in bytes. Error messages call it `what`.

    A Meta stays one.

    Raise BadMetrics, which names the first value that has no JSON form or that MongoDB cannot store, or two keys of one
    object that JSON cannot distinguish. Raise BatchTooLarge if the size exceeds the limit.
    """
    if not isinstance(given, dict):
        raise BadMetrics(f"{what} must be an object, not {_type_name(given)}")
    if not given:
        return {}, EMPTY_BYTES
    marked, given = given, with_lists(given)
    try:
        converted = to_json_types(given, inf_nan_mode="null")
        encoded = bson.encode(converted)
    except EqualKeys as error:
        raise BadMetrics(f"{what}: {error}") from None
    except _REFUSALS as error:
        problem = next(_problems(given, "", ()), f"cannot be converted: {error}")
        raise BadMetrics(f"{what}: {problem}") from None
    if _is_deeper(converted, METRICS_LEVELS) or (_REF in encoded and holds_reference(converted)):
        raise BadMetrics(f"{what}: {next(_problems(converted, '', ()))}")
    size = len(encoded)
    if size > BATCH_META_BYTES:
        raise BatchTooLarge(
            f"{what} are {size:,} bytes, more than {BATCH_META_BYTES:,}: "
            "make smaller batches, or store the data and return a reference"
        )
    return like(marked, converted), size


def _is_deeper(converted: Any, levels: int) -> bool:
    """Return whether a value of JSON types has more than `levels` nesting levels."""
    level = [converted]
    for _ in range(levels):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [value for values in inner for value in values if isinstance(value, (dict, list))]
        if not level:
            return False
    return True


def _problems(value: Any, path: str, above: tuple[int, ...]) -> Iterator[str]:
    """Yield a description of each value that cannot be stored, with its path."""
    if id(value) in above:
        yield f"{path or 'the top level'} contains itself"
    elif isinstance(value, _CONTAINERS) and len(above) >= METRICS_LEVELS:
        yield f"{truncate(path, 80)} is nested more than {METRICS_LEVELS} levels deep; flatten it"
    elif isinstance(value, dict):
        if is_reference(value):
            yield f"{path or 'the top level'} {REFERENCE}"
        yield from _bad_keys(value, path)
        yield from _inner(
            ((f"{path}.{_text(key)}".lstrip("."), each) for key, each in value.items()), value, above
        )
    elif isinstance(value, _CONTAINERS):
        yield from _inner(((f"{path}[{place}]", item) for place, item in enumerate(value)), value, above)
    elif problem := _leaf_problem(value):
        yield f"{path or 'the top level'} {problem}"


def _inner(items: Iterable[tuple[str, Any]], owner: Any, above: tuple[int, ...]) -> Iterator[str]:
    for path, item in items:
        yield from _problems(item, path, (*above, id(owner)))


def _bad_keys(value: dict[Any, Any], path: str) -> Iterator[str]:
    for key in value:
        if isinstance(key, str) and "\0" in key:
            yield (
                f"{path or 'the top level'} has the key {_text(key)!r:.80}, and keys cannot contain "
                "a NUL character; rename it"
            )
        elif problem := _key_problem(key):
            yield f"{path or 'the top level'} has the key {_text(key)!r:.80}, which {problem}"


def _key_problem(key: Any) -> str:
    """Return why a key cannot become text, as JSON requires; an empty string if it can."""
    try:
        bson.encode(to_jsonable_python({key: 0}))
    except _REFUSALS:
        return f"is of type {_type_name(key)} and has no text form; use a string"
    return ""


def _leaf_problem(value: Any) -> str:
    """Return why a value that is not a container cannot be stored; an empty string if it can."""
    if isinstance(value, int) and value not in _INT64:
        return "is an integer outside the 64-bit range that MongoDB stores; return it as a string"
    try:
        bson.encode({"": to_jsonable_python(value, inf_nan_mode="null")})
    except UnicodeError:
        return "is not valid UTF-8; encode it, for example as base64"
    except _REFUSALS:
        return (
            f"is of type {_type_name(value)}, which has no JSON form; return text, numbers, lists or objects"
        )
    return ""


def _text(key: object) -> str:
    """Return a key as text for an error message. Python refuses to print integers of thousands of digits."""
    try:
        return str(key)
    except ValueError:
        return f"<{_type_name(key)}>"


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
