"""The page in a real browser, with a server that the tests direct: late, lost, contradicting and refused responses."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from tests.integration.harness import eventually
from tests.page.browser import address, box, expect, serious

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from playwright.async_api import Page

    from flowkit.page.process import PageProcess

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

FAKE = (Path(__file__).parent / "fake_server.js").read_text()
RUNNING = "[{ status: 'running', attempt: 2 }, {}, {}]"

SERVER_OF_LATER = """
fake.ahead = (Date.UTC(2036, 1) - Date.now()) / 1000;
fake.returns.session.now = Date.UTC(2036, 1) / 1000;
fake.returns["task/attempts"].attempts = [
  { node_id: "a", attempt: 1, outcome: "running", began_at: fake.returns.session.now - 5, ended_at: null, seconds: 5 },
];
"""
CALLS = """async () => {
  const { get, post } = await import("/static/api.js");
  for (const call of ["late", "slow"]) fake.hold(call);
  const calls = [get("late"), post("slow", { dry_run: true }), post("slow", { dry_run: false })];
  window.said = Promise.all(calls.map((each) => each.catch((error) => error.message)));
}"""
DOUBT = "it may still apply the action, so look at the task before you repeat it"
WORDS = """async () => {
  const { clock, duration, moment } = await import("/static/words.js");
  const element = moment("2026-11-28T00:00:00Z");
  return {
    durations: [-57.7, 0.9996, 59.7, 119.6, 3599.8, 7199, 86399].map(duration),
    clock: clock("2026-11-28T00:00:00Z"),
    moment: [element.textContent, element.title],
  };
}"""

EXPLANATION = """
fake.returns["task/explanation"] = {
  task_id: "t", status: "running", open: true, began_at: "", read_at: 1767225600, seconds: 100, total_seconds: 100,
  parts: { work: 50, queue: 0, retry_waits: 43, database_and_temporal: 7 },
  path: [
    { node_id: null, since: 0, until: 2, parts: { database_and_temporal: 2 } },
    { node_id: "a", since: 2, until: 52, parts: { work: 45, database_and_temporal: 5 } },
    { node_id: "b", since: 52, until: 100, parts: { work: 5, retry_waits: 43 } },
  ],
  speed_ups: [{ node_id: "a", gain: 45, work: 45 }],
  waits_for: "Node b is running. Node c is queued: waits for b.",
  reason: null, set_aside: ["2 batches are set aside in a: `flowkit batches t a --failed`"],
  missing: ["earlier pauses are unknown"],
};
fake.returns["task/node"].debug = "flowkit debug t a";
fake.returns["task/batches"] = {
  batches: [{ uid: "b1", status: "failed", error: "no such file", metrics: {}, debug: "flowkit debug t a --batch b1" }],
  total: 1, skip: 0,
};
"""


Open = Any
"""Open the page, with a script that runs before those of the page."""


@pytest_asyncio.fixture(loop_scope="module")
async def fake(start: Callable[..., Awaitable[PageProcess]], page: Page) -> Open:
    """Open the page of a task with the nodes a, b and c, once it waits for updates."""
    server = await start()

    async def open_one(script: str = "", **query: str) -> Page:
        await page.add_init_script(FAKE + script)
        await page.goto(address(server, task="t", **query))
        await until(page, "fake.calls.includes('task/updates')")
        return page

    return open_one


async def until(page: Page, condition: str) -> None:
    """Wait until a condition holds. The page permits no scripts with which Playwright could wait itself."""

    async def holds() -> bool:
        return bool(await page.evaluate(condition))

    await eventually(holds)


async def count(page: Page, call: str) -> int:
    """Return how often the page has made a call."""
    found: int = await page.evaluate(f"fake.calls.filter((each) => each === {call!r}).length")
    return found


async def test_an_explanation_is_read_when_asked_for_and_marks_the_critical_path(fake: Open) -> None:
    page = await fake(EXPLANATION)
    await page.evaluate(
        "fake.send(1, [{ status: 'finished', attempt: 1 }, { status: 'running', attempt: 1 }, {}])"
    )
    await expect(box(page, "b")).to_have_class("node running")
    assert await count(page, "task/explanation") == 0
    await page.get_by_label("critical path").check()
    await expect(box(page, "a")).to_have_attribute(
        "aria-label", re.compile("on the critical path, 50 % of the time")
    )
    await expect(box(page, "a").locator(".share")).to_have_text("★ 50 %")
    assert await page.locator("path.edge.on-path").count() == 1
    await expect(box(page, "c")).not_to_have_class(re.compile("on-path"))
    await page.get_by_role("button", name="List", exact=True).click()
    await expect(page.get_by_role("cell", name="★ 48 %")).to_be_visible()
    await page.get_by_role("button", name="Explain", exact=True).click()
    region = page.get_by_role("region", name="Explanation")
    await expect(region.get_by_role("row", name="retry waits 43 s 43 %")).to_be_visible()
    await expect(region.get_by_role("row", name="b 52 s 48 s retry waits 43 s, work 5.0 s")).to_be_visible()
    await expect(region.get_by_text("earlier pauses are unknown")).to_be_visible()
    await expect(region.get_by_text(re.compile(r"^as of 1/1/26|^as of 12/31/25"))).to_be_visible()
    await expect(region.get_by_role("row", name="queue 0", exact=False)).to_have_count(0)
    assert await serious(page) == []
    before = await count(page, "task/explanation")
    await page.evaluate("fake.returns['task/explanation'].waits_for = 'Node c is running.'")
    await region.get_by_role("button", name="Refresh").click()
    await expect(region.get_by_text("Node c is running.")).to_be_visible()
    await expect(region.get_by_role("button", name="Refresh")).to_be_focused()
    assert await count(page, "task/explanation") == before + 1
    await region.get_by_role("button", name="c", exact=True).click()
    await expect(
        page.get_by_role("complementary").get_by_role("heading", name="c", exact=True)
    ).to_be_visible()
    await page.get_by_role("checkbox", name="critical path").uncheck()
    await expect(page.locator(".on-path")).to_have_count(0)


async def test_batches_that_are_set_aside_and_the_time_of_all_runs_are_seen(fake: Open) -> None:
    page = await fake(EXPLANATION, node="a")
    causes = "2 batches are set aside (bad 2; latest: bad: no such file)"
    row = f"status: 'running', attempt: 2, batches: 5, failed_batches: 2, set_aside_text: '{causes}', shards: '1 shard'"
    await page.evaluate(
        f"fake.send(1, [{{ {row} }}, {{}}, {{}}], {{ task: {{ seconds: 4, total_seconds: 90 }} }})"
    )
    await expect(box(page, "a")).to_have_attribute(
        "aria-label", "a, quick, attempt 2, 5 batches, 2 set aside, running"
    )
    headline = page.locator(".headline")
    await expect(headline).to_contain_text("⊟ 2 batches set aside")
    await expect(headline).to_contain_text(re.compile(r"latest run for \d"))
    await expect(headline).to_contain_text(re.compile("1 min 3. s since it was created"))
    await expect(page.get_by_role("complementary").get_by_text(f"1 shard; {causes}")).to_be_visible()
    await page.get_by_role("button", name="Explain", exact=True).click()
    await expect(
        page.get_by_role("region", name="Explanation").get_by_text("flowkit batches t a --failed")
    ).to_be_visible()


TIMES = """
const hour = Date.now() / 1000 - 3725;
fake.returns["task/attempts"].attempts = [
  { node_id: "a", attempt: 1, outcome: "unknown", began_at: hour - 900, ended_at: null, seconds: null },
  { node_id: "a", attempt: 2, outcome: "running", began_at: hour, ended_at: null, seconds: 1 },
];
fake.returns["task/attempts"].waits = [
  { node_id: "a", part: "retry_waits", since: hour - 300, until: hour },
  { node_id: "c", part: "people", since: hour, until: null },
];
fake.running = [{ status: "running", attempt: 2, began_at: hour }, {}, { status: "deferred", waits_for: "a decision" }];
fake.returns.tasks.tasks = [{
  task_id: "t", status: "running", name: "n", started_at: "", finished_at: null, reason: null,
  seconds: 3725, total_seconds: 7325,
}];
"""
HOUR = "1 h 2 min"
"""How long the running attempt has run, wherever it is shown."""


async def test_an_attempt_has_one_duration_wherever_it_is_shown(fake: Open) -> None:
    """Its clock goes on without news. An attempt whose end is unknown has none, and neither has its bar."""
    page = await fake(TIMES, node="a", view="list")
    await page.evaluate("fake.send(1, fake.running, { task: { seconds: 3725, total_seconds: 7325 } })")
    aside = page.get_by_role("complementary")
    await expect(aside.locator(".node-state")).to_contain_text(f"attempt 2, {HOUR}")
    await expect(aside.locator(".attempts li").nth(1)).to_contain_text(HOUR)
    await expect(aside.locator(".attempts li").nth(0)).not_to_contain_text(" min")
    await expect(page.locator("table.nodes tbody tr").first.locator("td.number").last).to_have_text(HOUR)
    await page.get_by_role("button", name="Timeline", exact=True).click()
    rows = page.locator(".timeline-row")
    await expect(rows.nth(1).locator(".took")).to_have_text(HOUR)
    await expect(rows.nth(0).locator(".took")).to_have_text("unknown")
    await expect(rows.nth(0).locator(".bar")).to_have_count(0)
    headline = page.locator(".headline")
    await expect(headline).to_contain_text(f"latest run for {HOUR}")
    await expect(headline).to_contain_text("2 h 2 min since it was created")
    await page.get_by_role("link", name="Tasks").click()
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="t", exact=True))
    await expect(page.get_by_role("columnheader", name="latest run")).to_be_visible()
    await expect(row).to_contain_text(HOUR)
    await expect(row).to_contain_text("2 h 2 min since it was created")


async def test_the_timeline_has_an_axis_the_waits_and_now(fake: Open) -> None:
    """A node without an attempt has a row for its wait. Once the task has ended, there is no now."""
    page = await fake(TIMES, view="timeline")
    await page.evaluate("fake.send(1, fake.running)")
    rows = page.locator(".timeline-row")
    await expect(rows).to_have_count(3)
    await expect(rows.nth(1).locator(".bar.wait.retry_waits")).to_have_attribute(
        "title", "retry waits 5 min 0 s"
    )
    waits = rows.nth(2)
    await expect(waits.locator(".bar.wait.people")).to_be_visible()
    await expect(waits.get_by_role("button")).to_have_accessible_name(
        re.compile("^c; waited: people 1 h 2 min so far$")
    )
    axis = page.locator(".timeline-axis")
    await expect(axis.locator(".now")).to_have_text("now")
    labels = await axis.locator("span:not(.now)").all_inner_texts()
    assert len(labels) >= 2
    assert all(re.match(r"\d+:\d\d", each) for each in labels)
    ends = await page.evaluate("""[...document.querySelectorAll('.timeline-axis span')]
      .map((each) => each.getBoundingClientRect()).sort((a, b) => a.left - b.left)
      .map((each) => [each.left, each.right])""")
    assert all(left[1] <= right[0] for left, right in pairwise(ends)), ends
    lines = await page.evaluate("""[...document.querySelectorAll('.timeline-marks .now, .bar.running')]
      .map((each) => each.getBoundingClientRect().right)""")
    assert abs(lines[0] - lines[1]) < 6
    end = "{ task: { status: 'failed', closed: true } }"
    await page.evaluate(f"fake.send(2, [{{ status: 'finished', attempt: 2 }}, {{}}, {{}}], {end})")
    await expect(axis.locator(".now")).to_have_count(0)


async def test_attempts_that_were_read_before_the_last_change_are_read_again(fake: Open) -> None:
    """A server shares them for a while, and after the end of a task no news would ask for them."""
    page = await fake(TIMES + 'fake.returns["task/attempts"].read_at = 0;', view="timeline")
    await page.evaluate(
        "fake.send(1, [{ status: 'failed', attempt: 2 }, {}, {}], { task: { status: 'failed', closed: true } })"
    )
    await expect(page.locator(".timeline-row")).to_have_count(3)
    known = await count(page, "task/attempts")
    await until(page, f"fake.calls.filter((each) => each === 'task/attempts').length > {known}")
    ended = "{ attempts: [{ node_id: 'a', attempt: 2, outcome: 'failed', began_at: 5, ended_at: 9 }]"
    await page.evaluate(
        f"fake.returns['task/attempts'] = {ended}, waits: [], read_at: 1e12, complete: true }}"
    )
    await expect(page.locator(".timeline-row")).to_have_count(1)
    await expect(page.locator(".timeline-row .took")).to_have_text("4.0 s")


async def test_batches_that_are_set_aside_are_on_the_node_and_named_in_the_head(fake: Open) -> None:
    """Also in a picture that is too small to read."""
    page = await fake("fake.graph(Array.from({ length: 40 }, (_, index) => `node-${index}`));")
    await page.evaluate("fake.send(1, { 7: { status: 'finished', attempt: 1, failed_batches: 1200 } })")
    mark = page.locator('g.node[aria-label^="node-7,"] .aside-mark')
    await expect(mark).to_have_text("⊟ 1,200")
    await expect(page.locator("svg.graph.far")).to_be_visible()
    await expect(mark).to_be_visible()
    line = page.locator(".headline .aside")
    await expect(line).to_have_text("⊟ 1,200 batches set aside: node-7")
    await line.get_by_role("button", name="node-7").click()
    await expect(page.get_by_role("complementary").get_by_role("heading", name="node-7")).to_be_visible()


KINDS = """
const kinds = { a: { sets_aside: true }, b: { role: "approval" }, c: { prerequisites: ["data:eu"] } };
fake.graph(["a", "b", "c"], "nightly", kinds);
fake.status["task/actions/skip_node"] = 409;
"""


async def test_a_node_has_the_buttons_that_fit_its_kind_and_says_why_one_is_gray(fake: Open) -> None:
    page = await fake(KINDS, node="a")
    await page.evaluate("fake.send(1, [{ status: 'failed', attempt: 1 }, { status: 'deferred' }, {}])")
    group = page.get_by_role("group", name="Actions of the node")
    skip = group.get_by_role("button", name="Skip", exact=True)
    await expect(skip).to_have_attribute("aria-disabled", "true")
    await expect(skip).to_have_accessible_description("refused with 409")
    assert await skip.evaluate("(each) => getComputedStyle(each).textDecorationLine") == "none"
    await expect(group.get_by_role("button", name="Retry failed batches")).to_be_visible()
    await box(page, "b").click()
    await expect(group.get_by_role("button", name="Approve")).to_be_visible()
    await expect(group.get_by_role("button", name=re.compile("batches|Satisfy"))).to_have_count(0)
    await box(page, "c").click()
    await group.get_by_role("button", name="Satisfy data:eu").click()
    dialog = page.get_by_role("dialog", name="Satisfy data:eu")
    await dialog.get_by_role("button", name="Satisfy data:eu").click()
    await expect(dialog).to_have_count(0)
    sent = await page.evaluate("fake.bodies['task/actions/satisfy'].at(-1)")
    assert sent["input"]["prerequisite"] == "data:eu"
    assert "node_id" not in sent["input"]


async def test_looks_at_actions_leave_the_connections_of_the_browser_to_others(fake: Open) -> None:
    names = ("pause", "resume", "retry_node", "skip_node", "complete_node", "fail_node")
    hold = "".join(
        f"fake.hold('task/actions/{name}'); fake.status['task/actions/{name}'] = 504;" for name in names
    )
    page = await fake(hold, node="a")
    await page.evaluate(f"fake.send(1, {RUNNING})")
    looks = "fake.calls.filter((each) => each.startsWith('task/actions/')).length"
    await until(page, f"{looks} >= 2")
    for name in names:
        await page.evaluate(f"fake.release('task/actions/{name}')")
    node = page.get_by_role("group", name="Actions of the node")
    await expect(node.get_by_role("button")).to_have_text(["Retry", "Skip", "Complete", "Fail"])
    assert (
        await page.evaluate(looks) == 2
    )  # one of the task and one of the node; no other would get a response


async def test_nodes_are_added_on_the_page(fake: Open) -> None:
    page = await fake()
    await page.evaluate(f"fake.send(1, {RUNNING})")
    await page.get_by_role("button", name="Add nodes").click()
    dialog = page.get_by_role("dialog", name="Add nodes the task")
    await dialog.get_by_label("New nodes").fill('{"node_id": "x"}')
    await expect(dialog.get_by_role("status")).to_contain_text("this is no JSON list")
    nodes = [{"node_id": "x", "type": "quick", "depends_on": ["c"]}]
    await dialog.get_by_label("New nodes").fill(json.dumps(nodes))
    await dialog.get_by_role("button", name="Add nodes").click()
    await expect(dialog).to_have_count(0)
    sent = await page.evaluate("fake.bodies['task/actions/change_graph'].at(-1)")
    assert sent["input"]["nodes"] == nodes


async def test_after_the_end_of_the_task_a_selected_node_offers_only_another_run(fake: Open) -> None:
    """Although the node itself has not changed."""
    page = await fake(node="a")
    done = "[{ status: 'finished', attempt: 1 }, {}, {}]"
    await page.evaluate(f"fake.send(1, {done})")
    group = page.get_by_role("group", name="Actions of the node")
    await expect(group.get_by_role("button", name="Retry", exact=True)).to_be_visible()
    end = "{ whole: false, task: { status: 'failed', closed: true } }"
    await page.evaluate(f"fake.send(2, {{ 1: {{ status: 'skipped' }} }}, {end})")
    await expect(group.get_by_role("button")).to_have_text(["Run again"])
    await group.get_by_role("button", name="Run again").click()
    await expect(page.get_by_role("dialog")).to_be_visible()
    sent = await page.evaluate("fake.bodies['task/actions/rerun'].at(-1)")
    assert sent["input"]["nodes"] == ["a"]


async def test_an_approval_shows_its_question(fake: Open) -> None:
    asks = "May <b>the report</b> go out?"
    page = await fake(f"{KINDS} fake.returns['task/node'].asks = {json.dumps(asks)};", node="b")
    await page.evaluate("fake.send(1, [{}, { status: 'deferred', waits_for: 'a decision' }, {}])")
    await expect(page.locator("aside .question")).to_have_text(f"Asks: {asks}")


ALL_LINES = """async () => {
  const { AttemptLines } = await import("/static/lines.js");
  const lines = new AttemptLines("t", { node_id: "a" });
  lines.cut = true;
  lines.append({ kept: true, lines: [], earlier: true, end: "", command: "flowkit logs a --task t --attempt 1" });
  return lines.note.textContent;
}"""


async def test_the_command_for_all_lines_is_that_of_the_server(fake: Open) -> None:
    page = await fake()
    assert "; flowkit logs a --task t --attempt 1 " in await page.evaluate(ALL_LINES)


@pytest.mark.parametrize(
    ("given", "title"),
    [
        ({"scheduled_at": "2026-11-28T02:00:00Z"}, "▶ 2026-11-28 02:00Z nightly – FlowKit"),
        ({}, "▶ nightly · t – FlowKit"),
    ],
)
async def test_tabs_of_tasks_with_the_same_graph_can_be_told_apart(
    fake: Open, given: dict[str, Any], title: str
) -> None:
    page = await fake(f"Object.assign(fake.returns['task/graph'], {json.dumps(given)});")
    await page.evaluate(f"fake.send(1, {RUNNING})")
    await expect(page).to_have_title(title)


STATES = """
const long = "a long line of words that people have to scroll\\n".repeat(60); // also without a place to put the focus
const input = { input_inline: { long: long.split("\\n") } };
Object.assign(fake.returns["task/node"], { asks: long, definition: { io: input } });
Object.assign(fake.returns["task/attempts"].attempts[0], { error: long });
fake.returns["task/explanation"].reason = long;
fake.returns["task/variables"].variables = { long };
fake.states = [
  { status: "failed", attempt: 2, note: long, failed_batches: 2, set_aside_text: "2 batches are set aside" },
  { status: "running", attempt: 1, began_at: 1 },
  { status: "deferred", awaits_decision: true, waits_for: "a decision" },
];
fake.head = { task: { paused: [`task paused by ada: ${long}`], reason: long, total_seconds: 90 } };
"""


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])
async def test_no_view_has_a_serious_fault_of_accessibility(fake: Open, scheme: Any) -> None:
    """With a node that is selected, of each kind of state; the lists; and a dialog over them."""
    page = await fake(EXPLANATION + TIMES + SCHEDULES + STATES, node="a")
    await page.emulate_media(color_scheme=scheme)
    await page.evaluate("fake.send(1, fake.states, fake.head)")
    group = page.get_by_role("group", name="Actions of the node")
    await expect(group.get_by_role("button").first).to_be_visible()
    for view in ("Graph", "List", "Timeline", "Explain", "Variables"):
        await page.get_by_role("button", name=view, exact=True).click()
        shown = page.locator(f'[data-view="{view.lower()}"]')
        await expect(shown).to_have_attribute("aria-pressed", "true")
        assert await serious(page) == [], view
    await page.locator(".legend summary").click()
    await page.get_by_role("button", name="Pause").click()
    await expect(page.get_by_role("dialog").get_by_text("a note")).to_be_visible()
    assert await serious(page) == []
    await page.keyboard.press("Escape")
    for section in ("Tasks", "Schedules"):
        await page.get_by_role("link", name=section, exact=True).click()
        await expect(page.get_by_role("heading", name=section, exact=True)).to_be_visible()
        assert await serious(page) == [], section


async def test_failures_have_the_command_that_debugs_them(fake: Open) -> None:
    """Also where the browser permits no clipboard. The result of a node is read again when it ends."""
    refused = (
        "navigator.clipboard.writeText = async () => { throw new DOMException('no', 'NotAllowedError'); };"
    )
    page = await fake(EXPLANATION + refused, node="a")
    await page.evaluate(f"fake.send(1, {RUNNING})")
    aside = page.get_by_role("complementary")
    await expect(aside.get_by_text("flowkit debug t a --batch b1")).to_be_visible()
    await expect(aside.get_by_text("flowkit debug t a", exact=True)).to_have_count(0)
    await page.evaluate("fake.returns['task/node'].result = { metrics: { rows: 7 } }")
    await page.evaluate("fake.send(2, [{ status: 'failed', attempt: 2 }, {}, {}])")
    await expect(aside.get_by_text("flowkit debug t a", exact=True)).to_be_visible()
    await expect(aside.get_by_text('"rows": 7')).to_be_visible()
    await aside.get_by_role("button", name="Copy the command that debugs b1").click()
    await expect(page.locator(".toast")).to_have_text(re.compile("is copied"))


@pytest.mark.parametrize(("view", "expected"), [("list", "⤼ skipped"), ("variables", '"today"')])
async def test_a_graph_that_comes_after_the_only_update_is_shown_with_it(
    fake: Open, view: str, expected: str
) -> None:
    page = await fake("fake.hold('task/graph')", view=view, node="gone")
    await page.evaluate(
        "fake.send(1, [{ status: 'skipped' }, {}, {}], { task: { status: 'failed', closed: true } })"
    )
    await expect(page.locator("#connection")).to_have_text("live")
    await page.evaluate("fake.release('task/graph')")
    await expect(page.get_by_role("cell", name=expected)).to_be_visible()
    await expect(page.get_by_role("button", name="Run again")).to_be_visible()
    await expect(page.locator(".toast")).to_have_text("The task has no node “gone”.")


async def test_another_graph_keeps_the_selected_node_or_closes_it(fake: Open) -> None:
    """Although the server cannot return it at first. Attempts of the next selected node are read."""
    page = await fake(node="b")
    await page.evaluate(f"fake.send(1, {RUNNING})")
    heading = page.get_by_role("complementary").get_by_role("heading").first
    await expect(heading).to_have_text("b")
    await page.evaluate("fake.status['task/graph'] = 503; fake.graph(['b', 'a', 'c'])")
    await page.evaluate("fake.send(2, [{ status: 'finished' }, {}, {}])")
    await until(page, "fake.calls.filter((each) => each === 'task/graph').length > 1")
    await page.evaluate("delete fake.status['task/graph']")
    await expect(page.locator("g.node.selected")).to_have_attribute("aria-label", "b, quick, finished")
    await expect(page.locator(".node-state")).to_contain_text("finished")
    await page.evaluate("fake.graph(['x']); fake.send(3, [{}])")
    await expect(box(page, "x")).to_be_visible()
    await expect(heading).to_have_count(0)
    assert "node=" not in page.url
    attempts = await count(page, "task/attempts")
    await box(page, "x").click()
    await until(page, f"fake.calls.filter((each) => each === 'task/attempts').length > {attempts}")


async def test_a_lost_server_is_named_and_old_updates_change_nothing(fake: Open) -> None:
    """Lost, unreadable, of another start of the server, or with nodes missing."""
    page = await fake()
    connection = page.locator("#connection")
    await page.evaluate("fake.send(1, { 2: { status: 'running', attempt: 1 } })")
    await expect(box(page, "c")).to_have_class("node running")
    await expect(page.get_by_text("1 running")).to_be_visible()
    await page.evaluate("fake.lost = true")
    await expect(connection).to_have_text(re.compile("^not live since .*: the server does not respond$"))
    await page.evaluate("fake.send(1, [{ status: 'finished', attempt: 2 }, {}, {}], { server: 'two' })")
    await expect(connection).to_have_text("live")
    for old in ("{ server: 'one', poll: 9, whole: false }", "{ server: 'two', whole: false }"):
        await page.evaluate(f"fake.send(1, [{{ status: 'failed', attempt: 3 }}], {old})")
    await page.evaluate(
        "fake.send(2, [{ status: 'running', attempt: 1 }], { server: 'two', problem: 'no database', lost_at: 1 })"
    )
    await expect(connection).to_have_text("not live")
    await expect(page.get_by_role("alert")).to_contain_text("/70, ")
    await expect(box(page, "a")).to_have_attribute("aria-label", "a, quick, attempt 2, finished")
    await page.evaluate("for (let each = 0; each < 1000; each += 1) fake.raw('nonsense')")
    await expect(connection).to_have_text(re.compile("a response of the server cannot be read"))
    await page.evaluate("fake.status['task/updates'] = 401")
    await expect(page.get_by_label("Token")).to_be_visible()


async def test_a_frozen_server_is_named_in_time_and_clocks_stop_where_news_stop(
    fake: Open, page: Page
) -> None:
    """Times are those of the server, whose clock is years ahead here. A call that is not answered says so."""
    await page.clock.install()
    await fake(SERVER_OF_LATER, view="timeline")
    took = page.locator(".timeline-row .took")
    await expect(took).to_have_text(re.compile(r"^5\.\d s$"))
    await page.evaluate("fake.send(1, [{ status: 'running', attempt: 1 }, {}, {}])")
    await expect(page.locator("#connection")).to_have_text("live")
    await page.evaluate("fake.hold('task/updates')")
    await page.clock.fast_forward(8_000)
    await expect(page.locator("#connection")).to_have_text(
        re.compile(r"^not live since \d+/\d+/36, .*: the server has not responded for 6 s$")
    )
    await page.clock.run_for(1_100)
    stopped = await page.locator(".headline .summary").text_content()
    await page.clock.run_for(5_000)
    assert await page.locator(".headline .summary").text_content() == stopped
    await page.evaluate(f"({CALLS})()")
    await page.clock.fast_forward(70_000)
    assert await page.evaluate("said") == [
        "the server has not responded within 40 s",
        "the server has not responded within 60 s",
        f"the server has not responded within 60 s; {DOUBT}",
    ]
    await page.evaluate("fake.release('task/updates'); fake.send(2, [{ status: 'finished', attempt: 1 }])")
    await expect(page.locator("#connection")).to_have_text("live")


async def test_a_filter_never_stands_over_the_rows_of_another_one(
    start: Callable[..., Awaitable[PageProcess]], page: Page
) -> None:
    """They are marked until the answer is there. The list says, too, that it is not live."""
    task = (
        "task_id: 't-1', status: 'running', name: null, started_at: null, seconds: 59.7, total_seconds: 59.7"
    )
    await page.clock.install()
    await page.add_init_script(f"{FAKE}; fake.returns.tasks.tasks.push({{ {task}, reason: null }});")
    await page.goto(address(await start()))
    rows, link = page.locator("tbody"), page.get_by_role("link", name="t-1")
    await expect(link).to_be_visible()
    await expect(page.locator("#connection")).to_have_text("live")
    await page.evaluate("fake.hold('tasks')")
    await page.get_by_role("button", name="failed", exact=True).click()
    await expect(rows).to_have_attribute("aria-busy", "true")
    await page.clock.fast_forward(8_000)
    await expect(page.locator("#connection")).to_have_text(re.compile("^not live since"))
    await page.evaluate("fake.returns.tasks.tasks = []; fake.release('tasks')")
    await expect(link).to_have_count(0)
    await expect(rows).not_to_have_attribute("aria-busy", "true")
    await expect(page.locator("#connection")).to_have_text("live")
    devtools = await page.context.new_cdp_session(page)
    await devtools.send("Emulation.setTimezoneOverride", {"timezoneId": "Europe/Berlin"})
    found = await page.evaluate(f"({WORDS})()")
    assert found["durations"] == [
        "0 ms",
        "1.0 s",
        "1 min 0 s",
        "2 min 0 s",
        "1 h 0 min",
        "2 h 0 min",
        "1 d 0 h",
    ]
    assert found["clock"] == "11/28/26, 1:00:00 AM (00:00:00 UTC)"
    assert found["moment"] == ["11/28/26, 1:00:00 AM", "2026-11-28 00:00:00 UTC"]


async def test_nothing_acts_on_a_task_that_is_no_longer_shown(fake: Open) -> None:
    """A dialog closes on the way back. Actions are offered while their rules cannot be asked. Skip links read nothing
    again, and who closes a node is at its box.
    """
    page = await fake("fake.status['task/actions/pause'] = 409; fake.status['task/actions/resume'] = 503;")
    await page.evaluate(f"fake.send(1, {RUNNING})")
    await box(page, "a").click()
    await page.get_by_role("button", name="Close").click()
    await expect(box(page, "a")).to_be_focused()
    await expect(page.get_by_role("button", name="Pause")).to_have_attribute("aria-disabled", "true")
    await page.get_by_role("button", name="Resume").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog.get_by_role("status")).to_have_text("refused with 503")
    await page.evaluate("delete fake.status['task/actions/resume']")
    await dialog.get_by_label("Reason").fill("later")
    await expect(dialog.get_by_role("status")).to_contain_text("a note")
    await page.evaluate("fake.hold('task/actions/resume')")
    await dialog.get_by_role("button", name="Resume").click()
    await page.go_back()
    await expect(dialog).to_have_count(0)
    await page.evaluate("fake.status['task/actions/resume'] = 409; fake.release('task/actions/resume')")
    await expect(page.locator(".toast.error")).to_have_text("Resume: refused with 409")
    graphs = await count(page, "task/graph")
    await page.get_by_role("link", name="Skip to the content").focus()
    await page.keyboard.press("Enter")
    await expect(page).to_have_url(re.compile("#main$"))
    assert await count(page, "task/graph") == graphs


SHOWN = """
fake.shows = (call, revision, state, affected) => {
  const nodes = Object.entries(affected).map(([node_id, from]) => ({ node_id, from, to: "queued" }));
  fake.returns[`task/actions/${call}`] = { affected: nodes, notes: [], revision, state };
};
fake.shows("retry_node", 1, "s1", { a: "held" });
fake.shows("pause", 1, "s1", { a: "running" });
"""
"""Sets what the preview of an action returns: the states of the affected nodes."""


async def test_a_dialog_looks_again_when_the_task_changes_under_it_says_what_changed_and_asks_anew(
    fake: Open,
) -> None:
    """What is applied carries what the dialog has shown. A refusal, or no answer, also makes it look again. What has
    changed since it was opened stays on it.
    """
    page = await fake(SHOWN, node="a")
    await page.evaluate(f"fake.send(1, {RUNNING})")
    await page.get_by_role("button", name="Retry", exact=True).click()
    dialog = page.get_by_role("dialog", name="Retry a")
    button, status = dialog.get_by_role("button", name="Retry"), dialog.get_by_role("status")
    await expect(status).to_contain_text("a: held → queued")
    await expect(button).to_be_enabled()
    await page.evaluate(
        "fake.shows('retry_node', 2, 's2', { a: 'finished', b: 'finished' });"
        "fake.hold('task/actions/retry_node');"
        "fake.send(2, [{ status: 'finished', attempt: 2 }, {}, {}])"
    )
    await page.evaluate(
        "fake.disabled = []; new MutationObserver(() => fake.disabled.push(fake.button.disabled))"
        ".observe((fake.button = document.querySelector('dialog [type=submit]')), { attributes: true });"
        "fake.release('task/actions/retry_node')"
    )
    await expect(dialog.get_by_role("alert")).to_have_text(
        "Changed meanwhile: another action was applied; a was held and is finished; b is affected, too."
    )
    await expect(status).to_contain_text("b: finished → queued")
    await expect(button).to_be_enabled()
    assert await page.evaluate("fake.disabled") == [True, False], "the button waits for a moment"
    await page.evaluate("fake.status['task/actions/retry_node'] = 409")
    await button.click()
    await expect(status).to_have_text("refused with 409")
    await expect(button).to_be_disabled()
    await page.evaluate(
        "delete fake.status['task/actions/retry_node'];"
        "fake.send(3, [{ status: 'failed', attempt: 2 }, {}, {}])"
    )
    await expect(dialog.get_by_role("alert")).to_contain_text("another action was applied")
    await expect(button).to_be_enabled()
    await button.click()
    await expect(dialog).to_be_hidden()
    assert await page.evaluate("fake.applied") == [
        {"node_id": "a", "if_revision": revision, "if_state": f"s{revision}"} for revision in (2, 2)
    ]


async def test_a_pause_is_not_held_up_by_nodes_that_start_and_end(fake: Open) -> None:
    """Unless it stops their attempts."""
    page = await fake(SHOWN)
    await page.evaluate(f"fake.send(1, {RUNNING})")
    dialog = page.get_by_role("dialog", name="Pause the task")
    button, status = dialog.get_by_role("button", name="Pause"), dialog.get_by_role("status")
    for number, interrupt in enumerate([False, True]):
        await page.get_by_role("button", name="Pause").click()
        await dialog.get_by_label("stop attempts").set_checked(interrupt)
        await expect(status).to_contain_text("a: running → queued")
        await expect(button).to_be_enabled()
        await page.evaluate(
            f"fake.shows('pause', 1, 's2{number}', {{ b: 'running' }});"
            f"fake.send({2 + number}, [{{ status: 'finished', attempt: {3 + number} }}, {{}}, {{}}])"
        )
        await expect(status).to_contain_text("b: running → queued")
        await expect(dialog.get_by_role("alert")).to_have_count(int(interrupt))
        await expect(button).to_be_enabled()
        await button.click()
        await expect(dialog).to_be_hidden()
        await page.evaluate("fake.shows('pause', 1, 's1', { a: 'running' })")
    assert await page.evaluate("fake.applied") == [
        {"if_revision": 1},
        {"interrupt": True, "if_revision": 1, "if_state": "s21"},
    ]


async def test_a_resume_is_not_held_up_by_nodes_that_become_ready(fake: Open) -> None:
    """They would start, too, if they became ready a moment later."""
    page = await fake(f"{SHOWN} fake.shows('resume', 1, 's1', {{ b: 'queued' }});")
    await page.evaluate(f"fake.send(1, {RUNNING})")
    await page.get_by_role("button", name="Resume").click()
    dialog = page.get_by_role("dialog", name="Resume the task")
    await expect(dialog.get_by_role("status")).to_contain_text("b: queued → queued")
    await page.evaluate("fake.shows('resume', 1, 's2', { b: 'queued', c: 'queued' })")
    await page.evaluate("fake.send(2, [{ status: 'finished', attempt: 1 }, {}, {}])")
    await expect(dialog.get_by_role("status")).to_contain_text("c: queued → queued")
    await expect(dialog.get_by_role("alert")).to_have_count(0)
    await dialog.get_by_role("button", name="Resume").click()
    await expect(dialog).to_be_hidden()
    assert await page.evaluate("fake.applied") == [{"if_revision": 1}]


async def test_chosen_nodes_of_a_finished_task_run_again(fake: Open) -> None:
    """The rules reject a rerun without a node, because none is left: the form names some."""
    page = await fake("fake.status['task/actions/rerun'] = 409")
    await page.evaluate(
        "fake.send(1, [{ status: 'finished' }, {}, {}], { task: { status: 'finished', closed: true } })"
    )
    again = page.get_by_role("group", name="Actions of the task").get_by_role("button", name="Run again")
    await expect(again).not_to_have_attribute("aria-disabled", "true")
    await again.click()
    dialog = page.get_by_role("dialog", name="Run again the task")
    await expect(dialog.get_by_role("status")).to_have_text("refused with 409")
    await expect(dialog.get_by_role("button", name="Run again")).to_be_disabled()
    await page.evaluate(
        "delete fake.status['task/actions/rerun'];"
        "fake.returns['task/actions/rerun'] = { affected: [], notes: [], run_seq: 2, state: 's1' }"
    )
    await dialog.get_by_label("Nodes that run again").fill("a\nc")
    await dialog.get_by_role("button", name="Run again").click()
    await expect(dialog).to_be_hidden()
    assert await page.evaluate("fake.applied") == [{"nodes": ["a", "c"], "if_state": "s1"}]


async def test_the_way_back_brings_switches_back(fake: Open) -> None:
    page = await fake(view="nonsense")
    await page.evaluate("fake.send(1, [{ status: 'finished', attempt: 1 }, {}, {}])")
    await box(page, "b").click()
    hides = page.get_by_label("hide what has finished")
    await hides.check()
    await expect(box(page, "a")).to_have_class(re.compile("gone"))
    await page.go_back()
    await expect(hides).not_to_be_checked()
    await expect(box(page, "a")).not_to_have_class(re.compile("gone"))


async def test_a_graph_that_cannot_be_placed_is_a_list_that_says_so(fake: Open, page: Page) -> None:
    await page.route("**/vendor/graphviz.js", lambda route: route.fulfill(status=503))
    await fake()
    await page.evaluate(f"fake.send(1, {RUNNING})")
    await expect(page.get_by_role("alert")).to_have_text(
        re.compile("^The graph cannot be drawn .* The list has all nodes")
    )
    await expect(page.get_by_role("cell", name="▶ running")).to_be_visible()


SCHEDULES = """
const time = (hour, status, reason = null) => {
  const at = `2026-11-26T0${hour}:00:00Z`;
  return { at, status, task_id: status === "no_task" || status === "due" ? null : `nightly-${at}`, reason };
};
const zone = "Europe/Berlin";
const schedule = (name, times) => ({ name, when: `0 * * * * ${zone}`, timezone: zone, paused: false, note: "", times });
const bad = '<img src=x onerror="document.title=1">';
fake.times = [time(0, "finished"), time(1, "failed", bad), time(2, "no_task"), time(3, "started"), time(4, "due")];
fake.returns.schedules.schedules = [
  schedule("nightly", fake.times),
  { ...schedule(bad, [time(1, "refused"), time(2, "taken", "no task")]), paused: true, note: bad, timezone: "No/Land" },
];
"""


async def test_schedules_are_rows_of_squares_that_the_keyboard_reaches_and_that_stay_live(
    start: Callable[..., Awaitable[PageProcess]], page: Page
) -> None:
    """Each square says its time in the zone of the schedule, and its status in words. A deleted schedule leaves."""
    server = await start()
    await page.add_init_script(FAKE + SCHEDULES)
    await page.goto(address(server))
    await page.get_by_role("link", name="Schedules").click()
    nightly = page.get_by_role("list", name="Nominal times of nightly")
    failed = nightly.get_by_role("link", name="Nov 26, 2026, 2:00 AM Europe/Berlin: failed, <img src=x")
    await expect(failed).to_have_attribute("href", "?task=nightly-2026-11-26T01%3A00%3A00Z")
    assert await nightly.get_by_role("link").count() == 2
    taken = page.get_by_role("img", name=re.compile(": taken, no task$"))
    await expect(taken).to_have_text("≠")
    await expect(
        page.get_by_text("1 finished · 1 failed · 1 no task · 1 waits for an engine · next")
    ).to_be_visible()
    assert await serious(page) == []
    await nightly.locator("[tabindex='0']").focus()
    for key, square in (
        ("Home", "finished"),
        ("ArrowRight", "failed"),
        ("ArrowDown", "taken"),
        ("ArrowLeft", "refused"),
        ("ArrowUp", ""),
    ):
        await page.keyboard.press(key)
        await expect(page.locator(f".square.{square or 'finished'}:focus")).to_be_visible()
    await page.keyboard.press("ArrowRight")
    await expect(page.locator(".about-time").first).to_contain_text("2:00 AM Europe/Berlin: failed, <img")
    await page.evaluate("fake.times.splice(0, 1); fake.times[0].status = 'finished'")
    await expect(page.locator(".about-time").first).to_contain_text("2:00 AM Europe/Berlin: finished, <img")
    await expect(nightly.locator(".square:focus")).to_have_attribute("tabindex", "0")
    await page.evaluate("fake.returns.schedules.schedules.shift()")
    await expect(nightly).to_have_count(0)
    await expect(page.get_by_role("heading", name="<img")).to_be_visible()
    await page.evaluate("fake.status.schedules = 503")
    await expect(page.locator("#connection")).to_have_text(
        re.compile("^not live since .*: refused with 503$")
    )
    await page.go_back()
    await expect(page).to_have_title("Tasks – FlowKit")
