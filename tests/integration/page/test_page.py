"""The page in a real browser, on real servers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

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

pytestmark = pytest.mark.server

HOSTILE = '<img src=x onerror="document.title=1">"];}\\N{x}&lt;b&gt;'
HOSTILE_ID = "a/../graph/stream?x=1#%2F&ü"


class Hostile(Quick):
    """Its batches, metrics and errors have texts that would be markup."""

    role = "hostile"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Fail with a hostile text."""
        return BatchResult(success=False, reason_code="bad", permanent=True, error=f"{HOSTILE}\n{HOSTILE}")


def act(page: Page, whose: str, action: str) -> Any:
    """Return the button of an action of the task or of the selected node."""
    return page.get_by_role("group", name=f"Actions of the {whose}").get_by_role(
        "button", name=action, exact=True
    )


async def confirm(page: Page, whose: str, action: str, effect: str, **fields: str) -> None:
    """Choose an action, fill in its form, read what it would affect, and confirm it."""
    await act(page, whose, action).click()
    dialog = page.get_by_role("dialog")
    for label, value in fields.items():
        await dialog.get_by_label(label.replace("_", " ")).fill(value)
    await expect(dialog.get_by_role("status")).to_contain_text(effect)
    await dialog.get_by_role("button", name=action, exact=True).click()
    await expect(dialog).to_be_hidden()


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
    await confirm(page, "node", "Complete", "second: held → finished", Final_metrics='{"rows": 7}')
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
    await expect(page).to_have_title(re.compile("^✕"))
    assert await page.title() == f"✕ {HOSTILE} – FlowKit"


async def test_each_action_is_applied_on_the_page(
    harness: Harness, start_page: Callable[..., Awaitable[PageProcess]], page: Page
) -> None:
    """Each is clicked, shows what it would affect, and changes a running task. One that the rules reject says why, and
    a dialog says what another operator has done meanwhile.
    """
    bad, gated = {"failures": 9, "permanent": True}, Gated()
    engine = await harness.engine()
    await harness.worker({"gated": gated, "failing": Failing()})
    task_id = await harness.create(
        *(node(name, "failing", inline=bad) for name in ("retried", "skipped", "completed")),
        node("approved", "approval"),
        node("rejected", "approval", allow_failure=True),
        node("runs", "gated", allow_failure=True),
        node("ends", "gated"),
        on_node_failure="hold",
    )
    server = await start_page()
    await page.goto(address(server, task=task_id, node="retried"))
    await expect(box(page, "retried")).to_have_class(re.compile("decides"))
    await expect(act(page, "task", "Resume")).to_have_attribute("title", re.compile("nothing is paused"))
    await act(page, "task", "Resume").click(force=True)  # Playwright waits for enabled ones only
    await expect(page.locator(".toast.error")).to_contain_text("Resume: ")
    changed = {"Changed_keys_of_the_input": '{"failures": 0}'}
    await confirm(page, "node", "Retry", "retried: held → queued", **changed)
    await expect(box(page, "retried")).to_have_class(re.compile("finished"))
    steps = {
        "skipped": ("Skip", "→ skipped", "skipped", {}),
        "completed": ("Complete", "→ finished", "finished", {"Final_metrics": '{"rows": 7}'}),
        "approved": ("Approve", "→ finished", "finished", {"Comment": "looks good"}),
        "rejected": ("Reject", "→ failed", "failed|decides", {"Comment": "no"}),
        "runs": ("Fail", "→ ", "failed|decides", {"Reason": "took too long"}),
    }
    for name, (action, effect, state, fields) in steps.items():
        await box(page, name).click()
        await expect(page.get_by_role("heading", name=name, exact=True)).to_be_visible()
        if name == "skipped":
            await act(page, "node", action).click()
            dialog = page.get_by_role("dialog")
            await expect(dialog.get_by_role("status")).to_contain_text("skipped: held → skipped")
            await engine.retry_node(task_id, "skipped", by="ada")
            await expect(dialog.get_by_role("alert")).to_contain_text("another action was applied")
            await harness.until_node(task_id, "skipped", "deferred", epoch=3)
            await expect(dialog.get_by_role("status")).to_contain_text("skipped: held → skipped")
            await dialog.get_by_role("button", name=action, exact=True).click()
            await expect(dialog).to_be_hidden()
        elif name == "runs":
            await act(page, "node", action).click()
            await page.get_by_role("dialog").get_by_label("stop attempts that run").check()
            await page.get_by_role("dialog").get_by_role("button", name=action, exact=True).click()
        else:
            await confirm(page, "node", action, effect, **fields)
        await expect(box(page, name)).to_have_class(re.compile(state))
    await confirm(page, "task", "Pause", "Affects")
    await expect(page.locator("p.paused")).to_contain_text("operator on the page")
    await confirm(page, "task", "Resume", "Affects")
    await expect(page.locator("p.paused")).to_be_hidden()
    await confirm(page, "task", "Cancel", "told to stop", Reason="enough")
    await expect(page.locator(".headline .status")).to_have_text(re.compile("cancelled"))
    gated.gate("ends").set()
    again = {
        "Nodes_that_run_again": "completed\nends",
        "Changed_params": '{"day": "tomorrow"}',
        "Changed_keys_of_the_inputs": '{"completed": {"failures": 0}}',
    }
    await confirm(page, "task", "Run again", "completed: finished → queued", **again)
    await expect(page.locator(".headline .status")).to_have_text(re.compile("finished"))
    document = await harness.document(task_id)
    assert document["params"]["day"] == "tomorrow"
