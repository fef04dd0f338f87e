"""The error for a namespace that does not exist on a real server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flowkit.connection import TemporalUnavailable, connect

if TYPE_CHECKING:
    from flowkit.local import Stack

pytestmark = pytest.mark.server


async def test_unknown_namespace_is_not_reported_as_an_unreachable_server(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEMPORAL_NAMESPACE", "nowhere")
    with pytest.raises(TemporalUnavailable) as caught:
        await connect()
    assert caught.value.problem == f"Temporal at {stack.temporal_address} has no namespace 'nowhere'"
    assert "--namespace nowhere" in caught.value.remedy
