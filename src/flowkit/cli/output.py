"""Output of commands: results go to stdout, log lines and everything else to stderr; `--json` prints one
document to stdout."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderHook
from rich.segment import Segment
from rich.text import Text

from flowkit.core import log
from flowkit.text import clean, visible

if TYPE_CHECKING:
    from rich.console import ConsoleOptions, ConsoleRenderable, RenderResult

    from flowkit.products import ProcessMetrics


class Visible:
    """Renders something with the control and bidirectional characters of its text escaped, but not its own styles."""

    def __init__(self, shown: ConsoleRenderable) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Escape the text of each segment."""
        for segment in console.render(self._shown, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


class _AllVisible(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [Visible(each) for each in renderables]


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints text without markup or emoji names, and escapes control characters.

    A live display must wrap what it shows in `Visible` itself. Without a terminal, the console is 1,000
    columns wide, so that lines do not wrap.
    """
    made = Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
    made.push_render_hook(_AllVisible())
    if not made.is_terminal:
        made.width = 1000
    return made


def echo(text: str | Text) -> None:
    """Print a line of the result to stdout."""
    console().print(_clean(text))


def note(text: str) -> None:
    """Print an additional line to stderr."""
    console(stderr=True).print(_clean(text))


def error(text: str) -> None:
    """Print an error to stderr."""
    console(stderr=True).print(Text.assemble(("flowkit:", "red"), " ", clean(text)))


def warn(text: str) -> None:
    """Print a warning to stderr."""
    console(stderr=True).print(Text.assemble(("warning:", "yellow"), " ", clean(text)))


def document(value: dict[str, Any]) -> None:
    """Print the JSON document of a command."""
    sys.stdout.write(visible(clean(json.dumps(value, indent=2, ensure_ascii=False, default=str))) + "\n")


def _clean(text: str | Text) -> str | Text:
    return clean(text) if isinstance(text, str) else text


def log_processes(verbose: bool) -> None:
    """Configure logging for an engine or another process: lines with time and logger name.

    `FLOWKIT_LOG_FORMAT` chooses text or JSON, `FLOWKIT_LOG_LEVEL` another level. Raise ConfigError if one is invalid.
    """
    level = log.read_level(logging.INFO if verbose else logging.WARNING)
    if log.read_format() == "json":
        log.log_what_python_prints()
    _configure(level, log.process_formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))


def log_warnings(verbose: bool) -> None:
    """Configure logging for a short command: warnings of FlowKit's client, but only errors from libraries."""
    level = logging.INFO if verbose else logging.ERROR
    _configure(level, log.TextLayout("%(levelname)s %(name)s: %(message)s"))
    handler = _create_handler(log.TextLayout("warning: %(message)s"))
    logger = logging.getLogger("flowkit.client")
    logger.setLevel(logging.WARNING)
    logger.addHandler(handler)
    logger.propagate = False


class _CoreFields(logging.Filter):
    """Appends the fields of a line of Temporal's Rust core to its text."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record, and keep it."""
        core = getattr(record, "temporal_log", None)
        if core is not None and core.fields:
            shown = ", ".join(f"{name}={value}" for name, value in core.fields.items())
            record.msg = f"{record.msg} ({shown})"
        return True


_core_logger = logging.getLogger("temporalio.core")


def forward_core_log(metrics: ProcessMetrics | None = None) -> None:
    """Let Temporal's Rust core log like Python code, instead of writing to the console in its own format.

    Its numbers become part of `metrics`. Call this before the first connection. Do nothing if the process has a
    runtime already, such as one that the user's module has set.
    """
    from temporalio.runtime import (
        LogForwardingConfig,
        LoggingConfig,
        Runtime,
        TelemetryConfig,
        TelemetryFilter,
    )

    if any(isinstance(each, _CoreFields) for each in _core_logger.filters):
        return
    _core_logger.addFilter(_CoreFields())
    forwarding = LogForwardingConfig(
        _core_logger,
        append_target_to_name=False,
        prepend_target_on_message=False,
        append_log_fields_to_message=False,
    )
    levels = TelemetryFilter(core_level="WARN", other_level="ERROR")
    logs = LoggingConfig(filter=levels, forwarding=forwarding)
    with suppress(RuntimeError):
        Runtime.set_default(
            metrics.create_runtime(logs) if metrics else Runtime(telemetry=TelemetryConfig(logging=logs))
        )


def _configure(level: int, formatter: logging.Formatter) -> None:
    """Log to stderr. The handler has the level, too: kept lines of handlers may lower that of the root logger."""
    handler = _create_handler(formatter)
    handler.setLevel(level)
    logging.basicConfig(level=level, handlers=[handler])


def _create_handler(formatter: logging.Formatter) -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    handler.addFilter(log.is_for_people)
    return handler
