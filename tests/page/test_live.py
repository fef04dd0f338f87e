"""Updates: numbers of polls, one poll for all pages, and what a page gets while a server is down."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from flowkit.client import UnknownTask
from flowkit.page import live
from flowkit.page.live import LiveTasks
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually
from tests.page.pages import Stage, nodes
from tests.unit.event_loop import let_other_tasks_run, until

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


class Follower:
    """A page that asks for the updates of a task."""

    def __init__(self, tasks: LiveTasks, task_id: str = TASK) -> None:
        self._tasks = tasks
        self._task_id = task_id
        self._known = ("", 0)

    async def ask(self) -> Update:
        """Return what has changed since the last call."""
        update = await self._tasks.update(self._task_id, *self._known)
        self._known = update.server, update.poll
        return update

    async def following(self) -> Update:
        """Return the next update with another number."""
        known = self._known
        async with asyncio.timeout(EVENT_TIMEOUT_SEC):
            while ((update := await self.ask()).server, update.poll) == known:
                await let_other_tasks_run()
        return update

    async def with_nodes(self) -> Update:
        """Return the next update that changes nodes."""
        while not (update := await self.following()).nodes:
            pass
        return update

    async def with_problem(self, *, some: bool) -> Update:
        """Return the next update with a problem, or without one."""
        while bool((update := await self.following()).problem) is not some:
            pass
        return update


@pytest.fixture
async def tasks(stage: Stage) -> AsyncIterator[LiveTasks]:
    """The tasks of a page server."""
    tasks = LiveTasks(stage.servers)
    yield tasks
    await tasks.close()


@pytest.fixture
def page(tasks: LiveTasks) -> Follower:
    """A page of the task."""
    return Follower(tasks)


async def test_the_whole_state_comes_first_and_then_what_has_changed(stage: Stage, page: Follower) -> None:
    first = await page.following()
    assert (first.whole, [*first.nodes]) == (True, [0, 1])
    assert first.task["task_id"] == TASK
    await stage.set_node(TASK, 1, status="running", attempt_epoch=1)
    change = await page.with_nodes()
    assert (change.whole, [*change.nodes]) == (False, [1])
    assert (change.nodes[1]["status"], change.nodes[1]["attempt"]) == ("running", 1)
    assert change.poll > first.poll
    assert change.server == first.server


async def test_two_hundred_pages_of_a_task_cost_one_poll(
    stage: Stage, tasks: LiveTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_LOOK_AGAIN_SEC", 600.0)
    pages = [Follower(tasks) for _ in range(200)]
    assert {each.poll for each in await asyncio.gather(*(page.ask() for page in pages))} == {1}
    assert stage.catalog.reads["document"] == 1
    await stage.set_node(TASK, 0, status="running")
    changes = [await each.with_nodes() for each in pages]
    assert {each.nodes[0]["status"] for each in changes} == {"running"}
    assert len({id(each) for each in changes}) == len({each.poll for each in changes})
    assert tasks.task_ids == [TASK]


async def test_any_number_of_polls_that_pages_claim_to_know_costs_little(
    stage: Stage, tasks: LiveTasks
) -> None:
    server = (await tasks.update(TASK)).server
    for poll in (*range(2, 500), 2**53):
        assert (await tasks.update(TASK, server, poll)).nodes == {}
    [watched] = tasks._watched.values()
    assert len((await watched.opened())._updates) <= live._MOST_UPDATES


async def test_an_unchanged_document_of_an_ended_task_is_read_once(stage: Stage, tasks: LiveTasks) -> None:
    await stage.add("ended", nodes("a"), status="finished")
    await tasks.update("ended")

    async def has_looked() -> bool:
        return stage.catalog.reads["mark"] > 20

    await eventually(has_looked)
    assert stage.catalog.reads["document"] == 1
    stage.catalog.is_down = True
    lost = await Follower(tasks, "ended").with_problem(some=True)
    assert lost.lost_at is not None
    assert lost.lost_at > lost.at


async def test_an_unchanged_document_of_an_open_task_is_read_once_also_without_temporal(
    stage: Stage, page: Follower
) -> None:
    """What may have changed without it is looked up: the workflow, and what running attempts have stored."""
    await stage.set_node(TASK, 0, status="running", attempt_epoch=1)
    polls = [await page.following() for _ in range(5)]
    assert stage.catalog.reads["document"] == 1
    batch = {"task_id": TASK, "node_id": "a", "batch_uid": "1", "status": "partial", "attempt_epoch": 1}
    await stage.db.artifacts.insert_one(batch)
    assert (await page.with_nodes()).nodes[0]["batches"] == 1
    stage.tasks.temporal_is_down = True
    await page.with_problem(some=True)
    polls += [await page.following() for _ in range(5)]
    assert stage.catalog.reads["document"] == 2
    await stage.set_node(TASK, 0, status="finished")
    while (await page.with_nodes()).nodes[0]["status"] != "finished":
        pass
    assert {each.task["closed"] for each in polls} == {False}


async def test_a_page_of_another_start_of_the_server_gets_the_whole_state(
    tasks: LiveTasks, page: Follower
) -> None:
    seen = await page.ask()
    for server, poll in (("another", seen.poll), ("another", 900), (tasks.server, 0)):
        again = await tasks.update(TASK, server, poll)
        assert (again.whole, [*again.nodes], again.server) == (True, [0, 1], seen.server)
    assert not (await page.ask()).whole


async def test_a_task_that_is_created_again_between_two_polls_has_another_origin(
    stage: Stage, page: Follower
) -> None:
    """Its attempts begin again at 1, which pages take only for another document."""
    await stage.set_node(TASK, 0, status="running", attempt_epoch=5)
    first = await page.following()
    await stage.replace(TASK, nodes("a", "b"))
    again = await page.with_nodes()
    while again.origin == first.origin:
        again = await page.with_nodes()
    assert [each["attempt"] for each in again.nodes.values()] == [0, 0]


async def test_a_task_for_which_no_page_asks_any_more_is_not_read(
    stage: Stage, tasks: LiveTasks, page: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that comes back then gets everything, with higher numbers."""
    first = await page.ask()
    monkeypatch.setattr(live, "KEEP_SEC", 0.0)
    await until(lambda: tasks.task_ids == [])
    await stage.set_node(TASK, 1, status="running", attempt_epoch=1)
    looks = stage.catalog.reads["mark"]
    again = await page.ask()
    assert stage.catalog.reads["mark"] == looks + 1
    assert (again.server, [*again.nodes], again.nodes[1]["status"]) == (first.server, [0, 1], "running")
    assert again.poll > first.poll


