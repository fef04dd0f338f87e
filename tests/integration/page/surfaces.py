"""What the page shows of a task, on each of its surfaces, and what its document and Temporal say instead.

A surface is a mapping from names of values to values: `status`, `seconds` and `total` of the task, and of each node
`node:state` (its status and attempt), `node:aside`, `node:batches` and `node:seconds`. The timeline has
`node:attempt`, the latest one, and `node:ATTEMPT:seconds`.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from temporalio.service import RPCError

from flowkit.models.temporal_names import STATUS_QUERY
from flowkit.page.api import PREFIX
from tests.integration.harness import wait_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    import aiohttp
    from playwright.async_api import Page
    from temporalio.client import WorkflowExecutionDescription, WorkflowHandle

    Surface = Mapping[str, Any]

_ASK_TIMEOUT = timedelta(seconds=5)
_ACTIVE = ("running", "cancelling")
_IN_PAGE = """() => ({
  status: document.querySelector(".headline .status").textContent,
  nodes: [...document.querySelectorAll("table.nodes tbody tr")].map((row) => (
    [...row.cells].slice(0, 4).map((cell) => cell.textContent))),
})"""
_WORDS = {"waits": "deferred", "stopping": "cancelling"}


# --- the document and Temporal --------------------------------------------------------------------------------------


async def read_truth(
    db: Any, handle: WorkflowHandle[Any, Any], task_id: str, *, ask: bool = False
) -> Surface:
    """Return what the document of a task and the attempts that Temporal has scheduled say.

    With `ask`, nodes have the state that the workflow returns, where it differs: the document of a large graph may be
    some seconds behind, which is no difference between the page and the history.
    """
    description = await handle.describe()
    returned = await _ask(handle) if ask else {}
    document: dict[str, Any] = await db.tasks.find_one({"id": task_id}) or {}
    if not document:
        return {}
    pending, now = dict(_list_pending(description)), time.time()
    ended: Any = document.get("finished_at")
    until = now if ended is None else ended.timestamp()
    created = _moment(document["started_at"])
    truth: dict[str, Any] = {
        "status": document["status"],
        "closed": ended is not None,
        "total": until - created,
        "seconds": until - _moment(document.get("run_started_at") or document["started_at"]),
    }
    rows = db.artifacts.find({"task_id": task_id, "batch_uid": {"$exists": True}})
    batches = [(row["node_id"], row.get("attempt_epoch", 0), row) async for row in rows]
    for node in document["graph"]["nodes"]:
        name, status, epoch = node["node_id"], node["status"], node.get("attempt_epoch") or 0
        own = [row for owner, at, row in batches if owner == name and at >= (node.get("first_epoch") or 0)]
        if pending.get(name, 0) > epoch:  # a document is written after the events that it shows
            status, epoch = "running", pending[name]
        is_behind = returned.get(name, (status, epoch)) != (status, epoch)
        if is_behind:
            status, epoch = returned[name]
        truth[f"{name}:state"] = (status, epoch)
        truth[f"{name}:batches"] = sum(row["status"] == "partial" for row in own)
        if node.get("on_batch_failure"):
            truth[f"{name}:aside"] = sum(_is_aside(row) for row in own)
        if (
            not is_behind
            and epoch == node.get("attempt_epoch")
            and (node.get("parallel") or 1) == 1
            and not node.get("map")
        ):
            truth[f"{name}:seconds"] = _seconds_of(node, now)
    return truth


async def _ask(handle: WorkflowHandle[Any, Any]) -> dict[str, tuple[str, int]]:
    """Return status and attempt of each node from the workflow itself; nothing if no engine responds in time."""
    try:
        state = await handle.query(STATUS_QUERY, rpc_timeout=_ASK_TIMEOUT)
    except RPCError:
        return {}
    return {each["node_id"]: (each["status"], each["attempt_epoch"]) for each in state["nodes"]}


def _list_pending(description: WorkflowExecutionDescription) -> Any:
    for each in description.raw_description.pending_activities:
        name, _, epoch = each.activity_id.rpartition(".")
        if name and epoch.isdecimal():
            yield name, int(epoch)


def _is_aside(row: Mapping[str, Any]) -> bool:
    quarantined: Any = row.get("quarantined") or {"skipped": True}
    return bool(row["status"] == "failed" and not quarantined.get("skipped"))


def _seconds_of(node: Mapping[str, Any], now: float) -> float | None:
    began: Any = node.get("started_at")
    ended: Any = node.get("attempt_ended_at") or node.get("finished_at")
    if began is None or (ended is None and node["status"] not in _ACTIVE):
        return None
    return float((now if node["status"] in _ACTIVE else ended.timestamp()) - began.timestamp())


def _moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


# --- the page -------------------------------------------------------------------------------------------------------


class PageReader:
    """Reads the surfaces of one task as the page does: its updates, and its calls when asked."""

    def __init__(self, client: aiohttp.ClientSession, base: str, task_id: str) -> None:
        self._client = client
        self._base = base
        self._task_id = task_id
        self._message: dict[str, Any] = {}
        self._rows: dict[int, dict[str, Any]] = {}

    async def follow(self) -> None:
        """Take the updates, until cancelled."""
        while True:
            known = {name: self._message[name] for name in ("server", "poll") if self._message}
            self._take(await self._get("task/updates", **known))
            await wait_seconds(self._message["again_sec"])

    def _take(self, message: dict[str, Any]) -> None:
        if message["whole"]:
            self._rows.clear()
        self._rows |= {int(place): row for place, row in message["nodes"].items()}
        self._message = message

    async def _get(self, call: str, **query: Any) -> Any:
        async with self._client.get(self._address(call, **query)) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    def _address(self, call: str, **query: Any) -> str:
        return f"{self._base}{PREFIX}/{call}?{urlencode({'task_id': self._task_id, **query})}"

    def head_and_nodes(self) -> dict[str, Surface]:
        """Return what the head and the nodes show now; nothing while the page says that it is not live."""
        if not self._message or self._message["problem"]:
            return {}
        task, now = self._message["task"], time.time()
        since = 0.0 if task["closed"] else max(0.0, now - self._message["at"])
        times = {"seconds": task["seconds"], "total": task["total_seconds"]}
        head = {name: None if value is None else value + since for name, value in times.items()}
        nodes: dict[str, Any] = {}
        for row in self._rows.values():
            name = row["node_id"]
            nodes[f"{name}:state"] = (row["status"], row["attempt"])
            nodes[f"{name}:batches"] = row.get("batches", 0)
            nodes[f"{name}:aside"] = row.get("failed_batches", 0)
            until = now if row["status"] in _ACTIVE else row.get("ended_at")
            began = row.get("began_at")
            nodes[f"{name}:seconds"] = None if began is None or until is None else max(0.0, until - began)
        return {"head": {"status": task["status"], **head}, "node": nodes}

    async def list_line(self) -> dict[str, Surface]:
        """Return what the list shows."""
        async with self._client.get(
            f"{self._base}{PREFIX}/tasks?{urlencode({'id': self._task_id})}"
        ) as response:
            found = (await response.json())["tasks"]
        lines = [each for each in found if each["task_id"] == self._task_id]
        shown = {"status": "status", "seconds": "seconds", "total": "total_seconds"}
        return {"list": {name: lines[0][key] for name, key in shown.items()}} if lines else {}

    async def explanation(self, since: float) -> dict[str, Surface]:
        """Return what Explain shows as of a time or later; its parts sum to its seconds. A shared one may be older."""
        found = await self._get("task/explanation")
        if found["read_at"] < since:
            return {}
        total = found["total_seconds"]
        assert abs(sum(found["parts"].values()) - found["seconds"]) < 0.01, found
        return {"explain": {"status": found["status"], "seconds": found["seconds"], "total": total}}

    async def timeline(self) -> dict[str, Surface]:
        """Return the latest attempt of each node. Attempts that were read for others are older."""
        found = await self._get("task/attempts")
        now, shown = time.time(), dict[str, Any]()
        if now - found["read_at"] > 1:
            return {}
        for each in found["attempts"]:
            until = now if each["outcome"] == "running" else each["ended_at"]
            began = each["began_at"]
            name = each["node_id"]
            shown[f"{name}:attempt"] = each["attempt"]
            shown[f"{name}:{each['attempt']}:seconds"] = (
                None if began is None or until is None else max(0.0, until - began)
            )
        return {"timeline": shown}

    async def attempts(self, since: float) -> tuple[list[dict[str, Any]], ...]:
        """Return the attempts as they were at a time or later, as the only item; none if those shared are older."""
        found = await self._get("task/attempts")
        return (found["attempts"],) if found["read_at"] >= since else ()


async def read_browser(page: Page) -> dict[str, Surface]:
    """Return what the list of nodes and the head of an open page show."""
    found = await page.evaluate(_IN_PAGE)
    nodes = {
        f"{name}:state": (_status(status), int(attempt or 0)) for status, name, _, attempt in found["nodes"]
    }
    return {"browser": {"status": _status(found["status"]), **nodes}}


def _status(text: str) -> str:
    word = text.split(maxsplit=1)[-1].strip()
    return _WORDS.get(word, word)
