"""Every test of the gateway also checks what it reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flowkit.gateway import store
from tests.bounded_reads import check_reads

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _bounded_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail if a read of the gateway has no limit or no projection."""
    yield from check_reads(monkeypatch, store)
