"""A headless Chromium for tests of the page."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest

from flowkit.pictures.programs import find_browser
from tests.integration.harness import EVENT_TIMEOUT_SEC

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from playwright.async_api import Browser, Page

    from flowkit.page.process import PageProcess

ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-sync")
TIMEOUT_MS = EVENT_TIMEOUT_SEC * 1000
AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text()


@asynccontextmanager
async def open_browser() -> AsyncIterator[Browser]:
    """Start a headless Chromium. Skip the test, with a notice, where there is none."""
    playwright = pytest.importorskip("playwright.async_api", reason="Playwright is not installed")
    program = find_browser()
    if program is None:
        pytest.skip("there is no Chromium on PATH; install one (Debian: apt-get install chromium)")
    playwright.expect.set_options(timeout=TIMEOUT_MS)
    async with playwright.async_playwright() as driver:
        chromium = await driver.chromium.launch(executable_path=program, args=list(ARGUMENTS))
        try:
            yield chromium
        finally:
            await chromium.close()


@asynccontextmanager
async def open_page(browser: Browser) -> AsyncIterator[Page]:
    """Open a page. Fail the test if a script fails or the content security policy refuses anything."""
    opened = await browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme="light")
    opened.set_default_timeout(TIMEOUT_MS)
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on(
        "console", lambda line: problems.append(line.text) if "Content Security Policy" in line.text else None
    )
    yield opened
    await opened.close()
    assert not problems


def expect(target: Any) -> Any:
    """Return Playwright's assertions about a page or a part of it, which wait until they hold."""
    from playwright.async_api import expect as expectation

    return expectation(target)


def address(process: PageProcess, **query: str) -> str:
    """Return the address of a page."""
    return f"http://127.0.0.1:{process.ports[0]}/?{urlencode(query)}"


def box(page: Page, name: str) -> Any:
    """Return the node with this id in the graph."""
    return page.locator(f'svg.graph g.node[aria-label^="{name},"]')


async def serious(page: Page) -> list[str]:
    """Return what axe-core finds that is serious."""
    await page.evaluate(AXE)
    found = await page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['id']}: {[one['html'][:120] for one in each['nodes'][:3]]}"
        for each in found["violations"]
        if each["impact"] in {"serious", "critical"}
    ]
