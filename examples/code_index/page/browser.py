"""Load a page in a headless browser: what it draws, logs, and requests from the network."""

from __future__ import annotations

import html
import json
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from code_index.errors import DemoError
from flowkit.pictures.programs import BROWSERS, find_browser

if TYPE_CHECKING:
    from collections.abc import Sequence

TIMEOUT_SEC = 120.0
_VIRTUAL_TIME_MS = 20_000
"""Virtual time of the page, which advances as fast as the page is idle."""

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",
    f"--virtual-time-budget={_VIRTUAL_TIME_MS}",
)
_FRAMED = '<!doctype html><body style="margin:0"><iframe src="{}" style="border:0;width:100%;height:100vh"></iframe>'
_CONSOLE = re.compile(r'CONSOLE[^"]*"(.*)", source:')
_BROWSER_ITSELF = "not an origin"
"""The initiator of requests that the browser itself makes."""
_SCHEMES = ("http:", "https:", "ws:", "wss:", "ftp:")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLoad:
    """What a page has drawn, logged and requested."""

    dom: str
    """The document after its scripts ran."""
    console: list[str]
    """Messages of scripts and of the browser in the page's console."""
    requests: list[str]
    """URLs that the page requested, without requests of the browser itself."""


def load_page(page: Path) -> PageLoad:
    """Load a page and wait until it is drawn."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "network.json")
        ended = _run(page, folder, ["--dump-dom", f"--log-net-log={log}"])
        return PageLoad(dom=ended.stdout, console=_CONSOLE.findall(ended.stderr), requests=_requests(log))


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewport:
    """The window of a screenshot."""

    width: int
    height: int
    section: str = ""
    """The id of the element at the top of the window."""
    dark: bool = False


def take_screenshot(page: Path, file: Path, viewport: Viewport) -> None:
    """Save a screenshot of a page as PNG."""
    options = [f"--screenshot={file.resolve()}", f"--window-size={viewport.width},{viewport.height}"]
    if viewport.dark:
        options.append("--blink-settings=preferredColorScheme=0")
    with tempfile.TemporaryDirectory() as folder:
        # A headless browser ignores the fragment of a page, but not that of a frame in it.
        framed = Path(folder, "framed.html")
        framed.write_text(_FRAMED.format(html.escape(f"{page.resolve().as_uri()}#{viewport.section}")))
        _run(framed, folder, options)


def _run(
    page: Path, folder: str, options: Sequence[str], fragment: str = ""
) -> subprocess.CompletedProcess[str]:
    browser = find_browser()
    if browser is None:
        raise DemoError(f"there is no browser on PATH; install one of: {', '.join(BROWSERS)}")
    profile = f"--user-data-dir={Path(folder, 'profile')}"
    command = [browser, *_FLAGS, profile, *options, page.resolve().as_uri()]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SEC, check=True)
    except subprocess.TimeoutExpired:
        raise DemoError(f"{browser} did not render {page} within {TIMEOUT_SEC:.0f} s") from None
    except subprocess.CalledProcessError as error:
        raise DemoError(f"{browser} exited with code {error.returncode}: {error.stderr[-500:]}") from None


def _requests(log: Path) -> list[str]:
    """Return the URLs that a page has requested, from the browser's network log."""
    events = json.loads(log.read_text(encoding="utf-8"))["events"]
    started = [params for event in events if "initiator" in (params := event.get("params", {}))]
    urls = {str(params.get("url", "")) for params in started if params["initiator"] != _BROWSER_ITSELF}
    return sorted(url for url in urls if url.startswith(_SCHEMES))
