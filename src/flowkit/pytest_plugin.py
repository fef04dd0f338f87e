"""Fixtures of pytest for tests of graphs and handlers (docs/howto/testing.md).

pytest loads this module in every run of a project that has FlowKit, so it imports nothing before a fixture is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from flowkit.testing.env import FlowkitEnv
    from flowkit.testing.fixtures import FlowkitRun, FlowkitTime
    from flowkit.testing.servers import LocalTemporal


@pytest.fixture
def flowkit_run() -> FlowkitRun:
    """Run a task in this process: `flowkit_run(graph, *handlers, params=..., functions=..., db=...)`.

    Nothing waits: retries follow at once. It returns the GraphRun; in a coroutine, await it.
    """
    from flowkit.testing.fixtures import FlowkitRun

    return FlowkitRun()


@pytest.fixture
def flowkit_time() -> FlowkitTime:
    """Run a task in this process with a clock that skips backoffs, delays and deadlines.

    `flowkit_time(graph, *handlers, params=..., decide=..., satisfied=..., script=...)` returns the GraphRun; in a
    coroutine, await it.
    """
    from flowkit.testing.fixtures import FlowkitTime

    return FlowkitTime()


@pytest.fixture(scope="session")
def flowkit_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTemporal]:
    """The local server of Temporal that the tests of a session share; the one of `TEMPORAL_ADDRESS` if it is set."""
    from flowkit.testing.servers import LocalTemporal

    with LocalTemporal.started(_folder(tmp_path_factory)) as server:
        yield server


def _folder(factory: pytest.TempPathFactory) -> Path:
    return factory.mktemp("flowkit-temporal")


@pytest.fixture
def flowkit_env(flowkit_server: LocalTemporal) -> FlowkitEnv:
    """Run tasks with a real engine and real workers: `flowkit_env.run(graph, *handlers)`, or `flowkit_env.engine(...)`.

    Each test has its own task queue, and its own database in memory, or in the MongoDB of `MONGO_URL`.
    """
    from flowkit.testing.env import FlowkitEnv

    return FlowkitEnv(flowkit_server)
