"""Every unit test of the gateway also checks what it reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.bounded_reads import check_reads

if TYPE_CHECKING:
    from collections.abc import Iterator

_GATEWAY = ("test_flow_", "test_job_", "test_runner_", "test_subscriptions")


@pytest.fixture(autouse=True)
def _bounded_reads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail if a read of the gateway has no limit or no projection."""
    if not request.node.path.name.startswith(_GATEWAY):
        yield
        return
    from flowkit.gateway import store  # only these tests need it

    yield from check_reads(monkeypatch, store)
