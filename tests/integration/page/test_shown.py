"""What the page shows of random tasks with actions agrees, at each step, with their documents and with Temporal.

The list, the head, the nodes, the timeline and Explain are read as the page reads them, and for some tasks in a
browser. A difference counts from when both the surface differs and the truth has its present value. What a document
does not have yet, the workflow is asked for. Tasks continue as new runs, and some run again. `FLOWKIT_SHOWN_TASKS=100`
runs that many tasks; differences that last longer than three seconds on the page, or five in the list, then fail the
test. `FLOWKIT_SHOWN_FIRST=24` begins with the 25th of them.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections import Counter, defaultdict
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from flowkit.local.ports import free_port
from tests.integration.chaos.operated import LargeDrawing, NativeOperatedDrawing, with_policy
from tests.integration.chaos.operators import Operator
from tests.integration.chaos.tasks import drawn_task
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually, wait_seconds
from tests.integration.page import engine_and_worker
from tests.integration.page.surfaces import PageReader, read_browser, read_truth
from tests.page.browser import open_browser, open_page

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from playwright.async_api import Browser
    from pytest import CaptureFixture

    from tests.integration.chaos.plans import TaskPlan
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

TASKS = int(os.environ.get("FLOWKIT_SHOWN_TASKS") or 100)
FIRST = int(os.environ.get("FLOWKIT_SHOWN_FIRST") or 0)
SEED = int(os.environ.get("FLOWKIT_SEED") or 58)
FEW = 2
OPEN = 2
"""More tasks at a time would measure how busy two cores are."""
SLOTS = 20
"""Attempts that the worker runs at once: nodes that stream wait for each other while they run."""
PAGE_SEC, LIST_SEC = 3.0, 5.0
BROWSED = 20
"""One of so many tasks is also watched in a browser."""
LARGE = 25
"""One of so many tasks has hundreds of nodes."""
_STEP_SEC = 0.5
_ENDED_SEC = 0.01
"""How far two readings of a time that stands may differ: stored dates have milliseconds."""
_OWN = ("status", "seconds", "total")


def plan_of(number: int) -> TaskPlan:
    """Return a task without external nodes, to which actions are sent."""
    large = number % LARGE == LARGE - 1
    plan = drawn_task(SEED, number, LargeDrawing if large else NativeOperatedDrawing)
    plan = with_policy(random.Random(f"{SEED}-{number}-shown"), plan)
    return replace(plan, task_id=f"shown-{SEED}-{number}")


class Differences:
    """How long the surfaces of one task have differed from the truth."""

    def __init__(self, limits: Mapping[str, float], longest: dict[str, float]) -> None:
        self._limits = limits
        self._longest = longest
        self._truth: dict[str, tuple[Any, float]] = {}
        """Each value of the truth, and since when it has been this one."""
        self._since: dict[tuple[str, str], float] = {}
        """Since when values differ, by surface and name."""
        self.problems: list[str] = []
        self.compared = 0

    def note_truth(self, truth: Mapping[str, Any], at: float) -> None:
        """Take a reading of the truth."""
        for name, value in truth.items():
            known = self._truth.get(name)
            if known is None or not _same(name, value, known[0], PAGE_SEC):
                self._truth[name] = (value, at)
            else:
                self._truth[name] = (value, known[1])

    def compare(self, surface: str, shown: Mapping[str, Any], truth: Mapping[str, Any], at: float) -> None:
        """Compare a surface, as it was at a time, with two equal readings of the truth around it."""
        for key in [each for each in self._since if each[0] == surface and each[1] not in truth]:
            del self._since[key]
        for name, value in truth.items():
            if name not in shown:
                continue
            self.compared += 1
            key = surface, name
            tolerance = _ENDED_SEC if truth["closed"] else PAGE_SEC
            if _same(name, shown[name], value, tolerance):
                self._since.pop(key, None)
                continue
            begun = max(self._since.setdefault(key, at), self._truth[name][1])
            lasted = at - begun
            self._longest[surface] = max(self._longest[surface], lasted)
            if lasted > self._limits[surface]:
                self.problems.append(f"{surface} shows {name} as {shown[name]} for {lasted:.1f} s: {value}")

    def pause(self, seconds: float) -> None:
        """Do not count a time in which this process, which is also that of the page, was starved."""
        self._truth = {name: (value, at + seconds) for name, (value, at) in self._truth.items()}
        self._since = {key: at + seconds for key, at in self._since.items()}

    @property
    def open(self) -> dict[tuple[str, str], float]:
        """What differs now."""
        return self._since


def _same(name: str, shown: Any, value: Any, tolerance: float) -> bool:
    is_time = name in ("seconds", "total") or name.endswith(":seconds")
    if is_time and shown is not None and value is not None:
        return bool(abs(shown - value) <= tolerance)
    return bool(shown == value)


def expected_of(truth: Mapping[str, Any]) -> dict[str, Any]:
    """Return the truth with what the timeline shows: the latest attempt of each node that has begun one."""
    latest: dict[str, Any] = {}
    for name, value in truth.items():
        if name.endswith(":seconds") and value is not None:
            node = name.removesuffix(":seconds")
            _, attempt = truth[f"{node}:state"]
            latest |= {f"{node}:attempt": attempt, f"{node}:{attempt}:seconds": value}
    return {**truth, **latest}


class Watch:
    """Operates one task, and compares its surfaces until it has ended."""

    def __init__(self, checker: Checker, plan: TaskPlan, number: int) -> None:
        self._checker = checker
        self._plan = plan
        self._number = number
        self._chance = random.Random(f"{SEED}-{number}-watch")
        self.differences = Differences(checker.limits, checker.longest)
        self._last = 0.0

    async def run(self) -> list[str]:
        """Return what differed for too long, or still differs at the end."""
        harness, plan = self._checker.harness, self._plan
        await harness.coordinator.create_task(params={}, graph=plan.as_graph(), task_id=plan.task_id)
        handle = (await harness.client()).get_workflow_handle(plan.task_id)
        await harness.until_status(plan.task_id, "queued", "running", "deferred", "finished", "failed")
        operator = Operator(plan, random.Random(f"{plan.task_id}-actions"), handle, harness)
        reader = PageReader(self._checker.client, self._checker.base, plan.task_id)
        async with AsyncExitStack() as stack:
            following = asyncio.create_task(reader.follow())
            stack.callback(following.cancel)
            page = None
            if self._number % BROWSED == 0 and self._checker.browser is not None:
                page = await stack.enter_async_context(open_page(self._checker.browser))
                await page.goto(f"{self._checker.base}/?task={plan.task_id}&view=list")
            operating = asyncio.create_task(self._operate(operator))
            stack.callback(operating.cancel)
            step = 0
            has_ended = False
            while not has_ended or (self.differences.open and not self._is_stuck()):
                has_ended = operating.done()
                await self._step(reader, handle, page, step)
                step += 1
                await wait_seconds(_STEP_SEC)
            await operating
            await self._compare_ends(reader)
        open_ = [f"at the end, {surface} differs in {name}" for surface, name in self.differences.open]
        return [f"{plan.task_id}: {each}" for each in [*self.differences.problems[:5], *open_]]

    def _is_stuck(self) -> bool:
        return any(time.monotonic() - since > EVENT_TIMEOUT_SEC for since in self.differences.open.values())

    async def _operate(self, operator: Operator) -> None:
        """Send actions until the task has ended, then perhaps run it again, once."""
        again = self._chance.random() < 0.4
        while True:
            document = await self._checker.harness.document(self._plan.task_id)
            if document["finished_at"] is None:
                await operator.act()
            elif again:
                again = False
                if await operator.rerun([self._chance.choice(self._plan.nodes).node_id]):
                    await eventually(partial(self._runs_again, document.get("run_seq")))
            else:
                return
            await wait_seconds(operator.pause)

    async def _runs_again(self, run_seq: int | None) -> bool:
        document = await self._checker.harness.document(self._plan.task_id)
        return bool(document.get("run_seq") != run_seq)

    async def _step(self, reader: PageReader, handle: Any, page: Any, step: int) -> None:
        begun = time.monotonic()
        if self._last and (starved := begun - self._last - 2 * _STEP_SEC) > 0:
            self.differences.pause(starved)
            self._checker.starved += starved
        self._last = begun
        ask = bool(self.differences.open)
        look = partial(read_truth, self._checker.harness.db, handle, self._plan.task_id, ask=ask)
        before, at = await look(), time.monotonic()
        self.differences.note_truth(before, at)
        shown = [reader.head_and_nodes(), await reader.list_line()]
        if step % 3 == 0 or self.differences.open or before["closed"]:
            shown += [await reader.explanation(time.time() - 1), await reader.timeline()]
        if page is not None and await page.locator("table.nodes tbody tr").count():
            shown.append(await read_browser(page))
        after = expected_of(await look())
        self.differences.note_truth(after, time.monotonic())
        same = {
            name: value
            for name, value in after.items()
            if name not in before or _same(name, value, before[name], PAGE_SEC)
        }
        same["closed"] = before["closed"] and after["closed"]
        for surfaces in shown:
            for surface, values in surfaces.items():
                self.differences.compare(surface, values, same, at)

    async def _compare_ends(self, reader: PageReader) -> None:
        """Compare the numbers of all surfaces exactly, and the attempts with those of Temporal's histories."""
        since = time.time()
        explained = (await eventually(lambda: reader.explanation(since)))["explain"]
        head = reader.head_and_nodes()["head"]
        listed = (await reader.list_line())["list"]
        for name in _OWN:
            if not listed[name] == explained[name] == head[name]:
                values = listed[name], explained[name], head[name]
                self.differences.problems.append(f"list, Explain and head show {name} as {values}")
        (attempts,) = await eventually(lambda: reader.attempts(since))
        shown = {(each["node_id"], each["attempt"]) for each in attempts}
        recorded = await self._recorded()
        if missing := recorded - shown:
            self.differences.problems.append(f"the timeline lacks {missing}")

    async def _recorded(self) -> set[tuple[str, int]]:
        """Return the attempts that Temporal has scheduled, in all runs."""
        client, run_id, found = await self._checker.harness.client(), None, set[tuple[str, int]]()
        while run_id != "":
            handle = client.get_workflow_handle(self._plan.task_id, run_id=run_id)
            events = (await handle.fetch_history()).events
            for event in events:
                name, _, epoch = event.activity_task_scheduled_event_attributes.activity_id.rpartition(".")
                found |= {(name, int(epoch))} if name and epoch.isdecimal() else set()
            run_id = events[0].workflow_execution_started_event_attributes.continued_execution_run_id
        return found


