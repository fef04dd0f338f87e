"""The uids of the items of a source, from a key of the item, so that each attempt gives the same ones. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING, Any
from uuid import UUID

from pydantic import AnyUrl, BaseModel
from pydantic_core import to_jsonable_python
from typing_extensions import is_typeddict

from flowkit import reason_codes
from flowkit.activities.json_types import shown_value
from flowkit.activities.results import BatchFailure
from flowkit.errors import ConfigError
from flowkit.text import printed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flowkit.activities.json_types import JsonType

_NO_KEY = (
    "the uid of a batch, which must be the same in every attempt, comes from the item: set key to the name of a "
    'field, such as key="url", to several names, or to a function of the item'
)


class UidRule:
    """Returns the uid of an item: the text of its key.

    A key of several values is their texts, with `%` and `/` percent-encoded, joined by `/`.
    """

    def __init__(self, key: Any, output: JsonType, owner: str) -> None:
        """Prepare the rule. Raise ConfigError if the key is missing, or cannot be the same in every attempt."""
        self._owner = owner
        self._output = output
        self._names = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, (tuple, list)) else ()
        self._function = key if callable(key) else None
        self._is_single = not isinstance(key, (tuple, list))
        if self._function is None and not (
            self._names and all(isinstance(each, str) for each in self._names)
        ):
            given = "no key" if key is None else f"the key {printed(key)}"
            raise ConfigError(f"{owner} is a source with {given}: {_NO_KEY}")
        if inspect.iscoroutinefunction(key):
            raise ConfigError(
                f"{owner}: the key {self.name} is a coroutine function: write it as a plain `def`"
            )
        for name in self._names:
            self._check_field(name)

    @property
    def name(self) -> str:
        """What errors call the key."""
        if self._function is not None:
            return str(getattr(self._function, "__name__", "key"))
        return self._names[0] if self._is_single else f"({', '.join(self._names)})"

    def _check_field(self, name: str) -> None:
        fields = _fields_of(self._output.kind)
        if fields is None:
            return
        if name not in fields:
            raise ConfigError(
                f"{self._owner}: the key {name!r} is not a field of {self._output.name}, which has "
                f"{', '.join(fields) or 'none'}"
            )
        if fields[name]:
            raise ConfigError(
                f"{self._owner}: the key {name!r} of {self._output.name} has a default_factory, so each attempt would "
                "give the same item another uid and store it again: use a field that comes from the data"
            )

    def uid_of(self, item: Any, hide: Callable[[str], str] = str) -> str:
        """Return the uid of an item. Raise BatchFailure if its key has no text, or would differ in a later attempt.

        `hide` removes what errors must not show from a text.
        """
        uid = self._text_of(item)
        again = self._text_of(self._read_again(item, hide))
        if again != uid:
            raise self._failure(
                f"the key {self.name} gives {shown_value(uid, hide)} for an item, and {shown_value(again, hide)} for "
                "the same item read from its JSON, so a later attempt would store it again under another uid: compute "
                "the key only from fields of the item that come from the data, not from the time, a random number or "
                "the identity of an object"
            )
        return uid

    def _read_again(self, item: Any, hide: Callable[[str], str]) -> Any:
        try:
            return self._output.read_again(item)
        except ValueError as error:
            problems = self._output.problems(error, hide)
            raise BatchFailure(
                f"{self._owner} yields a {self._output.name} that cannot be read from its own JSON: {problems}",
                reason_code=reason_codes.SCHEMA_MISMATCH,
            ) from None

    def _text_of(self, item: Any) -> str:
        text = self._join_key(item)
        if not text:
            raise self._failure(f"the key {self.name} of an item is an empty text, which identifies nothing")
        return text

    def _join_key(self, item: Any) -> str:
        if self._function is not None:
            value = self._function(item)
            if isinstance(value, (tuple, list)):
                return self._join([*value])
            return self._part(value, self.name)
        values = [_field_of(item, name) for name in self._names]
        return self._part(values[0], self._names[0]) if self._is_single else self._join(values)

    def _join(self, values: Sequence[Any]) -> str:
        names = self._names or [f"{self.name}[{index}]" for index in range(len(values))]
        parts = [self._part(value, name) for value, name in zip(values, names, strict=True)]
        return "/".join(part.replace("%", "%25").replace("/", "%2F") for part in parts)

    def _part(self, value: Any, name: str) -> str:
        text = _key_text(value)
        if text is None:
            raise self._failure(
                f"the key {name} of an item is of type {type(value).__name__}: a key is a text, a whole number, a "
                "date, a UUID or an enum"
            )
        return text

    def _failure(self, text: str) -> BatchFailure:
        return BatchFailure(f"{self._owner}: {text}", reason_code=reason_codes.BAD_BATCH_UID, permanent=True)


def _fields_of(kind: Any) -> dict[str, bool] | None:
    """Return the fields of a type, and whether each has a default_factory; None for a type without known fields."""
    if not isinstance(kind, type):
        return None
    if issubclass(kind, BaseModel):
        own = {name: each.default_factory is not None for name, each in kind.model_fields.items()}
        return own | dict.fromkeys(kind.model_computed_fields, False)
    if (fields := getattr(kind, "__dataclass_fields__", None)) is not None:
        return {name: callable(each.default_factory) for name, each in fields.items()}
    return dict.fromkeys(kind.__annotations__, False) if is_typeddict(kind) else None


def _field_of(item: Any, name: str) -> Any:
    if isinstance(item, Mapping):
        return item.get(name)
    return getattr(item, name, None)


def _key_text(value: Any) -> str | None:
    """Return the text of a value in a uid; None if it has none that is the same in every process."""
    if isinstance(value, Enum):
        return _key_text(value.value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, _KEY_TYPES):
        return str(to_jsonable_python(value))
    return None


_KEY_TYPES = (date, time, timedelta, Decimal, PurePath, UUID, AnyUrl)
