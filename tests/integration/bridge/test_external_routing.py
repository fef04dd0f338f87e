"""Routing between nodes that external workers run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from flowkit.testing.external import Result
from flowkit.testing.external.handlers import scripted
from tests.integration.harness import node

pytestmark = pytest.mark.server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.bridge.external_tasks import ExternalTasks


async def remedy(run: Any) -> AsyncIterator[Any]:
    """Yield the failures that started the node."""
    yield Result({"failed": run.input_inline["failed_nodes"], "order": run.input_inline.get("order")}, "b0")


async def test_external_remediator_reads_why_an_external_node_failed(external: ExternalTasks) -> None:
    await external.served_engine()
    await external.worker()
    await external.external(scripted, remedy)
    fails = {"fail_at": 0, "fail_until_epoch": 9, "reason_code": "full"}
    routing = {"on_success": ["succ"], "on_failure": ["remed", "note"]}
    task_id = await external.create(
        node("u", external.role, inline=fails, retry_policy={"max": 0}, routing=routing),
        node("succ"),
        node("remed", external.other_role, inline={"input_adapter": "noop", "order": 7}),
        node("note", "quick"),
    )
    result = await external.result(task_id)
    assert (result.status, result.handled_failures) == ("finished", ["u"])
    expected = {"u": "failed", "succ": "skipped", "remed": "finished", "note": "finished"}
    assert await external.statuses(task_id) == expected
    (row,) = await external.rows(task_id, "remed")
    (failed,) = row["metrics"]["failed"]
    assert (failed["node_id"], failed["attempt_epoch"], failed["reason_code"]) == ("u", 1, "full")
    assert failed["error"].startswith("full")
    assert row["metrics"]["order"] == 7
