"""The page in a real browser, with tasks in a database in memory: what needs no engine."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.page import live
from flowkit.server.token_store import TokenStore
from flowkit.server.tokens import Right
from tests.page.browser import address, box, expect, serious
from tests.page.pages import nodes, store_lines

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from playwright.async_api import Browser, Page, Route

    from flowkit.page.process import PageProcess
    from tests.page.pages import Stage

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

LARGE = 5_000


async def test_a_token_opens_the_page_and_filters_stay_in_the_address(
    stage: Stage, start: Callable[..., Awaitable[PageProcess]], page: Page
) -> None:
    """A wrong token is refused. One that may only read sees no actions."""
    await stage.add("t-1", nodes("a"), status="finished")
    store = TokenStore(stage.db)
    _, text = await store.create(actor=7, rights={Right.TASKS_READ})
    server = await start()
    await page.goto(address(server))
    await page.get_by_label("Token").fill("wrong")
    await page.get_by_role("button", name="Continue").click()
    await expect(page.get_by_role("alert")).to_contain_text("token")
    await page.goto(f"{address(server)}#token={text}")
    await expect(page.get_by_role("link", name="t-1")).to_be_visible()
    assert text not in page.url
    assert await serious(page) == []
    await page.get_by_role("button", name="waiting for a decision").click()
    await expect(page.get_by_text("No task matches.")).to_be_visible()
    assert "show=decision" in page.url
    await page.reload()
    await expect(page.get_by_text("No task matches.")).to_be_visible()
    await page.go_back()
    await page.get_by_role("link", name="t-1").click()
    await expect(box(page, "a")).to_be_visible()
    await expect(page.get_by_role("group", name="Actions of the task")).to_be_hidden()


async def test_a_link_opens_the_page_but_another_web_page_reads_nothing_of_it(
    stage: Stage, start: Callable[..., Awaitable[PageProcess]], page: Page
) -> None:
    await stage.add("t-1", nodes("a"), status="finished")
    home = address(await start()).partition("?")[0]
    links = f"<a href={home}?task=t-1>page</a><a href={home}api/v1/tasks>data</a>"
    images = f"<img src={home}static/icon.svg><img src={home}api/v1/tasks>"
    foreign = f"data:text/html,{links}{images}"
    await page.goto(foreign)
    assert await page.evaluate("[...document.images].map((each) => each.naturalWidth)") == [0, 0]
    await page.get_by_role("link", name="page").click()
    await expect(box(page, "a")).to_be_visible()
    await page.goto(foreign)
    await page.get_by_role("link", name="data").click()
    await expect(page.get_by_text("site_not_allowed")).to_be_visible()


async def test_control_and_bidirectional_characters_of_a_task_are_shown_as_escapes(
    stage: Stage, start: Callable[..., Awaitable[PageProcess]], page: Page
) -> None:
    hostile, shown = "paid\u202egpj.exe\x1b[2J", r"paid\u202egpj.exe\u001b[2J"
    await stage.add("t-1", nodes("a"), status="finished")
    await stage.db.tasks.update_one(
        {"id": "t-1"}, {"$set": {"graph.name": hostile, "params": {"day": hostile}}}
    )
    await stage.set_node("t-1", 0, status="failed", last_error=f"boom: {hostile}")
    await page.goto(address(await start(), task="t-1"))
    await box(page, "a").click()
    await expect(page.locator("aside")).to_contain_text(f"boom: {shown}")
    assert shown in await page.title()
    texts = await page.evaluate(
        "document.body.innerText + [...document.querySelectorAll('*')].map((e) => e.title)"
    )
    assert "\u202e" not in texts
    assert "\x1b" not in texts


async def test_a_task_is_accessible_and_operable_with_the_keyboard(
    stage: Stage, start: Callable[..., Awaitable[PageProcess]], page: Page
) -> None:
    """In each view, axe-core finds nothing serious. Arrow keys follow edges, and Enter opens a node."""
    await stage.add("t-1", nodes("a", "b", "c"), params={"day": "today"})
    await stage.set_node("t-1", 0, status="failed", attempt_epoch=2, last_error="no such file")
    server = await start()
    await page.goto(address(server, task="t-1"))
    await expect(box(page, "a")).to_have_class(re.compile("failed"))
    await box(page, "a").focus()
    await page.keyboard.press("ArrowDown")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="b", exact=True)).to_be_visible()
    await page.keyboard.press("ArrowUp")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("complementary").get_by_text("no such file").first).to_be_visible()
    await expect(
        page.get_by_role("group", name="Actions of the task").get_by_role("button").first
    ).to_be_visible()
    for view in ("Graph", "List", "Timeline"):
        await page.get_by_role("button", name=view, exact=True).click()
        assert await serious(page) == []
    await page.emulate_media(color_scheme="dark")
    await page.get_by_role("button", name="Graph", exact=True).click()
    assert await serious(page) == []


async def test_the_keyboard_reaches_each_node_and_two_keys_lead_from_it_to_its_actions(
    stage: Stage, start: Callable[..., Awaitable[PageProcess]], page: Page
) -> None:
    """Arrow keys go along the edges and to the nodes beside, Enter selects, and Enter again goes to the actions."""
    middle = [{"node_id": f"m{n}", "type": "quick", "depends_on": ["first"]} for n in range(5)]
    last = {"node_id": "last", "type": "end", "depends_on": [each["node_id"] for each in middle]}
    await stage.add("t-1", [{"node_id": "first", "type": "start"}, *middle, last])
    await page.goto(address(await start(), task="t-1"))
    await expect(box(page, "last")).to_be_visible()
    assert await page.locator("svg.graph g.node[tabindex='0']").count() == 1
    await box(page, "first").focus()
    focused = page.locator("svg.graph g.node:focus")

    async def press(key: str) -> str:
        await page.keyboard.press(key)
        return str(await focused.get_attribute("aria-label")).partition(",")[0]

    assert (await press("ArrowDown")) in {"m1", "m2", "m3"}
    found = {await press(key) for key in ["ArrowLeft"] * 5 + ["ArrowRight"] * 5}
    assert found == {each["node_id"] for each in middle}
    assert await press("ArrowDown") == "last"
    assert await press("ArrowUp") in found
    node = await press("ArrowUp")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name=node, exact=True)).to_be_visible()
    await expect(box(page, node)).to_be_focused()
    actions = page.get_by_role("group", name="Actions of the node")
    await expect(actions.get_by_role("button").first).to_be_visible()
    await page.keyboard.press("Enter")
    await expect(actions.get_by_role("button").first).to_be_focused()


async def test_a_tap_shows_the_panel_on_a_phone(
    stage: Stage, start: Callable[..., Awaitable[PageProcess]], browser: Browser
) -> None:
    await stage.add("t-1", nodes("a", "b"))
    server = await start()
    async with await browser.new_context(
        viewport={"width": 380, "height": 780}, has_touch=True, is_mobile=True
    ) as context:
        page = await context.new_page()
        await page.goto(address(server, task="t-1"))
        await box(page, "b").tap()
        await expect(page.get_by_role("heading", name="b", exact=True)).to_be_in_viewport()


async def test_eight_tabs_are_live_and_actions_wait_for_none_of_them(
    stage: Stage, start: Callable[..., Awaitable[PageProcess]], browser: Browser
) -> None:
    """A browser has six connections for all tabs. Tabs also hand their token on, which is gone with the last one.

    They draw no graphs here, which would take most of the time.
    """
    _, text = await TokenStore(stage.db).create(actor=7, rights={Right.TASKS_READ, Right.TASKS_OPERATE})
    server = await start()
    async with await browser.new_context() as context:
        await context.route("**/vendor/graphviz.js", lambda route: route.fulfill(status=503))
        waiting = await context.new_page()
        await waiting.goto(address(server))
        await expect(waiting.get_by_label("Token")).to_be_visible()
        tabs = [await context.new_page() for _ in range(8)]
        for number, tab in enumerate(tabs):
            await stage.add(f"t-{number}", nodes("a"))
            await tab.goto(address(server, task=f"t-{number}") + ("" if number else f"#token={text}"))
            await expect(tab.locator("#connection")).to_have_text("live")
        await expect(waiting.get_by_role("link", name="t-1")).to_be_visible()
        for number, tab in enumerate(tabs):
            await stage.set_node(f"t-{number}", 0, status="running", attempt_epoch=1)
            await expect(tab.get_by_role("cell", name="running")).to_be_visible()
        await tabs[0].get_by_role("button", name="Pause").click()
        await expect(tabs[0].get_by_role("dialog").get_by_role("status")).to_contain_text("a note")
        for each in (waiting, *tabs):
            await each.close()
        alone = await context.new_page()
        await alone.goto(address(server))
        await expect(alone.get_by_label("Token")).to_be_visible()


async def test_a_dialog_is_accessible_and_operable_with_the_keyboard(
    stage: Stage, start: Callable[..., Awaitable[PageProcess]], page: Page
) -> None:
    """Axe-core finds nothing serious in it or in the variables. Escape closes it, and Enter confirms what it shows."""
    await stage.add("t-1", nodes("a"), params={"day": "today"})
    server = await start()
    await page.goto(address(server, task="t-1", node="a", view="variables"))
    await expect(page.get_by_role("region", name="Variables").get_by_text('"today"')).to_be_visible()
    retry = page.get_by_role("group", name="Actions of the node").get_by_role(
        "button", name="Retry", exact=True
    )
    dialog = page.get_by_role("dialog", name="Retry a")
    for key in ("Escape", "Enter"):
        await retry.focus()
        await page.keyboard.press("Enter")
        await expect(dialog.get_by_text("a note")).to_be_visible()
        await expect(dialog.get_by_label("Changed keys of the input")).to_be_focused()
        if key == "Escape":
            assert await serious(page) == []
            await page.keyboard.type("[1")
            await expect(dialog.get_by_role("status")).to_contain_text("this is no JSON object")
            await expect(dialog.get_by_role("button", name="Retry")).to_be_disabled()
        else:
            await page.keyboard.type('{"limit": 5}')
            await page.keyboard.press("Tab")
            await page.keyboard.press("Tab")
            await page.keyboard.type("too slow")
            await expect(dialog.get_by_role("button", name="Retry")).to_be_enabled()
        await page.keyboard.press(key)
        await expect(dialog).to_be_hidden()
        await expect(retry).to_be_focused()
    await expect(page.locator(".toast")).to_have_text("Retry: done")
    given = {"input_inline": {"limit": 5}, "reason": "too slow"}
    [(_, _, sent)] = stage.tasks.acted
    assert {name: sent[name] for name in given} == given


async def test_a_read_only_server_shows_no_actions(
    stage: Stage, start: Callable[..., Awaitable[PageProcess]], page: Page
) -> None:
    await stage.add("t-1", nodes("a"))
    server = await start(read_only=True)
    await page.goto(address(server, task="t-1", node="a"))
    await expect(page.locator("#who")).to_contain_text("read-only")
    await expect(page.get_by_role("heading", name="a", exact=True)).to_be_visible()
    assert await page.locator(".actions:visible").count() == 0


async def test_a_graph_of_five_thousand_nodes_is_shown(
    stage: Stage, start: Callable[..., Awaitable[PageProcess]], page: Page
) -> None:
    """Nodes that are alike are one, which opens; each can be found. The page sends its calls without waiting for
    one of them.
    """
    graph_was_sent = asyncio.Event()
    page.on("request", lambda request: graph_was_sent.set() if "/task/graph" in request.url else None)

    async def after_the_graph(route: Route) -> None:
        await graph_was_sent.wait()
        await route.continue_()

    await page.route("**/session", after_the_graph)
    parts = [{"node_id": f"part-{n}", "type": "part", "depends_on": ["start"]} for n in range(LARGE)]
    end = {"node_id": "end", "type": "end", "depends_on": [each["node_id"] for each in parts]}
    await stage.add("large", [{"node_id": "start", "type": "start"}, *parts, end])
    server = await start()
    await page.goto(address(server, task="large"))
    await expect(box(page, "5,000 × part")).to_be_visible()
    assert await page.locator("svg.graph g.node").count() == 3
    await page.get_by_placeholder("node id").fill("part-4711")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="part-4711")).to_be_visible()
    await expect(box(page, "part-4711")).to_be_visible()
    await expect(box(page, "4,999 × part")).to_be_visible()


async def test_a_task_that_grows_is_drawn_again_and_a_purged_one_is_named(
    stage: Stage, start: Callable[..., Awaitable[PageProcess]], page: Page
) -> None:
    await stage.add("t-1", nodes("a"))
    server = await start()
    await page.goto(address(server, task="t-1"))
    await expect(box(page, "a")).to_be_visible()
    await stage.grow("t-1", nodes("a", "b"))
    await expect(box(page, "b")).to_have_class(re.compile("queued"))
    await stage.db.tasks.delete_one({"id": "t-1"})
    await expect(page.get_by_role("alert")).to_contain_text("the task no longer exists")


async def test_the_way_back_leads_through_views_and_nodes_and_filters_keep_the_focus(
    stage: Stage, start: Callable[..., Awaitable[PageProcess]], page: Page
) -> None:
    await stage.add("t-1", nodes("a", "b"))
    server = await start()
    await page.goto(address(server))
    await expect(page).to_have_title("Tasks – FlowKit")
    for choice in ("running", "all"):
        await page.get_by_role("button", name=choice, exact=True).click()
        await expect(page.get_by_role("button", name=choice, exact=True)).to_be_focused()
    await page.get_by_role("link", name="t-1").click()
    await expect(page).to_have_title(re.compile(". nightly · t-1 – FlowKit"))
    heading = page.get_by_role("complementary").get_by_role("heading").first
    await box(page, "a").click()
    await expect(heading).to_have_text("a")
    await box(page, "b").click()
    await expect(page.get_by_role("complementary").get_by_text("none", exact=True)).to_be_visible()
    await page.get_by_role("button", name="List", exact=True).click()
    await expect(page.get_by_role("button", name="b", exact=True)).to_be_visible()
    await page.go_back()
    await expect(box(page, "b")).to_be_visible()
    await page.go_back()
    await expect(heading).to_have_text("a")
    await page.go_back()
    await expect(heading).to_have_count(0)
    await page.go_back()
    await expect(page).to_have_title("Tasks – FlowKit")
    await page.go_back()
    await expect(page.get_by_role("button", name="running", exact=True)).to_have_attribute(
        "aria-pressed", "true"
    )


HIDE = """(hidden) => {
  Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange", { bubbles: true }));
}"""


async def test_updates_leave_no_memory_behind_and_a_page_in_the_background_draws_none(
    stage: Stage, start: Callable[..., Awaitable[PageProcess]], page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its title follows the task. When it is seen again, it shows the state of now."""
    monkeypatch.setattr(live, "POLL_SEC", 0.01)
    monkeypatch.setattr(live, "AGAIN_SEC", 0.01)
    await stage.add("t-1", nodes("a", "b"))
    server = await start()
    await page.goto(address(server, task="t-1", node="a"))
    devtools = await page.context.new_cdp_session(page)

    async def follow(first: int) -> tuple[float, float]:
        for number in range(first, first + 60):
            error = f"error {number} " + "x" * 1000
            await stage.set_node("t-1", 0, status="running", attempt_epoch=number, last_error=error)
            await expect(box(page, "a")).to_have_attribute("aria-label", re.compile(f"attempt {number},"))
        await devtools.send("HeapProfiler.collectGarbage")
        counters = await devtools.send("Memory.getDOMCounters")
        heap = await devtools.send("Runtime.getHeapUsage")
        return counters["nodes"], heap["usedSize"]

    before, after = await follow(2), await follow(62)
    assert after[0] < before[0] + 200
    assert after[1] < before[1] + 500_000
    await page.evaluate(HIDE, True)
    await stage.set_node("t-1", 1, status="running", attempt_epoch=1)
    await stage.db.tasks.update_one({"id": "t-1"}, {"$set": {"status": "failed"}})
    await expect(page).to_have_title("✕ nightly · t-1 – FlowKit")
    assert "queued" in str(await box(page, "b").get_attribute("class"))
    await page.evaluate(HIDE, False)
    await expect(box(page, "b")).to_have_class(re.compile("running"))


