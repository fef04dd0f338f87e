"""Live updates: numbers of polls, one poll for all viewers, and what a page gets while a server is down."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from flowkit.client import UnknownTask
from flowkit.page import live
from flowkit.page.live import LiveTasks
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually
from tests.page.pages import Stage, nodes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.page.live import Update

TASK = "t"


@pytest.fixture
async def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A database with one task of two nodes, which is looked at often."""
    monkeypatch.setattr(live, "POLL_SEC", 0.01)
    monkeypatch.setattr(live, "_LOOK_AGAIN_SEC", 0.02)
    stage = Stage()
    await stage.add(TASK, nodes("a", "b"))
    return stage


async def following(updates: AsyncIterator[Update]) -> Update:
    """Return the next update."""
    return await asyncio.wait_for(anext(updates), EVENT_TIMEOUT_SEC)


async def with_nodes(updates: AsyncIterator[Update]) -> Update:
    """Return the next update that changes nodes."""
    while not (update := await following(updates)).nodes:
        pass
    return update


async def with_problem(updates: AsyncIterator[Update], *, some: bool) -> Update:
    """Return the next update with a problem, or without one."""
    while bool((update := await following(updates)).problem) is not some:
        pass
    return update


async def test_the_whole_state_comes_first_and_then_what_has_changed(stage: Stage) -> None:
    async with LiveTasks(stage.servers).watch(TASK) as feed:
        updates = feed.updates()
        first = await following(updates)
        assert (first.whole, [*first.nodes]) == (True, [0, 1])
        assert first.task["task_id"] == TASK
        await stage.set_node(TASK, 1, status="running", attempt_epoch=1)
        change = await with_nodes(updates)
        assert (change.whole, [*change.nodes]) == (False, [1])
        assert (change.nodes[1]["status"], change.nodes[1]["attempt"]) == ("running", 1)
        assert change.poll > first.poll
        assert change.server == first.server


