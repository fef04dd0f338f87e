"""The pytest plugin, which this run of pytest has loaded as that of any project."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from flowkit.testing import stub

if TYPE_CHECKING:
    from pathlib import Path

    from flowkit.testing.fixtures import FlowkitRun, FlowkitTime

GRAPH = {
    "nodes": [
        {"node_id": "a", "type": "a", "retry_policy": {"max": 1, "backoff_sec": 60}},
        {"node_id": "b", "type": "b", "depends_on": ["a"]},
    ]
}

CONFTEST = """
import sys

def pytest_collection_finish(session):
    print("imported:", sorted({"temporalio", "motor", "pymongo", "pydantic", "flowkit.testing"} & sys.modules.keys()))
"""


def test_fixtures_run_tasks_in_plain_tests(flowkit_run: FlowkitRun, flowkit_time: FlowkitTime) -> None:
    flaky = stub("a", fails=ConnectionError("x"), times=1)
    flowkit_run(GRAPH, flaky, stub("b")).assert_finished()
    run = flowkit_time(GRAPH, stub("a", fails=ConnectionError("x"), times=1), stub("b"))
    assert (run.status, run.seconds) == ("finished", 60)


async def test_fixtures_run_tasks_in_coroutines(flowkit_run: FlowkitRun, flowkit_time: FlowkitTime) -> None:
    for fixture in (flowkit_run, flowkit_time):
        (await fixture(GRAPH, stub("a"), stub("b"))).assert_order("a", "b")


def test_plugin_imports_nothing_before_a_fixture_is_used(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (tmp_path / "test_user.py").write_text("def test_of_a_user(flowkit_env): ...", encoding="utf-8")
    options = ("--collect-only", "-q", "-s", "-p", "no:cacheprovider", "-p", "no:asyncio")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "imported: []" in done.stdout, done.stdout
    assert "test_user.py::test_of_a_user" in done.stdout