@pytest.mark.nightly
async def test_five_hundred_nodes_are_drawn_and_updated(
    stage: Stage,
    start: Callable[..., Awaitable[PageProcess]],
    page: Page,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It prints how long they take. An idle machine with two cores needs 1.5 s at most for each."""
    await stage.add("wide", layers(20, 25))
    server = await start()
    began = time.monotonic()
    await page.goto(address(server, task="wide"))
    await expect(box(page, "n499")).to_be_visible()
    seconds = [time.monotonic() - began]
    assert await page.locator("svg.graph g.node").count() == 500
    await expect(page.locator("#connection")).to_have_text("live")
    for number in range(5):
        began = time.monotonic()
        await stage.set_node("wide", number, status="running", attempt_epoch=1)
        await expect(box(page, f"n{number}")).to_have_class(re.compile("running"))
        seconds.append(time.monotonic() - began)
    with capsys.disabled():
        sys.stdout.write(f"\n500 nodes: drawn {seconds[0]:.2f} s, updated {max(seconds[1:]):.2f} s\n")


def layers(count: int, width: int) -> list[dict[str, Any]]:
    """Return layers of nodes, each with three parents in the layer above."""
    return [
        {
            "node_id": f"n{place}",
            "type": "quick",
            "depends_on": sorted(
                {f"n{(place // width - 1) * width + (place + step) % width}" for step in range(3)}
            )
            if place >= width
            else [],
        }
        for place in range(count * width)
    ]


STATE = """async () => {
  const { TaskState } = await import("/static/state.js");
  const state = new TaskState();
  const row = (attempt, status) => ({ node_id: "a", attempt, status });
  const send = (server, poll, whole, ...rows) => state.take({
    server, poll, whole, at: poll, task: {}, problem: null, count: rows.length || state.rows.length, nodes: { ...rows },
  });
  const found = {};
  found.partFirst = send("one", 3, false, row(1, "running"));
  found.whole = send("one", 4, true, row(2, "running"));
  found.older = send("one", 3, false, row(2, "queued"));
  found.again = send("one", 4, false, row(2, "queued"));
  found.lower = send("one", 5, false, row(1, "failed"));
  found.otherServer = send("two", 9, false, row(3, "failed"));
  found.status = state.rows[0].status;
  found.restarted = send("two", 1, true, row(2, "finished"));
  found.after = state.rows[0].status;
  return found;
}"""

GROUPS = """async () => {
  const { collapse, isLarge } = await import("/static/groups.js");
  const node = (role) => ({ role });
  const sizes = ({ groups }) => groups.map((each) => each.length).sort((a, b) => a - b);
  const chain = Array.from({ length: 2000 }, () => node("x"));
  const links = chain.slice(1).map((_, index) => [index, index + 1, "plain"]);
  const layers = [node("start"), ...Array.from({ length: 1500 }, () => node("w")), node("end")];
  const wires = layers.slice(1, -1).flatMap((_, index) => [[0, index + 1, "plain"], [index + 1, 1501, "plain"]]);
  return {
    large: [2000, 300, 301].map((count) => isLarge(chain.slice(0, count), links.slice(0, count - 1))),
    chain: sizes(collapse(chain, links)),
    layers: sizes(collapse(layers, wires)),
    edges: collapse(layers, wires).edges.length,
    expanded: sizes(collapse(layers, wires, new Set([5, 6]))),
  };
}"""


DRAWING = """async () => {
  const { GraphPicture } = await import("/static/graph.js");
  const container = document.createElement("div");
  const picture = new GraphPicture(container, {});
  const node = (node_id) => ({ node_id, role: "x" });
  const rows = (status) => [0, 1, 2].map((index) => ({ node_id: "abc"[index], status, attempt: 1 }));
  const shown = () => [...container.querySelectorAll(".node")].map((each) => each.getAttribute("aria-label"));
  const draw = (count, edges) => {
    const nodes = ["a", "b", "c"].slice(0, count).map(node);
    return picture.draw({ nodes, edges }, nodes.map((_, index) => [index]), edges, false);
  };
  await draw(1, []);
  picture.update(rows("running"), null);
  const before = shown();
  const overtaken = draw(2, [[0, 1, "plain"]]);
  const drawing = draw(3, [[0, 1, "plain"], [1, 2, "plain"]]);
  picture.update(rows("finished"), null);
  const problems = [await overtaken, await drawing];
  return { before, problems, after: shown() };
}"""


TIMELINE = """async () => {
  const { Timeline } = await import("/static/timeline.js");
  const container = document.createElement("div");
  container.style.cssText = "height: 400px; display: flex";
  document.body.replaceChildren(container);
  const timeline = new Timeline(container, () => {});
  const attempts = Array.from({ length: 10000 }, (_, n) => ({
    node_id: `n${n}`, attempt: 1, outcome: "finished", started_at: 100 * n, ended_at: n < 9999 ? 100 * n + 50 : null,
    waits: [],
  }));
  let most = 0;
  for (let second = 0; second < 5; second += 1) {
    timeline.show(attempts, 1000000 + second, true);
    most = Math.max(most, document.querySelectorAll(".timeline-row").length);
  }
  timeline.scroller.querySelector("button").focus();
  timeline.show(attempts, 1000100, true);
  const focused = document.activeElement.textContent;
  timeline.scroller.scrollTop = 24 * 9000;
  timeline.draw();
  const seen = document.querySelector(".timeline").textContent.includes("n9005 ");
  return { most, focused, seen };
}"""


async def test_old_messages_change_nothing_and_large_graphs_collapse(
    start: Callable[..., Awaitable[PageProcess]], page: Page
) -> None:
    """The rules of the page that need no server, in the browser that runs them."""
    await page.goto(address(await start()))
    found = await page.evaluate(STATE)
    assert {name: found[name] for name in ("partFirst", "older", "again", "otherServer")} == {
        "partFirst": None,
        "older": None,
        "again": None,
        "otherServer": None,
    }
    assert (found["whole"], found["lower"], found["status"]) == ([0], [], "running")
    assert (found["restarted"], found["after"]) == ([0], "finished")
    assert await page.evaluate(DRAWING) == {
        "before": ["a, x, running"],
        "problems": [None, None],
        "after": ["a, x, finished", "b, x, finished", "c, x, finished"],
    }
    timeline = await page.evaluate(TIMELINE)
    assert timeline["most"] < 60
    assert (timeline["focused"], timeline["seen"]) == ("n0 · 1", True)
    groups = await page.evaluate(GROUPS)
    assert groups == {
        "large": [True, False, True],
        "chain": [2_000],
        "layers": [1, 1, 1_500],
        "edges": 2,
        "expanded": [1, 1, 1, 1, 1_498],
    }


async def test_lines_of_an_attempt_are_shown_live_and_move_no_page(
    stage: Stage, start: Callable[..., Awaitable[PageProcess]], page: Page
) -> None:
    """The last ones first, earlier ones on request, new ones while the attempt runs. No text of them is HTML."""
    await stage.add("t-1", nodes("a"))
    await stage.set_node("t-1", 0, status="running", attempt_epoch=1)
    hostile = "<img src=x onerror='document.title=1'> \x1b[2J \u202e reversed"
    await store_lines(stage.db, "t-1", "a", 1, [*(f"line {number}" for number in range(300)), hostile])
    server = await start()
    await page.goto(address(server, task="t-1", node="a"))
    lines = page.locator("ol.lines li")
    await expect(lines).to_have_count(200)
    await expect(lines.last).to_contain_text("onerror='document.title=1'> \\u001b[2J \\u202e reversed")
    await store_lines(stage.db, "t-1", "a", 1, ["a new one"], level=logging.ERROR)
    await expect(lines.last).to_contain_text("ERROR a new one")
    await page.get_by_role("button", name="earlier lines").click()
    await expect(lines).to_have_count(302)
    await page.get_by_label("Least level").select_option("warning")
    await expect(lines).to_have_count(1)
    assert await serious(page) == []