async def test_two_hundred_viewers_of_a_task_cost_one_poll(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_LOOK_AGAIN_SEC", 600.0)
    tasks = LiveTasks(stage.servers)
    async with AsyncExitStack() as viewers:
        feeds = await asyncio.gather(*(viewers.enter_async_context(tasks.watch(TASK)) for _ in range(200)))
        assert len({id(feed) for feed in feeds}) == 1
        assert stage.catalog.reads["document"] == 1
        streams = [feed.updates() for feed in feeds]
        assert {(await following(each)).poll for each in streams} == {1}
        await stage.set_node(TASK, 0, status="running")
        changes = [await with_nodes(each) for each in streams]
        assert {each.nodes[0]["status"] for each in changes} == {"running"}
        assert len({id(each) for each in changes}) == len({each.poll for each in changes})
    assert tasks.task_ids == []


async def test_an_unchanged_document_of_an_ended_task_is_read_once(stage: Stage) -> None:
    await stage.add("ended", nodes("a"), status="finished")

    async def has_looked() -> bool:
        return stage.catalog.reads["mark"] > 20

    async with LiveTasks(stage.servers).watch("ended"):
        await eventually(has_looked)
        assert stage.catalog.reads["document"] == 1


async def test_an_unchanged_document_of_an_open_task_is_read_once_also_without_temporal(stage: Stage) -> None:
    """What may have changed without it is looked up: the workflow, and what running attempts have stored."""
    await stage.set_node(TASK, 0, status="running", attempt_epoch=1)
    async with LiveTasks(stage.servers).watch(TASK) as feed:
        updates = feed.updates()
        polls = [await following(updates) for _ in range(5)]
        assert stage.catalog.reads["document"] == 1
        batch = {"task_id": TASK, "node_id": "a", "batch_uid": "1", "status": "partial", "attempt_epoch": 1}
        await stage.db.artifacts.insert_one(batch)
        assert (await with_nodes(updates)).nodes[0]["batches"] == 1
        stage.tasks.temporal_is_down = True
        await with_problem(updates, some=True)
        polls += [await following(updates) for _ in range(5)]
        assert stage.catalog.reads["document"] == 2
        await stage.set_node(TASK, 0, status="finished")
        while (await with_nodes(updates)).nodes[0]["status"] != "finished":
            pass
    assert {each.task["closed"] for each in polls} == {False}


async def test_a_page_that_comes_back_gets_higher_numbers_from_the_same_server(stage: Stage) -> None:
    tasks = LiveTasks(stage.servers)
    seen = []
    for _ in range(2):
        async with tasks.watch(TASK) as feed:
            updates = feed.updates()
            seen.append([await following(updates) for _ in range(3)])
    assert seen[1][0].server == seen[0][0].server
    assert seen[1][0].whole
    assert seen[1][0].poll > seen[0][-1].poll


async def test_a_task_that_is_created_again_between_two_polls_has_another_origin(stage: Stage) -> None:
    """Its attempts begin again at 1, which pages take only for another document."""
    await stage.set_node(TASK, 0, status="running", attempt_epoch=5)
    async with LiveTasks(stage.servers).watch(TASK) as feed:
        updates = feed.updates()
        first = await following(updates)
        await stage.replace(TASK, nodes("a", "b"))
        again = await with_nodes(updates)
        while again.origin == first.origin:
            again = await with_nodes(updates)
        assert [each["attempt"] for each in again.nodes.values()] == [0, 0]


async def test_a_task_that_nobody_watches_is_not_polled(stage: Stage) -> None:
    tasks = LiveTasks(stage.servers)
    async with tasks.watch(TASK) as feed:
        await following(feed.updates())
    looks = stage.catalog.reads["mark"]
    async with tasks.watch(TASK) as again:
        assert again is not feed
        assert stage.catalog.reads["mark"] == looks + 1


async def test_an_unknown_task_is_refused_for_every_viewer_and_found_when_it_exists(stage: Stage) -> None:
    tasks = LiveTasks(stage.servers)
    for _ in range(2):
        with pytest.raises(UnknownTask):
            async with tasks.watch("later"):
                pass
    await stage.add("later", nodes("a"))
    async with tasks.watch("later") as feed:
        assert (await following(feed.updates())).whole


async def test_an_outage_of_mongodb_is_reported_once_and_ends(stage: Stage) -> None:
    async with LiveTasks(stage.servers).watch(TASK) as feed:
        updates = feed.updates()
        await following(updates)
        stage.catalog.is_down = True
        lost = await with_problem(updates, some=True)
        assert lost.nodes == {}
        assert lost.problem is not None
        await stage.set_node(TASK, 0, status="running")
        stage.catalog.is_down = False
        found = await with_problem(updates, some=False)
        assert found.nodes[0]["status"] == "running"


async def test_without_temporal_the_page_shows_the_document_and_says_so(stage: Stage) -> None:
    stage.tasks.temporal_is_down = True
    async with LiveTasks(stage.servers).watch(TASK) as feed:
        updates = feed.updates()
        first = await following(updates)
        assert first.problem == "Temporal does not respond (UNAVAILABLE), so this is what MongoDB has"
        assert first.task["source"] == "document"
        stage.tasks.temporal_is_down = False
        assert (await with_problem(updates, some=False)).poll > first.poll


async def test_a_read_that_never_returns_is_reported(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_LONGEST_READ_SEC", 0.05)

    async def hang(task_id: str) -> None:
        await asyncio.Event().wait()

    async with LiveTasks(stage.servers).watch(TASK) as feed:
        updates = feed.updates()
        await following(updates)
        monkeypatch.setattr(stage.catalog, "change_mark", hang)
        lost = await with_problem(updates, some=True)
        assert lost.problem == "the servers do not respond within 0.05 s"


async def test_an_unexpected_error_is_reported_and_does_not_end_the_feed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(task_id: str) -> None:
        raise KeyError(task_id)

    async with LiveTasks(stage.servers).watch(TASK) as feed:
        updates = feed.updates()
        await following(updates)
        with monkeypatch.context() as patch:
            patch.setattr(stage.catalog, "change_mark", fail)
            await with_problem(updates, some=True)
        await with_problem(updates, some=False)


async def test_a_purged_task_and_one_with_other_nodes_are_followed(stage: Stage) -> None:
    async with LiveTasks(stage.servers).watch(TASK) as feed:
        updates = feed.updates()
        await following(updates)
        await stage.db.tasks.delete_one({"id": TASK})
        assert (await with_problem(updates, some=True)).problem == "the task no longer exists"
        await stage.add(TASK, nodes("only"))
        again = await with_nodes(updates)
        assert [each["node_id"] for each in again.nodes.values()] == ["only"]
        assert again.count == 1


async def test_a_paused_task_is_one_also_where_only_its_document_says_so(stage: Stage) -> None:
    """The query of a large workflow omits nodes, and no engine may respond."""
    paused = {"scope": "task", "since": datetime.now(UTC), "by": "ops", "reason": "deploy", "drained": True}
    await stage.db.tasks.update_one({"id": TASK}, {"$set": {"coordinator.paused": [paused]}})
    await stage.set_node(TASK, 0, paused=True)
    async with LiveTasks(stage.servers).watch(TASK) as feed:
        first = await following(feed.updates())
    assert first.task["paused"] == ("task paused by ops: deploy",)
    assert first.nodes[0]["waits_for"] == "resume"
    await stage.db.tasks.update_one({"id": TASK}, {"$set": {"status": "cancelled"}})
    async with LiveTasks(stage.servers).watch(TASK) as feed:
        assert (await following(feed.updates())).task["paused"] == ()