async def test_an_unknown_task_is_refused_for_every_page_and_found_when_it_exists(
    stage: Stage, tasks: LiveTasks
) -> None:
    for _ in range(2):
        with pytest.raises(UnknownTask):
            await tasks.update("later")
    await stage.add("later", nodes("a"))
    assert (await tasks.update("later")).whole


async def test_an_outage_of_mongodb_is_reported_once_and_ends(stage: Stage, page: Follower) -> None:
    await page.following()
    stage.catalog.is_down = True
    lost = await page.with_problem(some=True)
    assert lost.nodes == {}
    assert lost.problem is not None
    await stage.set_node(TASK, 0, status="running")
    stage.catalog.is_down = False
    found = await page.with_problem(some=False)
    assert found.nodes[0]["status"] == "running"


async def test_without_temporal_the_page_shows_the_document_and_says_so(stage: Stage, page: Follower) -> None:
    """Since when it is not live stays the same, however often the document is read."""
    stage.tasks.temporal_is_down = True
    first = await page.following()
    assert first.problem == "Temporal does not respond (UNAVAILABLE), so this is what MongoDB has"
    assert first.task["source"] == "document"
    lost = await page.following()
    assert lost.at > first.at
    assert lost.lost_at == first.lost_at == first.at
    stage.tasks.temporal_is_down = False
    assert (await page.with_problem(some=False)).poll > first.poll


async def test_a_read_that_never_returns_is_reported(
    stage: Stage, page: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_LONGEST_READ_SEC", 0.05)

    async def hang(task_id: str) -> None:
        await asyncio.Event().wait()

    await page.following()
    monkeypatch.setattr(stage.catalog, "change_mark", hang)
    lost = await page.with_problem(some=True)
    assert lost.problem == "the servers do not respond within 0.05 s"


async def test_an_unexpected_error_is_reported_and_does_not_end_the_feed(
    stage: Stage, page: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(task_id: str) -> None:
        raise KeyError(task_id)

    await page.following()
    with monkeypatch.context() as patch:
        patch.setattr(stage.catalog, "change_mark", fail)
        await page.with_problem(some=True)
    await page.with_problem(some=False)


async def test_a_purged_task_and_one_with_other_nodes_are_followed(stage: Stage, page: Follower) -> None:
    await page.following()
    await stage.db.tasks.delete_one({"id": TASK})
    assert (await page.with_problem(some=True)).problem == "the task no longer exists"
    await stage.add(TASK, nodes("only"))
    again = await page.with_nodes()
    assert [each["node_id"] for each in again.nodes.values()] == ["only"]
    assert again.count == 1


async def test_a_paused_task_is_one_also_where_only_its_document_says_so(
    stage: Stage, page: Follower
) -> None:
    """The query of a large workflow omits nodes, and no engine may respond."""
    paused = {"scope": "task", "since": datetime.now(UTC), "by": "ops", "reason": "deploy", "drained": True}
    await stage.db.tasks.update_one({"id": TASK}, {"$set": {"coordinator.paused": [paused]}})
    await stage.set_node(TASK, 0, paused=True)
    first = await page.ask()
    assert first.task["paused"] == ("task paused by ops: deploy",)
    assert first.nodes[0]["waits_for"] == "resume"
    await stage.db.tasks.update_one({"id": TASK}, {"$set": {"status": "cancelled"}})
    while (await page.following()).task["paused"]:
        pass