class Checker:
    """Runs random tasks beside a page server, and compares what it shows."""

    def __init__(
        self,
        harness: Harness,
        client: aiohttp.ClientSession,
        base: str,
        browser: Browser | None,
        limits: Mapping[str, float],
        show: Callable[..., None],
    ) -> None:
        self.harness = harness
        self.client = client
        self.base = base
        self.browser = browser
        self.limits = limits
        self.show = show
        self.longest: dict[str, float] = defaultdict(float)
        self.tasks = 0
        self.starved = 0.0
        self.compared = 0
        self.nodes = 0
        self.statuses: Counter[str] = Counter()

    async def run(self, tasks: int) -> list[str]:
        """Return the problems of this many tasks."""
        slots = asyncio.Semaphore(OPEN)

        async def one(number: int) -> list[str]:
            async with slots:
                plan = plan_of(number)
                watch = Watch(self, plan, number)
                problems = await watch.run()
                self.tasks += 1
                self.compared += watch.differences.compared
                self.nodes += len(plan.nodes)
                self.statuses[(await self.harness.document(plan.task_id))["status"]] += 1
                self.show(f"{self.tasks} tasks: {self}", *problems)
                return problems

        ends = await asyncio.gather(*map(one, range(FIRST, FIRST + tasks)), return_exceptions=True)
        found = [
            [f"task {at}: {end!r}"] if isinstance(end, BaseException) else end for at, end in enumerate(ends)
        ]
        return [each for some in found for each in some]

    def __str__(self) -> str:
        longest = ", ".join(f"{surface} {seconds:.1f} s" for surface, seconds in sorted(self.longest.items()))
        figures = f"{dict(self.statuses)}, {self.nodes} nodes, {self.compared:,} comparisons"
        return f"{figures}, {self.starved:.0f} s starved; longest differences: {longest}"


