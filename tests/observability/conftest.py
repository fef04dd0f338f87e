"""Fixtures of the tests that run Prometheus."""

from tests.integration.conftest import harness

__all__ = ["harness"]
