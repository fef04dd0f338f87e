"""A page in a browser without a window: what it draws, what it complains of, what it asks the network for."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from code_index.errors import DemoError

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")

WITHIN_SEC = 120.0
_DRAWN_MS = 20_000
"""Time of the page, which runs as fast as the page is idle."""

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
    f"--virtual-time-budget={_DRAWN_MS}",
)
_FRAMED = '<!doctype html><body style="margin:0"><iframe src="{}" style="border:0;width:100%;height:100vh"></iframe>'
_CONSOLE = re.compile(r'CONSOLE[^"]*"(.*)", source:')
_THE_BROWSER = "not an origin"
"""Who asks when no page does."""
_SCHEMES = ("http:", "https:", "ws:", "wss:", "ftp:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What was seen of a page."""

    dom: str
    """The document after its scripts have run."""
    console: list[str]
    """What scripts and the browser itself wrote to the page's console."""
    requests: list[str]
    """Addresses that the page wanted from a network; what the browser asks for itself is not among them."""


def find_browser() -> str | None:
    """A browser of Chromium's kind on PATH."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


def visit(page: Path) -> Visit:
    """Open a page and wait until it is drawn."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "network.json")
        ended = _run(page, folder, ["--dump-dom", f"--log-net-log={log}"])
        return Visit(dom=ended.stdout, console=_CONSOLE.findall(ended.stderr), requests=_requests(log))


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What somebody looks at a page through."""

    width: int
    height: int
    section: str = ""
    """The id of the element at its top."""
    dark: bool = False


def take_picture(page: Path, picture: Path, window: Window) -> None:
    """Save what a window shows of a page, as PNG."""
    options = [f"--screenshot={picture.resolve()}", f"--window-size={window.width},{window.height}"]
    if window.dark:
        options.append("--blink-settings=preferredColorScheme=0")
    with tempfile.TemporaryDirectory() as folder:
        # A browser without a window takes its picture from the top of a page, but not from that of a frame in it.
        framed = Path(folder, "framed.html")
        framed.write_text(_FRAMED.format(html.escape(f"{page.resolve().as_uri()}#{window.section}")))
        _run(framed, folder, options)


def _run(
    page: Path, folder: str, options: Sequence[str], fragment: str = ""
) -> subprocess.CompletedProcess[str]:
    browser = find_browser()
    if browser is None:
        raise DemoError(f"there is no browser on PATH; install one of {', '.join(PROGRAMS)}")
    profile = f"--user-data-dir={Path(folder, 'profile')}"
    command = [browser, *_FLAGS, profile, *options, page.resolve().as_uri()]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_SEC, check=True)
    except subprocess.TimeoutExpired:
        raise DemoError(f"{browser} has not drawn {page} within {WITHIN_SEC:.0f} s") from None
    except subprocess.CalledProcessError as error:
        raise DemoError(f"{browser} ended with code {error.returncode}: {error.stderr[-500:]}") from None


def _requests(log: Path) -> list[str]:
    """The addresses in the browser's own log of its network that a page has asked for."""
    events = json.loads(log.read_text(encoding="utf-8"))["events"]
    started = [params for event in events if "initiator" in (params := event.get("params", {}))]
    urls = {str(params.get("url", "")) for params in started if params["initiator"] != _THE_BROWSER}
    return sorted(url for url in urls if url.startswith(_SCHEMES))
