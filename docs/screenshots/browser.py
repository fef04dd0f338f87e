"""Open pages of Temporal's Web UI in a headless Chromium and take screenshots."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from playwright.async_api import async_playwright, expect

from flowkit.pictures.programs import find_browser

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from playwright.async_api import Page

WIDTH, HEIGHT = 1400, 900
NAMESPACE = "default"
_TIMEOUT_MS = 30_000
_ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
_COLUMNS_OUT = ("Run ID", "Type")
_COLUMNS_IN = ("FlowkitPipeline", "FlowkitStatus")


class NoChromium(Exception):
    """There is no Chromium on PATH; install one (Debian: apt-get install chromium)."""


class WebUI:
    """Pages of the Web UI at one address."""

    def __init__(self, page: Page, url: str, folder: Path) -> None:
        self._page = page
        self._home = f"{url}/namespaces/{NAMESPACE}"
        self._folder = folder

    async def tasks(self, picture: str, task_ids: Sequence[str]) -> None:
        """Save the list of workflows, with FlowKit's search attributes as columns."""
        page = self._page
        await page.goto(f"{self._home}/workflows")
        for task_id in task_ids:
            await page.get_by_role("link", name=task_id).wait_for()
        await page.get_by_role("button", name="Collapse saved views").click()
        await page.get_by_test_id("workflows-summary-table-configuration-button").click()
        for column in _COLUMNS_OUT:
            await page.get_by_role("button", name=f"Remove {column} column").click()
        for column in _COLUMNS_IN:
            await page.get_by_role("button", name=f"Add {column} column").click()
        await page.get_by_role("button", name="Close Workflows Table configuration").click()
        await expect(page.get_by_role("columnheader", name=_COLUMNS_IN[-1])).to_be_visible()
        await expect(page.get_by_role("cell", name="deferred")).to_be_visible()
        await self._save(picture, HEIGHT)

    async def details(self, picture: str, task_id: str, expected: str) -> None:
        """Save the tab User Metadata once its current details contain `expected`."""
        page = self._page
        await self._open(task_id)
        await page.get_by_role("tab", name="User Metadata").click()
        details = page.frame_locator('iframe[src*="attempt"]')
        await expect(details.get_by_role("table")).to_be_visible()
        await expect(details.get_by_text(expected).first).to_be_visible()
        await self._save(picture, HEIGHT)

    async def timeline(self, picture: str, task_id: str, expected: str) -> None:
        """Save the tab History down to the end of its timeline, once the timeline contains `expected`."""
        page = self._page
        await self._open(task_id)
        await expect(page.get_by_text(expected).first).to_be_visible()
        await page.get_by_role("button", name="Minimized").click()
        await page.mouse.move(WIDTH / 2, 20)
        await expect(page.get_by_role("tooltip")).to_have_count(0)
        below = await page.get_by_text("Compact", exact=True).bounding_box()
        await self._save(picture, int(below["y"]) - 20 if below else HEIGHT)

    async def update(self, picture: str, task_id: str, name: str, given: str) -> None:
        """Send an update by the dialog of the Web UI. Save the dialog before.

        `given` is indented JSON. The dialog formats other JSON when it loses the focus, and grows.
        """
        page = self._page
        await self._open(task_id)
        await page.get_by_role("button", name="More Actions").click()
        await page.get_by_role("menuitem", name="Send an Update").click()
        dialog = page.get_by_role("dialog").locator("visible=true")
        await dialog.locator("button[aria-controls=update-select-select]").click()
        await dialog.get_by_role("option", name=name).click()
        await dialog.locator(".cm-content").fill(given)
        await self._save(picture, HEIGHT)
        await dialog.get_by_role("button", name="Submit").click()
        await expect(dialog).to_have_count(0)

    async def queue(self, picture: str, queue: str, expected: str) -> None:
        """Save the page of a task queue once it contains `expected`."""
        await self._page.goto(f"{self._home}/task-queues/{queue}")
        await expect(self._page.get_by_text(expected)).to_be_visible()
        await self._save(picture, HEIGHT // 2)

    async def _open(self, task_id: str) -> None:
        await self._page.goto(f"{self._home}/workflows/{task_id}")
        await expect(self._page.get_by_role("heading", name="Event History")).to_be_visible()

    async def _save(self, picture: str, height: int) -> None:
        page = self._page
        await page.set_viewport_size({"width": WIDTH, "height": max(height, HEIGHT)})
        await page.evaluate("() => document.fonts.ready")
        path = self._folder / f"webui-{picture}.png"
        await page.screenshot(
            path=path, clip={"x": 0, "y": 0, "width": WIDTH, "height": height}, animations="disabled"
        )
        await page.set_viewport_size({"width": WIDTH, "height": HEIGHT})


@asynccontextmanager
async def open_page() -> AsyncIterator[Page]:
    """Open an empty page; raises NoChromium without a browser."""
    program = find_browser()
    if program is None:
        raise NoChromium(NoChromium.__doc__)
    async with async_playwright() as driver:
        chromium = await driver.chromium.launch(executable_path=program, args=list(_ARGUMENTS))
        try:
            page = await chromium.new_page(
                viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light", timezone_id="UTC"
            )
            page.set_default_timeout(_TIMEOUT_MS)
            expect.set_options(timeout=_TIMEOUT_MS)
            yield page
        finally:
            await chromium.close()


@asynccontextmanager
async def web_ui(url: str, folder: Path) -> AsyncIterator[WebUI]:
    """Open the Web UI at `url` and save screenshots to `folder`; raises NoChromium without a browser."""
    async with open_page() as page:
        yield WebUI(page, url, folder)
