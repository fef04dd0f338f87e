"""Hides secrets in what people see of a handler: in what `flowkit debug` prints, and in kept log lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flowkit.graph.expressions import hide_forms, list_forms, long_forms
from flowkit.text import HIDDEN, SECRET_KEY, SECRET_TEXT, hide_texts

if TYPE_CHECKING:
    from collections.abc import Iterator


class Mask:
    """Hides texts of well-known forms, the values of keys such as `password`, and these values in other texts.

    `given` are the values in which to look for such keys.
    """

    def __init__(self, *given: Any) -> None:
        self._secrets: set[str] = set()
        self._forms: list[str] = []
        """The forms of all secrets, longest first."""
        if given:
            self.add(given)

    def add(self, given: Any) -> None:
        """Look for such keys in one more value."""
        self._add([*_list_secrets(given, named=False)])

    def add_values(self, values: Any) -> None:
        """Hide all of these values, such as those of expressions."""
        self._add([*list_forms(values)])

    def _add(self, secrets: list[str]) -> None:
        if not self._secrets.issuperset(secrets):
            self._secrets.update(secrets)
            self._forms = long_forms([*self._secrets])

    @property
    def longest(self) -> int:
        """Number of characters of the longest secret; 0 if none is known."""
        return len(self._forms[0]) if self._forms else 0

    def text(self, text: str) -> str:
        """Return a text without secrets."""
        return hide_forms(SECRET_TEXT.sub(HIDDEN, text), self._forms)

    def value(self, value: Any) -> Any:
        """Return a value of JSON without secrets."""
        match value:
            case Mapping():
                return {key: self._hold(key, held) for key, held in value.items()}
            case list() | tuple():
                return [self.value(held) for held in value]
            case str():
                return self.text(value)
        return value

    def _hold(self, key: object, held: Any) -> Any:
        return hide_texts(held) if SECRET_KEY.search(str(key)) else self.value(held)


def _list_secrets(value: Any, *, named: bool) -> Iterator[str]:
    match value:
        case Mapping():
            for key, held in value.items():
                yield from _list_secrets(held, named=named or bool(SECRET_KEY.search(str(key))))
        case list() | tuple():
            for held in value:
                yield from _list_secrets(held, named=named)
        case str() if named:
            yield value
