"""Detectors of sensitive values in every documented form, for tests that name them by their import path."""

from __future__ import annotations

from typing import Any


class Marked:
    """Takes texts that begin with `secret` for secrets, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    def is_sensitive(self, key_path: str, value: Any) -> bool:
        """Whether the value says so itself."""
        self.asked.append((key_path, value))
        return marked(key_path, value)


def marked(key_path: str, value: Any) -> bool:
    """The same as a function."""
    return isinstance(value, str) and value.startswith("secret")


def make_object() -> Marked:
    """A factory of an object."""
    return Marked()


def make_function() -> Any:
    """A factory of a function."""
    return marked


an_object = Marked()


class Holder:
    """Holds a detector as an attribute."""

    inner = marked