def show(capsys: CaptureFixture[str], *lines: str) -> None:
    """Print lines, even when the test passes."""
    with capsys.disabled():
        sys.stdout.write("".join(f"\n  {each}" for each in lines))
        sys.stdout.flush()


@pytest.mark.slow(30)
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize(
    ("tasks", "page_sec", "list_sec"),
    [
        pytest.param(FEW, EVENT_TIMEOUT_SEC, EVENT_TIMEOUT_SEC, id="few", marks=pytest.mark.nightly),
        pytest.param(TASKS, PAGE_SEC, LIST_SEC, id="many", marks=pytest.mark.nightly),
    ],
)
async def test_the_page_shows_what_documents_and_histories_say(
    short_runs: Harness,
    capsys: CaptureFixture[str],
    tasks: int,
    page_sec: float,
    list_sec: float,
) -> None:
    port = str(free_port())
    short_runs.process(str(SLOTS), short_runs.config_json(), module=engine_and_worker.__name__)
    page = short_runs.process("ui", "--port", port)
    limits = defaultdict(lambda: page_sec, list=list_sec)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)))
        browser = await stack.enter_async_context(open_browser())
        address = f"http://127.0.0.1:{port}"
        await eventually(partial(_answers, session, address))
        checker = Checker(short_runs, session, address, browser, limits, partial(show, capsys))
        problems = await checker.run(tasks)
    assert page.poll() is None, "the page's server has ended"
    assert not problems, "\n".join(problems)


async def _answers(session: aiohttp.ClientSession, address: str) -> bool:
    try:
        async with session.get(address) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False
