"""Workers that run different versions of a handler: who says so, and who ran what."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.client import WorkflowFailureError
from typer.testing import CliRunner

from flowkit.cli.app import app
from tests.integration.handlers import Failing, Gated
from tests.integration.harness import Harness, eventually, node

if TYPE_CHECKING:
    from flowkit.worker import RoleHandler


def versioned(kind: type[RoleHandler], version: str) -> RoleHandler:
    """Return a handler with this version."""
    made: Any = type(kind.__name__, (kind,), {"handler_version": version})()
    return made  # type: ignore[no-any-return]


async def printed(harness: Harness, *arguments: str) -> dict[str, Any]:
    """Return what a command prints as JSON."""
    run = CliRunner(env={**harness.environment}).invoke
    done = await asyncio.to_thread(run, app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


async def test_versions_are_recorded_and_differences_are_reported(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    await harness.engine()
    old, new = versioned(Gated, "1.4"), versioned(Gated, "1.5")
    workers = {
        version: await harness.worker({"gated": gated, "failing": versioned(Failing, version)}, concurrency=1)
        for version, gated in (("1.4", old), ("1.5", new))
    }
    ids = {version: worker.worker_id for version, worker in workers.items()}
    fails = node("c", "failing", "a", "b", inline={"failures": 1, "permanent": True})
    task_id = await harness.create(node("a", "gated"), node("b", "gated"), fails)
    for name in "ab":
        await harness.until_node(task_id, name, "running")
    ran = {name: (await harness.node(task_id, name))["lease"] for name in "ab"}
    assert {(lease["version"], lease["worker_id"]) for lease in ran.values()} == {*ids.items()}

    mixed = f"1.4 ({ids['1.4']}), 1.5 ({ids['1.5']})"
    online = [f"workers of role {role} run different versions: {mixed}" for role in ("failing", "gated")]
    await eventually(lambda: logged(caplog, online[1]))
    assert {*online} <= {*(await printed(harness, "status", task_id))["hints"]}
    listed = await printed(harness, "workers", "--queue", harness.queue)
    assert {each["worker_id"]: each["handlers"] for each in listed["workers"] if each["handlers"]} == {
        worker_id: {"failing": version, "gated": version} for version, worker_id in ids.items()
    }
    assert [each["role"] for each in listed["mixed_versions"]] == ["failing", "gated"]

    for gated in (old, new):
        assert isinstance(gated, Gated)
        gated.gate.set()
    with pytest.raises(WorkflowFailureError):
        await harness.result(task_id)
    failed = await harness.node(task_id, "c")
    worker_id, version = failed["lease"]["worker_id"], failed["lease"]["version"]
    assert failed["last_error"] == f"flaky: as ordered (worker {worker_id}, version {version})"
    reason = (await harness.until_status(task_id, "failed"))["reason"]
    assert reason == f"node 'c' failed: {failed['last_error']}"
    attempts = (await printed(harness, "attempts", task_id))["attempts"]
    assert {each["node_id"]: (each["version"], each["worker"]) for each in attempts} == {
        **{name: (lease["version"], lease["worker_id"]) for name, lease in ran.items()},
        "c": (version, worker_id),
    }
    nodes = {version: name for name, version in ((name, lease["version"]) for name, lease in ran.items())}
    [hint] = (await printed(harness, "status", task_id))["hints"]
    assert (
        hint == f"nodes of role gated ran with different versions: 1.4 ({nodes['1.4']}), 1.5 ({nodes['1.5']})"
    )
    details = str(await (await harness.handle(task_id)).query("__temporal_workflow_metadata"))
    assert "Attempts of role gated ran with different versions: " in details
    assert {f"{version} ({worker_id})" in details for version, worker_id in ids.items()} == {True}
    assert [caplog.messages.count(text) for text in online] == [1, 1]


async def logged(caplog: pytest.LogCaptureFixture, message: str) -> bool:
    """Return whether a message was logged."""
    return message in caplog.messages
