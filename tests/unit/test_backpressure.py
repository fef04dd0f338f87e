"""When a node is too far ahead of the nodes that pull from it."""

from __future__ import annotations

import pytest

from flowkit.activities.batches.backpressure import is_reached


@pytest.mark.parametrize(
    ("stored", "max_ahead", "claims", "reached"),
    [
        (0, 1, [0], False),
        (1, 1, [0], True),
        (1, 1, [1], False),
        (9, 10, [0], False),
        (10, 10, [0], True),
        (15, 10, [5], True),
        (15, 10, [6], False),
        (15, 10, [6, 5], True),
        (15, 10, [16, 20], False),
        (10_000, 1, [], False),
    ],
)
def test_limit_is_reached_if_the_slowest_node_is_that_many_batches_behind(
    stored: int, max_ahead: int, claims: list[int], reached: bool
) -> None:
    assert is_reached(stored, max_ahead, claims) is reached
