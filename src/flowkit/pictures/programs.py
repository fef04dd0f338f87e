"""Draws DOT as SVG or PNG with an installed program: Graphviz, or Chromium with a Graphviz in WebAssembly."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from math import ceil, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from flowkit import products
from flowkit.errors import ConfigError
from flowkit.text import one_line, truncate

if TYPE_CHECKING:
    from collections.abc import Sequence

GRAPHVIZ: Final = "dot"
BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome", "chrome")
TIMEOUT_SEC: Final = 300.0
_MOST_PIXELS: Final = 12_000
"""Longest side of a picture that browsers draw."""
_MOST_AREA: Final = 4e7
"""Pixels of a picture that a browser draws in seconds."""
_FLAGS: Final = (
    "--headless",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--allow-file-access-from-files",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
_LAYOUT: Final = """<!doctype html><meta charset="utf-8"><pre id="out"></pre>
<script id="dot" type="application/json">{dot}</script>
<script type="module">
  import {{ Graphviz }} from "{module}";
  // The browser prints the page once its scripts have run, without what another thread compiles.
  WebAssembly.instantiate = async (bytes, imports) => {{
    const module = new WebAssembly.Module(bytes);
    return {{ module, instance: new WebAssembly.Instance(module, imports) }};
  }};
  const out = document.getElementById("out");
  const dot = JSON.parse(document.getElementById("dot").textContent);
  Graphviz.load().then(
    (graphviz) => {{ out.textContent = graphviz.layout(dot, "svg", "dot"); }},
  ).catch((error) => {{ out.textContent = `error: ${{error}}`; }});
</script>"""
_SHOWN: Final = """<!doctype html><meta charset="utf-8">
<style>body {{ margin: 0 }} svg {{ display: block; width: {width}px; height: {height}px }}</style>
{svg}"""
_OUT: Final = re.compile(r'<pre id="out">(.*?)</pre>', re.DOTALL)
_SIZE: Final = re.compile(r'<svg width="(\d+(?:\.\d+)?)pt" height="(\d+(?:\.\d+)?)pt"')
_PIXELS_PER_POINT: Final = 4 / 3
_REPAIR: Final = "repair or remove it, or use the format dot, mermaid or text"

Kind = Literal["svg", "png"]


def render(dot: str, kind: Kind) -> bytes:
    """Return a file with the picture. Raise ConfigError if no program can draw it, or if it fails."""
    if program := shutil.which(GRAPHVIZ):
        return _require(_run([program, f"-T{kind}"], dot.encode()), program)
    browser, module = find_browser(), products.graphviz()
    if browser is None or module is None:
        raise ConfigError(_describe_missing(kind, browser))
    with tempfile.TemporaryDirectory(prefix="flowkit-", ignore_cleanup_errors=True) as folder:
        svg = _lay_out(browser, module, dot, Path(folder))
        return svg.encode() if kind == "svg" else _take_picture(browser, svg, Path(folder))


def find_browser() -> str | None:
    """Return a browser of the Chromium family on PATH; None if there is none."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def _describe_missing(kind: Kind, browser: str | None) -> str:
    lacks = (
        f"neither Graphviz ({GRAPHVIZ}) nor Chromium ({', '.join(BROWSERS)}) is on PATH"
        if browser is None
        else f"Graphviz ({GRAPHVIZ}) is not on PATH, and {browser} needs the files of FlowKit's page, which are missing"
    )
    return f"format {kind}: {lacks}; install one of them, or use the format mermaid, dot or text, which need neither"


def _run(command: Sequence[str], given: bytes = b"") -> bytes:
    """Return what a program prints. Raise ConfigError if it fails. Nothing that it has started stays."""
    try:
        started = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(f"{command[0]} does not start: {one_line(error)}; repair or remove it") from None
    with started:
        try:
            printed, errors = started.communicate(given, timeout=TIMEOUT_SEC)
        except subprocess.TimeoutExpired:
            problem = f"{command[0]} drew nothing within {TIMEOUT_SEC:.0f} s"
            raise ConfigError(f"{problem}; use the format dot, mermaid or text") from None
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(started.pid, signal.SIGKILL)
    if started.returncode:
        said = truncate(one_line(errors.decode(errors="replace")), 300)
        raise ConfigError(
            f"{command[0]} {_describe_end(started.returncode)}{said and f': {said}'}; {_REPAIR}"
        )
    return printed


def _describe_end(code: int) -> str:
    return f"failed with code {code}" if code > 0 else f"was killed by signal {-code}"


def _require(drawn: bytes, program: str, said: str = "") -> bytes:
    """Return a drawn file. Raise ConfigError if it is empty: the program has failed without an error code."""
    if not drawn:
        found = truncate(one_line(said), 300)
        raise ConfigError(f"{program} drew nothing{found and f': {found}'}; {_REPAIR}")
    return drawn


def _browse(browser: str, page: Path, *options: str) -> bytes:
    """Let the browser load a page. Its sandbox does not work for root."""
    profile = f"--user-data-dir={page.parent / 'profile'}"
    sandbox = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    return _run([browser, *_FLAGS, *sandbox, profile, *options, page.as_uri()])


def _lay_out(browser: str, module: Path, dot: str, folder: Path) -> str:
    page = folder / "layout.html"
    escaped = json.dumps(dot).replace("<", "\\u003c")
    page.write_text(_LAYOUT.format(dot=escaped, module=module.resolve().as_uri()), encoding="utf-8")
    dom = _browse(browser, page, "--dump-dom").decode(errors="replace")
    found = _OUT.search(dom)
    svg = html.unescape(found[1]) if found else ""
    _require(svg.encode() if _SIZE.search(svg) else b"", browser, svg or dom)
    return svg


def _take_picture(browser: str, svg: str, folder: Path) -> bytes:
    size = _SIZE.search(svg)
    assert size is not None
    width, height = (ceil(float(each) * _PIXELS_PER_POINT) for each in size.groups())
    scale = min(2.0, _MOST_PIXELS / max(width, height), sqrt(_MOST_AREA / (width * height)))
    page, picture = folder / "picture.html", folder / "picture.png"
    page.write_text(_SHOWN.format(width=width, height=height, svg=svg[svg.index("<svg") :]), encoding="utf-8")
    window = f"--window-size={width},{height}"
    _browse(browser, page, f"--screenshot={picture}", window, f"--force-device-scale-factor={scale:.4f}")
    return _require(picture.read_bytes() if picture.exists() else b"", browser)
