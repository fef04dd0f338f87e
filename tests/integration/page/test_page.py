"""The page in a real browser, on real servers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest

from flowkit.page import live
from flowkit.server.token_store import TokenStore
from flowkit.server.tokens import Right
from flowkit.worker import Batch, BatchResult, RunContext
from tests.integration.handlers import Failing, Quick
from tests.integration.harness import eventually, node
from tests.integration.test_pause import Gated

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from playwright.async_api import Page

    from flowkit.page.process import PageProcess
    from tests.integration.harness import Harness

pytestmark = [pytest.mark.server, pytest.mark.timeout(240)]
expect: Any = pytest.importorskip("playwright.async_api").expect
expect.set_options(timeout=60_000)

StartPage = "Callable[..., Awaitable[PageProcess]]"
HOSTILE = '<img src=x onerror="document.title=1">"];}\\N{x}&lt;b&gt;'
HOSTILE_ID = "a/../graph/stream?x=1#%2F&ü"


class Hostile(Quick):
    """Its batches, metrics and errors have texts that would be markup."""

    role = "hostile"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Fail with a hostile text."""
        return BatchResult(success=False, reason_code="bad", permanent=True, error=f"{HOSTILE}\n{HOSTILE}")


def address(process: PageProcess, **query: str) -> str:
    """Return the address of a page."""
    return f"http://127.0.0.1:{process.ports[0]}/?{urlencode(query)}"


def box(page: Page, name: str) -> Any:
    """Return the node with this id in the graph."""
    return page.locator(f'svg.graph g.node[aria-label^="{name},"]')


async def test_nodes_change_while_a_task_runs_and_a_held_node_is_decided_on_the_page(
    harness: Harness, start_page: Callable[..., Awaitable[PageProcess]], page: Page
) -> None:
    """No reload: a node starts, finishes, and a failed one is retried with another input."""
    gated = Gated()
    await harness.engine()
    await harness.worker({"gated": gated, "quick": Quick(), "failing": Failing()})
    task_id = await harness.create(
        node("first", "gated"),
        node("second", "failing", "first", inline={"failures": 1, "permanent": True}),
        node("third", "quick", "second"),
        on_node_failure="hold",
    )
    server = await start_page()
    await page.goto(address(server, task=task_id, node="second"))
    await expect(box(page, "first")).to_have_class(re.compile("running"))
    await expect(box(page, "third")).to_have_class(re.compile("queued"))
    gated.gate("first").set()
    await expect(box(page, "first")).to_have_class(re.compile("finished"))
    await expect(box(page, "second")).to_have_class(re.compile("decides"))
    await page.get_by_role("group", name="Actions of the node").get_by_role("button", name="Complete").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog.get_by_text(re.compile("second: .* → finished"))).to_be_visible()
    await dialog.get_by_label("Final metrics").fill('{"rows": 7}')
    await dialog.get_by_role("button", name="Complete").click()
    await expect(box(page, "third")).to_have_class(re.compile("finished"))
    await expect(page.locator(".headline .status")).to_have_text(re.compile("finished"))
    document = await harness.document(task_id)
    assert document["coordinator"]["actions"][-1]["by"] == "operator on the page"


async def test_a_restarted_server_is_followed_by_the_state_of_now(
    harness: Harness, start_page: Callable[..., Awaitable[PageProcess]], page: Page
) -> None:
    """The page says since when it is not live, and then shows what happened meanwhile."""
    gated = Gated()
    await harness.engine()
    await harness.worker({"gated": gated})
    task_id = await harness.create(node("a", "gated"), node("b", "gated", "a"))
    server = await start_page()
    await page.goto(address(server, task=task_id))
    await expect(box(page, "a")).to_have_class(re.compile("running"))
    port = server.ports[0]
    await server.stop()
    await expect(page.locator("#connection")).to_have_text(re.compile("not live since"))
    gated.gate("a").set()
    gated.gate("b").set()
    await harness.result(task_id)
    await start_page(port)
    await expect(box(page, "b")).to_have_class(re.compile("finished"))
    await expect(page.locator("#connection")).to_have_text("live")


