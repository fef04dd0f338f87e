"""The page over HTTP: rights, read-only, errors, public files, and streams that end with their token."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from flowkit.errors import StoreUnavailable
from flowkit.page import api, live
from flowkit.page.process import PageProcess, PageSettings
from flowkit.products import PendingTask
from flowkit.reading.results import debug_command
from flowkit.server import app, auth
from flowkit.server.token_store import TokenStore
from flowkit.server.tokens import Right
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually
from tests.page.pages import STATE, Stage, nodes, store_lines

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TASK = "t"
HOSTILE = "a/../graph/stream?x=1#%2F&ü"
RIGHTS = {
    "reads": {Right.TASKS_READ},
    "operates": {Right.TASKS_READ, Right.TASKS_OPERATE},
    "flows": {Right.FLOWS},
    "operator": {Right.OPERATOR},
}


class Front:
    """A page server on a database in memory, and a client with a token of each kind."""

    def __init__(self, stage: Stage, client: aiohttp.ClientSession) -> None:
        self.stage = stage
        self.client = client
        self.tokens: dict[str, str] = {}
        self.ids: dict[str, str] = {}
        self.port = 0

    async def start(self, **settings: Any) -> PageProcess:
        """Create the tokens, and start the server."""
        store = TokenStore(self.stage.db)
        for name, rights in RIGHTS.items():
            token, text = await store.create(actor=None if name == "operator" else 7, rights=rights)
            self.tokens[name], self.ids[name] = text, token.token_id
        process = PageProcess(self.stage.servers, PageSettings(addresses=[("127.0.0.1", 0)], **settings))
        await process.start()
        self.port = process.ports[0]
        return process

    def request(
        self, method: str, path: str, token: str | None = "reads", *, known: str | None = None, **options: Any
    ) -> Any:
        """Send a request with one of the tokens, and the tag of what is known already."""
        headers = {"Authorization": f"Bearer {self.tokens.get(token, token)}"} if token else {}
        headers |= {"If-None-Match": known} if known else {}
        return self.client.request(method, f"http://127.0.0.1:{self.port}{path}", headers=headers, **options)

    async def get(self, call: str, token: str | None = "reads", **query: str) -> tuple[int, Any]:
        """Return status and JSON of a call."""
        async with self.request("GET", f"/api/v1/{call}", token, params=query) as response:
            return response.status, await response.json()

    async def act(
        self, name: str, token: str = "operates", *, dry_run: bool = False, **given: Any
    ) -> tuple[int, Any]:
        """Apply an action to the task, and return status and JSON."""
        body = {"input": given, "dry_run": dry_run}
        path = f"/api/v1/task/actions/{name}?task_id={TASK}"
        async with self.request("POST", path, token, json=body) as response:
            return response.status, await response.json()


@pytest.fixture
async def front(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Front]:
    """A page server that has not started yet."""
    monkeypatch.setattr(live, "POLL_SEC", 0.01)
    stage = Stage()
    await stage.add(TASK, nodes("a", "b"), params={"day": "today"})
    async with aiohttp.ClientSession() as client:
        yield Front(stage, client)


@pytest.fixture
async def started(front: Front) -> AsyncIterator[Front]:
    """A page server."""
    process = await front.start()
    yield front
    await process.stop()


@pytest.mark.parametrize(
    "call",
    [
        "tasks",
        "schedules",
        "task/graph",
        "task/attempts",
        "task/logs",
        "task/explanation",
        "task/variables",
        "task/stream",
    ],
)
async def test_reading_needs_a_token_with_the_right_to_read(started: Front, call: str) -> None:
    query = {} if call in {"tasks", "schedules"} else {"task_id": TASK}
    found = {name: await started.get(call, name, **query) for name in ("wrong", "flows")}
    assert [status for status, _ in found.values()] == [401, 403]
    assert (await started.get(call, None, **query))[0] == 401
    assert "tasks.read" in found["flows"][1]["error"]["message"]


async def test_lines_of_an_attempt_are_escaped_and_come_in_pages(started: Front) -> None:
    lines = [f"line {number}" for number in range(3)] + ["hostile \x1b[2J \u202e text"]
    await store_lines(started.stage.db, TASK, "a", 1, lines)
    query: Any = {"task_id": TASK, "node": "a", "attempt": "1"}
    status, last = await started.get("task/logs", limit="2", **query)
    assert (status, last["kept"], last["earlier"], last["later"]) == (200, True, True, False)
    assert [each["text"] for each in last["lines"]] == ["line 2", "hostile \\u001b[2J \\u202e text"]
    _, first = await started.get("task/logs", before=last["lines"][0]["place"], **query)
    assert [each["text"] for each in first["lines"]] == ["line 0", "line 1"]
    _, new = await started.get("task/logs", after=last["end"], level="warning", **query)
    assert new == {"kept": True, "lines": [], "earlier": True, "later": False, "end": last["end"]}
    assert (await started.get("task/logs", level="loud", **query))[0] == 422


async def test_actions_need_the_right_to_operate_and_carry_the_actor(started: Front) -> None:
    refused, error = await started.act("pause", "reads")
    assert (refused, error["error"]["code"]) == (403, "permission_denied")
    assert (await started.act("pause", "reads", dry_run=True))[0] == 403
    assert (await started.act("pause", "operates", reason="r"))[0] == 200
    assert (await started.act("pause", "operator"))[0] == 200
    given = [given["by"] for _, _, given in started.stage.tasks.acted]
    assert given == ["actor 7 on the page", "operator on the page"]


async def test_a_preview_changes_nothing_and_a_rejected_action_says_why(started: Front) -> None:
    status, found = await started.act("pause", dry_run=True)
    assert (status, found["notes"]) == (200, ["a note"])
    assert started.stage.tasks.acted == []
    status, found = await started.act("resume")
    assert (status, found["error"]["message"]) == (409, "the task is not paused")
    await started.stage.db.tasks.update_one({"id": TASK}, {"$set": {"status": "finished"}})
    status, found = await started.act("cancel")
    assert (status, found["error"]["code"]) == (409, "action_rejected")
    assert (await started.act("explode"))[0] == 404


@pytest.mark.parametrize("name", ["pause", "rerun"])
async def test_a_preview_has_the_state_that_the_action_then_expects(started: Front, name: str) -> None:
    status, found = await started.act(name, dry_run=True)
    assert (status, found["state"]) == (200, STATE)
    status, found = await started.act(name, if_state=STATE)
    assert (status, found["state"]) == (200, None)
    [(_, _, given)] = started.stage.tasks.acted
    assert given["if_state"] == STATE


async def test_a_cancellation_is_refused_once_another_run_of_the_task_has_started(started: Front) -> None:
    waits = PendingTask(product="admission", state="queued", text="waits", fields={}, started=False)
    started.stage.tasks.pending = waits
    _, shown = await started.act("cancel", dry_run=True)
    for dry_run in (True, False):
        status, found = await started.act("cancel", dry_run=dry_run, if_state="f" * 16)
        assert (status, found["error"]["code"]) == (409, "action_rejected")
        assert "the task has started meanwhile" in found["error"]["message"]
    assert started.stage.tasks.acted == []
    await started.act("cancel", if_state=shown["state"])
    [(_, _, given)] = started.stage.tasks.acted
    assert given["if_state"] == shown["state"]


@pytest.mark.parametrize(
    ("name", "given", "field"),
    [
        ("rerun", {"nodes": "ab"}, "nodes"),
        ("rerun", {"failed_batches_of": "a"}, "failed_batches_of"),
        ("rerun", {"params": [1]}, "params"),
        ("rerun", {"by": "somebody else"}, "by"),
        ("cancel", {"reason": {"a": 1}}, "reason"),
        ("cancel", {"node_id": "a"}, "node_id"),
    ],
)
async def test_a_wrong_input_of_an_action_is_refused_with_its_field(
    started: Front, name: str, given: dict[str, Any], field: str
) -> None:
    for dry_run in (True, False):
        status, found = await started.act(name, dry_run=dry_run, **given)
        assert (status, found["error"]["code"]) == (422, "invalid_request")
        assert found["error"]["message"].startswith(field)


async def test_the_preview_of_a_cancellation_says_whether_it_is_possible(started: Front) -> None:
    waits = PendingTask(product="admission", state="queued", text="waits", fields={}, started=False)
    started.stage.tasks.pending = waits
    assert (await started.act("cancel", dry_run=True))[0] == 200
    started.stage.tasks.pending = None
    for dry_run in (True, False):
        status, found = await started.act("cancel", dry_run=dry_run)
        assert (status, found["error"]["code"]) == (409, "action_rejected")
    await started.stage.db.tasks.delete_one({"id": TASK})
    for dry_run in (True, False):
        status, found = await started.act("cancel", dry_run=dry_run)
        assert (status, found["error"]["code"]) == (404, "unknown_task")


async def test_a_call_does_not_wait_for_ever_for_frozen_servers(
    started: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "_READ_SEC", 0.05)
    monkeypatch.setattr(live, "_LONGEST_LOOK_SEC", 0.05)
    monkeypatch.setattr(app, "CALLER_SEC", 0.05)

    async def hang(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(started.stage.catalog, "document", hang)
    status, found = await started.get("task/graph", task_id=TASK)
    assert (status, found["error"]["code"]) == (504, "timeout")
    monkeypatch.setattr(started.stage.catalog, "change_mark", hang)
    status, found = await started.get("task/stream", task_id=TASK)
    assert (status, found["error"]["code"]) == (503, "mongo_unavailable")
    monkeypatch.setattr(TokenStore, "find", hang)
    status, found = await started.get("task/graph", "operator", task_id=TASK)
    assert (status, found["error"]["code"]) == (503, "mongo_unavailable")


async def test_a_read_only_server_has_no_actions(front: Front) -> None:
    process = await front.start(read_only=True)
    status, found = await front.act("pause", "operator")
    assert (status, found["error"]["code"]) == (403, "read_only")
    _, session = await front.get("session", "operator")
    assert (session["may_operate"], session["actions"]) == (False, [])
    assert front.stage.tasks.acted == []
    await process.stop()


async def test_explanation_has_the_parts_of_the_time_and_says_what_is_missing(started: Front) -> None:
    status, found = await started.get("task/explanation", task_id=TASK)
    assert (status, found["open"]) == (200, True)
    assert sum(found["parts"].values()) == pytest.approx(found["seconds"], abs=0.001)
    assert "no longer has the whole history" in found["missing"][0]
    assert (await started.get("task/explanation", task_id="other"))[0] == 404


async def test_a_failed_batch_and_a_node_with_a_handler_have_the_command_that_debugs_them(
    started: Front,
) -> None:
    await started.stage.store_batch(TASK, "a", "b 1", "failed")
    await started.stage.store_batch(TASK, "a", "b2")
    _, found = await started.get("task/batches", task_id=TASK, node="a")
    commands = {each["uid"]: each.get("debug") for each in found["batches"]}
    assert commands == {"b 1": debug_command(TASK, "a", "b 1"), "b2": None}
    _, node = await started.get("task/node", task_id=TASK, node="a")
    assert node["debug"] == debug_command(TASK, "a")
    await started.stage.add("held", [{"node_id": "go", "type": "approval"}])
    _, node = await started.get("task/node", task_id="held", node="go")
    assert node["debug"] is None


async def test_unknown_tasks_and_nodes_are_not_found(started: Front) -> None:
    for call in ("task/graph", "task/stream", "task/variables"):
        status, found = await started.get(call, task_id="other")
        assert (status, found["error"]["code"]) == (404, "unknown_task")
    assert (await started.get("task/node", task_id=TASK, node="other"))[0] in {404, 422}
    assert (await started.get("task/graph"))[0] == 422


async def test_ids_may_have_any_character(started: Front) -> None:
    await started.stage.add(HOSTILE, nodes(HOSTILE))
    status, found = await started.get("task/graph", task_id=HOSTILE)
    assert (status, found["task_id"], found["nodes"][0]["node_id"]) == (200, HOSTILE, HOSTILE)
    assert (await started.get("task/node", task_id=HOSTILE, node=HOSTILE))[0] == 200
    _, listed = await started.get("tasks", id=HOSTILE[:5])
    assert [each["task_id"] for each in listed["tasks"]] == [HOSTILE]


@pytest.mark.parametrize(
    "broken",
    [
        {"status": "hibernating"},
        {"graph": None},
        {"graph.name": 5},
        {"started_at": 5},
        {"finished_at": "soon"},
        {"reason": {"a": 1}},
    ],
)
async def test_a_document_that_cannot_be_read_hides_no_other_task(
    started: Front, broken: dict[str, Any]
) -> None:
    """Another program, or a later version, may have written it."""
    await started.stage.add("broken", nodes("a"))
    await started.stage.db.tasks.update_one({"id": "broken"}, {"$set": broken})
    status, found = await started.get("tasks", limit="1")
    assert (status, found["more"]) == (200, True)
    _, older = await started.get("tasks", limit="1", skip="1")
    assert TASK in [each["task_id"] for each in found["tasks"] + older["tasks"]]


@pytest.mark.parametrize("broken", [{"graph": None}, {"graph.nodes": "text"}, {"graph.nodes": [{"x": 1}]}])
async def test_a_document_that_cannot_be_read_is_named(started: Front, broken: dict[str, Any]) -> None:
    await started.stage.db.tasks.update_one({"id": TASK}, {"$set": broken})
    for call in ("graph", "stream", "attempts", "node"):
        query = {"node": "a"} if call == "node" else {}
        status, found = await started.get(f"task/{call}", task_id=TASK, **query)
        assert (call, status, found["error"]["code"]) == (call, 500, "document_unreadable")
        assert f"the document of task '{TASK}' cannot be read" in found["error"]["message"]


async def test_variables_are_read_without_the_rest_of_the_document(started: Front) -> None:
    own = {"coordinator.vars": {"limit": 5, "by": {"day": [1]}}}
    await started.stage.db.tasks.update_one({"id": TASK}, {"$set": own})
    async with started.request("GET", f"/api/v1/task/variables?task_id={TASK}") as response:
        assert response.headers["cache-control"] == "no-store"
        assert await response.json() == {"variables": {"limit": 5, "by": {"day": [1]}}}
    assert started.stage.catalog.reads["document"] == 0


async def test_the_graph_is_known_without_temporal(started: Front) -> None:
    started.stage.tasks.temporal_is_down = True
    status, found = await started.get("task/graph", task_id=TASK)
    assert (status, found["run_id"], found["params"]) == (200, None, {"day": "today"})
    assert found["edges"] == [[0, 1, "plain"]]


async def test_only_the_files_of_the_page_are_public(started: Front) -> None:
    for path in ("/", "/static/app.js", "/static/vendor/graphviz.js", "/static/style.css"):
        async with started.request("GET", path, None) as response:
            assert response.status == 200
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe-inline" not in policy
            tag = response.headers["etag"]
        async with started.request("GET", path, None, known=tag) as response:
            assert (response.status, await response.read()) == (304, b"")
    for path in ("/static/", "/static/../api.py", "/static/%2e%2e/api.py", "/static", "/api/v1/openapi.json"):
        async with started.request("GET", path, None) as response:
            assert response.status in {401, 404}


async def lines(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """Yield the lines of a stream."""
    async for line in response.content:
        yield line.decode().rstrip()


async def test_a_stream_ends_when_its_token_is_revoked(
    started: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "CHECK_SEC", 0.01)
    async with started.request("GET", f"/api/v1/task/stream?task_id={TASK}") as response:
        assert response.headers["x-accel-buffering"] == "no"
        stream = lines(response)
        first = await anext(stream)
        assert json.loads(first.removeprefix("data:"))["whole"]
        await TokenStore(started.stage.db).revoke(started.ids["reads"])
        async with asyncio.timeout(EVENT_TIMEOUT_SEC):
            async for _ in stream:
                pass


async def test_a_quiet_stream_sends_heartbeats_until_its_lease_is_over(
    started: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "HEARTBEAT_SEC", 0.02)
    monkeypatch.setattr(api, "CHECK_SEC", 0.05)
    monkeypatch.setattr(api, "LEASE_SEC", 0.5)
    monkeypatch.setattr(live, "_LOOK_AGAIN_SEC", 60.0)
    async with asyncio.timeout(EVENT_TIMEOUT_SEC):
        async with started.request("GET", f"/api/v1/task/stream?task_id={TASK}") as response:
            found = [line async for line in lines(response)]
    assert any(line.startswith(": ping") for line in found)


async def test_a_call_for_the_headers_of_a_stream_leaves_no_viewer(front: Front) -> None:
    process = await front.start()
    async with front.request("HEAD", f"/api/v1/task/stream?task_id={TASK}") as response:
        assert response.status == 200
    assert process.watched == []
    await process.stop()


@pytest.mark.parametrize("frozen", [False, True])
async def test_a_stream_lasts_while_its_token_cannot_be_checked(
    front: Front, monkeypatch: pytest.MonkeyPatch, *, frozen: bool
) -> None:
    """The page says that it is not live; hundreds of pages that connect again would help nobody."""
    monkeypatch.setattr(api, "CHECK_SEC", 0.01)
    monkeypatch.setattr(auth, "CACHE_SEC", 0.01)
    process = await front.start()
    async with front.request("GET", f"/api/v1/task/stream?task_id={TASK}") as response:
        stream = lines(response)
        await anext(stream)
        refused = asyncio.Event()

        async def fail(self: TokenStore, text: str) -> None:
            refused.set()
            if frozen:
                await asyncio.Event().wait()
            raise StoreUnavailable("no server responds")

        monkeypatch.setattr(TokenStore, "find", fail)
        await refused.wait()
        await front.stage.set_node(TASK, 0, status="running")
        async with asyncio.timeout(EVENT_TIMEOUT_SEC):
            async for line in stream:
                if '"running"' in line:
                    break
            else:
                pytest.fail("the stream has ended")
    await process.stop()


@pytest.mark.nightly
async def test_a_quiet_stream_of_seventy_seconds_is_alive_and_then_shows_a_change(front: Front) -> None:
    """Longer than any heartbeat and than proxies wait: with the real times of heartbeats and of the token's check."""
    process = await front.start()
    began = time.monotonic()
    pings = 0
    async with front.request("GET", f"/api/v1/task/stream?task_id={TASK}", timeout=None) as response:
        stream = lines(response)
        async with asyncio.timeout(500):
            while pings < 5 or time.monotonic() < began + 70:
                pings += (await anext(stream)).startswith(": ping")
            await front.stage.set_node(TASK, 0, status="running")
            while '"running"' not in await anext(stream):
                pass
    await process.stop()


async def test_a_viewer_that_leaves_ends_the_feed(front: Front) -> None:
    process = await front.start()
    async with front.request("GET", f"/api/v1/task/stream?task_id={TASK}") as response:
        await anext(lines(response))
        assert process.watched == [TASK]

    async def is_left() -> bool:
        return process.watched == []

    await eventually(is_left)
    await process.stop()
