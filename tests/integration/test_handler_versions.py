"""Workers that run different versions of a handler: who says so, and who ran what."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel
from temporalio.client import WorkflowFailureError
from typer.testing import CliRunner

from flowkit.cli.app import app
from flowkit.models import TaskStatus
from flowkit.worker import role
from tests.integration.handlers import Failing, Gated, InlineQuick, Quick
from tests.integration.harness import EVENT_TIMEOUT_SEC, Harness, eventually, node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.worker import Batch, BatchResult, RoleHandler
    from flowkit.worker.context import RunContext

pytestmark = pytest.mark.server


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


class Held(Quick):
    """Waits in each batch until the test opens the gate of the node."""

    role = "held"

    def __init__(self) -> None:
        self.gates: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Wait, then return one metrics row."""
        await ctx.cancellable(self.gates[ctx.node_id].wait())
        return await super().process_batch(batch, ctx)


async def waits(harness: Harness, task_id: str, node_id: str) -> str:
    """Return what a node waits for, as `flowkit status` shows it."""
    nodes = (await printed(harness, "status", task_id))["nodes"]
    return str(next(each["waits_for"] for each in nodes if each["node_id"] == node_id))


async def test_pinned_task_runs_each_role_with_the_version_of_its_first_attempt(harness: Harness) -> None:
    await harness.engine()
    workers = {
        version: await harness.worker({"held": versioned(Held, version)}, concurrency=1)
        for version in ("1.4", "1.5")
    }
    no_retries = {"retry_policy": {"max": 0}}
    task_id = await harness.create(
        *(node(name, "held", **no_retries) for name in "ab"),
        node("c", "held", "a", "b", **no_retries),
        version_policy="pin",
    )

    async def find_loser() -> str | None:
        attempts = (await printed(harness, "attempts", task_id))["attempts"]
        handed_over = [each for each in attempts if each["code"] == "version_pinned"]
        return handed_over[0]["node_id"] if handed_over else None

    async def waits_for_slot() -> bool:
        return await waits(harness, task_id, loser) == (
            f"a free slot of worker {winner.worker_id}, which also runs attempts of other tasks"
        )

    loser = await eventually(find_loser)
    pinned = (await harness.document(task_id))["coordinator"]["pinned"]["held"]
    other = next(version for version in workers if version != pinned)
    winner, handler = workers[pinned], workers[pinned].handlers["held"]
    assert isinstance(handler, Held)
    await eventually(waits_for_slot)
    assert {name: status for name, status in (await harness.statuses(task_id)).items() if name != loser} == {
        ("a" if loser == "b" else "b"): "running",
        "c": "queued",
    }
    for name in "ab":
        handler.gates[name].set()
    await harness.until_node(task_id, "c", "running")
    await winner.stop()

    text = (
        f"a worker of role held with version {pinned} (pinned by this task); polled by: {other} "
        f"({workers[other].worker_id})"
    )
    await eventually(lambda: waits_for_version(harness, task_id, text))
    details = str(await (await harness.handle(task_id)).query("__temporal_workflow_metadata"))
    assert f"with version {pinned} (pinned by this task)" in details

    again = versioned(Held, pinned)
    assert isinstance(again, Held)
    again.gates["c"].set()
    await harness.worker({"held": again}, concurrency=1)
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    nodes = (await harness.document(task_id))["graph"]["nodes"]
    assert {each["lease"]["version"] for each in nodes} == {pinned}
    assert {each["node_id"]: each["attempt_epoch"] for each in nodes if each["node_id"] != "c"} == {
        loser: 2,
        ("a" if loser == "b" else "b"): 1,
    }


async def waits_for_version(harness: Harness, task_id: str, text: str) -> bool:
    """Return whether node `c` waits for this."""
    return await waits(harness, task_id, "c") == text


async def test_inline_attempt_of_another_version_falls_back_to_a_worker_of_the_pinned_one(
    harness: Harness,
) -> None:
    await harness.engine(handlers={"inline": versioned(InlineQuick, "1.5")})
    held = Held()
    worker = await harness.worker({"held": held, "inline": versioned(InlineQuick, "1.4")})
    task_id = await harness.create(
        node("a", "held"), node("b", "inline", "a", retry_policy={"max": 0}), version_policy="pin"
    )
    await harness.until_node(task_id, "a", "running")
    await harness.db.tasks.update_one({"id": task_id}, {"$set": {"coordinator.pinned.inline": "1.4"}})
    held.gates["a"].set()
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    lease = (await harness.node(task_id, "b"))["lease"]
    assert (lease["worker_id"], lease["version"]) == (worker.worker_id, "1.4")
    attempts = (await printed(harness, "attempts", task_id, "b"))["attempts"]
    assert [(each["outcome"], each["code"]) for each in attempts] == [
        ("handed over", "version_pinned"),
        ("finished", None),
    ]


class Page(BaseModel):
    url: str
    title: str = "none"


@role("crawl", key="url")
async def crawl() -> AsyncIterator[Page]:
    yield Page(url="a", title="A")


@role("count")
def count(page: Page) -> int:
    return len(page.title)


async def test_a_rerun_notes_that_stored_batches_have_fields_which_their_type_lacks_now(
    harness: Harness,
) -> None:
    engine = await harness.engine()
    await harness.worker({"crawl": crawl, "count": count})
    task_id = await harness.create(
        node("crawl", "crawl"),
        node("count", "count", "crawl", inline={"input_adapter": "pull.from_artifacts"}),
    )
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    assert (await engine.rerun(task_id, ["count"], dry_run=True))["notes"] == []
    rows = harness.db.artifacts
    earlier = {"meta": {"url": "a", "name": "A"}}
    await rows.update_many({"task_id": task_id, "batch_uid": {"$exists": True}}, {"$set": earlier})
    [note] = (await engine.rerun(task_id, ["count"], dry_run=True))["notes"]
    assert note.startswith(
        "the stored batches of node 'crawl' have name, which the results of role 'crawl' lack now"
    )
    assert (await engine.rerun(task_id, ["crawl"], dry_run=True))["notes"] == []
