"""A page server beside the real servers, and a headless Chromium that opens its pages."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.adapters.tasks.store import TaskStore
from flowkit.client import TaskCatalog, TaskClient
from flowkit.page.process import PageProcess, PageSettings
from flowkit.reading.state import Servers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from playwright.async_api import Browser, Page

    from tests.integration.harness import Harness

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-sync")
TIMEOUT_MS = 60_000

StartPage = "Callable[..., Awaitable[PageProcess]]"


@pytest.fixture
async def servers(harness: Harness) -> Servers:
    """The clients of a page server."""
    client = await harness.client()
    tasks = TaskClient(client, TaskStore(harness.db), queue=harness.queue, any_queue=True)
    return Servers(temporal=client, tasks=tasks, catalog=TaskCatalog(harness.db), db=harness.db)


@pytest.fixture
async def start_page(servers: Servers) -> AsyncIterator[Callable[..., Awaitable[PageProcess]]]:
    """Start page servers, which stop after the test."""
    started: list[PageProcess] = []

    async def start(port: int = 0, **settings: Any) -> PageProcess:
        process = PageProcess(servers, PageSettings(addresses=[("127.0.0.1", port)], **settings))
        await process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        await process.stop()


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    """A headless Chromium. Skip the test, with a notice, where there is none."""
    playwright = pytest.importorskip("playwright.async_api", reason="Playwright is not installed")
    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("there is no Chromium on PATH; install one (Debian: apt-get install chromium)")
    async with playwright.async_playwright() as driver:
        chromium = await driver.chromium.launch(executable_path=program, args=list(ARGUMENTS))
        try:
            yield chromium
        finally:
            await chromium.close()


@pytest.fixture
async def page(browser: Browser) -> AsyncIterator[Page]:
    """A page of the browser. Fail the test if a script fails or the content security policy refuses anything."""
    opened = await browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme="light")
    opened.set_default_timeout(TIMEOUT_MS)
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on(
        "console", lambda line: problems.append(line.text) if "Content Security Policy" in line.text else None
    )
    yield opened
    assert not problems
