"""Events of flows that no majority has confirmed."""

from __future__ import annotations

import pytest

from flowkit.errors import StoreUnavailable
from flowkit.gateway.store import FlowStore
from tests.contract.unconfirmed import Unconfirmed


async def test_events_before_a_duplicate_count_only_when_a_majority_has_them() -> None:
    with pytest.raises(StoreUnavailable):
        await FlowStore(Unconfirmed()).append_events([{"seq": 1}, {"seq": 2}])
