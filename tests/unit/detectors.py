"""Detectors of sensitive values in every documented form, for tests that load them by their import path."""

from __future__ import annotations

from typing import Any


class Marked:
    """Treats texts that start with `secret` as secrets, and records the values that it checks."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    def is_sensitive(self, key_path: str, value: Any) -> bool:
        """Return whether the text starts with `secret`."""
        self.asked.append((key_path, value))
        return marked(key_path, value)


def marked(key_path: str, value: Any) -> bool:
    """The same detector as a function."""
    return isinstance(value, str) and value.startswith("secret")


def make_object() -> Marked:
    """Return a detector object."""
    return Marked()


def make_function() -> Any:
    """Return a detector function."""
    return marked


an_object = Marked()


class Holder:
    """Holds a detector as an attribute."""

    inner = marked
