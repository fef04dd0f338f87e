"""Rows of the queue that no majority has confirmed."""

from __future__ import annotations

import pytest

from flowkit.admission.store import AdmissionStore, Hold
from flowkit.errors import StoreUnavailable
from tests.contract.unconfirmed import Unconfirmed


async def test_requests_beside_a_duplicate_count_only_when_a_majority_has_them() -> None:
    with pytest.raises(StoreUnavailable):
        await AdmissionStore(Unconfirmed(), queue="q").insert([{"_id": "0"}, {"_id": "1"}])


async def test_holders_beside_a_duplicate_count_only_when_a_majority_has_them() -> None:
    with pytest.raises(StoreUnavailable):
        await AdmissionStore(Unconfirmed(), queue="q").hold([Hold(holder="u/a", list="held", entry="0")])
