"""The page in a real browser, on real servers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from flowkit.worker import Batch, BatchResult, RunContext
from tests.integration.handlers import Failing, Quick
from tests.integration.harness import node
from tests.integration.test_pause import Gated
from tests.page.browser import address, box, expect

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from playwright.async_api import Page

    from flowkit.page.process import PageProcess
    from tests.integration.harness import Harness

pytestmark = [pytest.mark.server, pytest.mark.timeout(240)]

HOSTILE = '<img src=x onerror="document.title=1">"];}\\N{x}&lt;b&gt;'
HOSTILE_ID = "a/../graph/stream?x=1#%2F&ü"


class Hostile(Quick):
    """Its batches, metrics and errors have texts that would be markup."""

    role = "hostile"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Fail with a hostile text."""
        return BatchResult(success=False, reason_code="bad", permanent=True, error=f"{HOSTILE}\n{HOSTILE}")


async def apply(page: Page, action: str) -> None:
    """Choose an action of the task, and confirm it."""
    await page.get_by_role("group", name="Actions of the task").get_by_role("button", name=action).click()
    await page.get_by_role("dialog").get_by_role("button", name=action).click()
    await expect(page.get_by_role("dialog")).to_be_hidden()


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
    await apply(page, "Pause")
    await expect(page.locator("p.paused")).to_contain_text("operator on the page")
    await apply(page, "Resume")
    await expect(page.locator("p.paused")).to_be_hidden()
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
    await expect(page.locator("aside pre").filter(has_text='"text"')).to_contain_text("<img src=x")
    assert await page.locator("img").count() == 0
    assert await page.title() == f"{task_id} – FlowKit"