async def test_no_content_of_a_task_is_read_as_markup(
    harness: Harness, start_page: Callable[..., Awaitable[PageProcess]], page: Page
) -> None:
    """Names, params, errors and metrics may contain HTML and parts of Graphviz's language."""
    await harness.engine()
    await harness.worker({"quick": Quick(), "hostile": Hostile()})
    task_id = await harness.coordinator.create_task(
        params={"text": HOSTILE},
        graph={
            "name": HOSTILE,
            "nodes": [node("b"), node(HOSTILE, "hostile", "b", inline={"text": HOSTILE})],
        },
        task_id=HOSTILE_ID,
    )
    server = await start_page()
    await page.goto(address(server))
    await page.get_by_role("link", name=task_id).click()
    await expect(box(page, "b")).to_have_class(re.compile("finished"))
    await page.get_by_role("button", name="List").click()
    await page.get_by_role("button", name=HOSTILE).click()
    await expect(page.get_by_role("heading", name=HOSTILE)).to_be_visible()
    await expect(page.locator("aside .attempts pre")).to_contain_text(HOSTILE)
    await expect(page.locator("aside .batches")).to_contain_text(HOSTILE)
    assert await page.locator("img").count() == 0
    assert await page.title() == f"{task_id} – FlowKit"


async def test_a_token_with_the_right_to_read_sees_tasks_and_changes_none(
    harness: Harness, start_page: Callable[..., Awaitable[PageProcess]], page: Page
) -> None:
    """Without a token, the page asks for one. Filters stay in the address."""
    await harness.engine()
    await harness.worker({"quick": Quick()})
    task_id = await harness.create(node("a", "quick"), name="nightly")
    await harness.result(task_id)
    store = TokenStore(harness.db)
    await store.prepare()
    _, text = await store.create(
        actor=7, rights=frozenset({Right.TASKS_READ}), roles=None, note="", expires_in_sec=None
    )
    server = await start_page()
    await page.goto(address(server))
    await page.get_by_label("Token").fill("wrong")
    await page.get_by_role("button", name="Continue").click()
    await expect(page.get_by_role("alert")).to_contain_text("token")
    await page.goto(f"{address(server)}#token={text}")
    await expect(page.get_by_role("link", name=task_id)).to_be_visible()
    assert text not in page.url
    await page.get_by_role("button", name="waiting for a decision").click()
    await expect(page.get_by_text("No task matches.")).to_be_visible()
    assert "show=held" in page.url
    await page.go_back()
    await page.get_by_role("link", name=task_id).click()
    await expect(box(page, "a")).to_have_class(re.compile("finished"))
    await expect(page.get_by_role("group", name="Actions of the task")).to_be_hidden()


async def test_a_graph_of_five_thousand_nodes_is_shown(
    harness: Harness,
    start_page: Callable[..., Awaitable[PageProcess]],
    page: Page,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nodes that are alike are one, which the keyboard opens."""
    monkeypatch.setattr(live, "POLL_SEC", 0.2)
    parts = [node(f"part-{index}", "nobody", "start") for index in range(5_000)]
    await harness.engine()
    task_id = await harness.create(
        node("start", "nobody"), *parts, node("end", "nobody", *[each["node_id"] for each in parts])
    )

    async def is_open() -> bool:
        return (await harness.document(task_id))["status"] == "running"

    await eventually(is_open)
    server = await start_page()
    await page.goto(address(server, task=task_id))
    group = box(page, "5000 × nobody").or_(box(page, "5,000 × nobody"))
    await expect(group).to_be_visible()
    assert await page.locator("svg.graph g.node").count() == 3
    await box(page, "start").focus()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="start")).to_be_visible()
    await page.get_by_placeholder("node id").fill("part-4711")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="part-4711")).to_be_visible()
    await expect(box(page, "part-4711")).to_be_visible()
