"""A failed test leaves no client whose destructor fails a later test."""

from __future__ import annotations

import gc
import sys
import warnings
import weakref

import pytest
from tests.conftest import collect_leftovers


class Client:
    """Warns if it is not closed, as the clients of Kafka do."""

    def __init__(self) -> None:
        self.own: object = self

    def __del__(self) -> None:
        """Warn. As an error, this fails the test that happens to run."""
        warnings.warn("unclosed client", ResourceWarning, stacklevel=1)


def _time_out() -> weakref.ref[Client]:
    """Fail with an open client, as a test does that times out, and return the client."""
    client = Client()
    known = weakref.ref(client)
    try:
        pytest.fail("Timeout (>240.0s) from pytest-timeout.")
    except pytest.fail.Exception as error:
        sys.last_value = error
    return known


def test_what_a_failed_test_has_left_open_warns_before_the_next_test() -> None:
    left = _time_out()
    collect_leftovers()
    assert left() is None
    gc.collect()
