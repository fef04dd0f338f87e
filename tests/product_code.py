"""Tests of the core that need the code of a product, which `make nightly STEPS=core` leaves out."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs_product(name: str) -> pytest.MarkDecorator:
    """Return the mark of a test that is skipped where the code of a product is absent."""
    return pytest.mark.skipif(find_spec(f"flowkit.{name}") is None, reason=f"needs flowkit.{name}")
