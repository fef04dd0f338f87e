"""What products add to the core: commands, processes, tasks that start later, what follows the end of a task, metrics,
kept log lines, Graphviz.

A product names its record in the entry points `flowkit.products` of its distribution, so the core imports none of
them and works without them. Loading a record is cheap: it imports the code behind it only when that is called.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Protocol

from flowkit.core.handler_lines import LineSinks
from flowkit.errors import ConfigError, FlowKitError
from flowkit.models import CloseTask

if TYPE_CHECKING:
    from pathlib import Path

    import typer
    from temporalio.runtime import LoggingConfig, Runtime

    from flowkit.adapters.mongo import Database
    from flowkit.attempt.background import LoopHealth
    from flowkit.config import KeptLogs
    from flowkit.models.admission import Admission

_logger = logging.getLogger("flowkit.products")

GROUP: Final = "flowkit.products"
EXTRAS: Final[Mapping[str, str]] = {
    "admission": "admission",
    "gateway": "gateway",
    "token": "server",
    "ui": "page",
}
"""The commands of FlowKit's own products, and the extra that installs each."""

OnClosed = Callable[[CloseTask], Awaitable[None]]
"""Called after the end of a task is in its document. A retryable error, or one that is none of FlowKit's, lets Temporal
try the close again; another one is logged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingTask:
    """A task that was submitted to a product, as the product knows it."""

    product: str
    state: str
    """A word of the product, such as `queued`."""
    text: str
    """One line about it, for people."""
    fields: Mapping[str, Any]
    """All that the product knows about it, as JSON values."""
    started: bool
    """Whether the product has started it, and its end is not known yet."""
    error: FlowKitError | None = None
    """How it has ended, for a task that never ran; None before its end."""

    @property
    def decided(self) -> bool:
        """Whether the task no longer waits."""
        return self.started or self.error is not None


class Submissions(Protocol):
    """A product that starts tasks later."""

    async def submit(self, admission: Admission, task_id: str, given: dict[str, Any]) -> None:
        """Accept a task with valid graph and params.

        Raise AdmissionRejected, TaskIdTaken, ConfigError, StoreUnavailable.
        """

    async def find(self, task_id: str) -> PendingTask | None:
        """Return a submitted task; None if it was not submitted. Raise StoreUnavailable."""

    async def cancel(self, task_id: str, reason: str) -> bool:
        """Cancel a submitted task. Return False if it has ended or was not submitted. Raise StoreUnavailable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpProcess:
    """A process of a product that `flowkit up` can start. Its name there is that of the product."""

    command: tuple[str, ...]
    """The command that runs it."""
    options: Callable[[Sequence[int], bool], list[str]]
    """Options of the command for these ports, and for a stack with Kafka."""
    default_ports: tuple[int, ...]
    offset: int
    """Distance of its first port from `--port-base`. Processes with lower ones start first."""
    address: Callable[[Sequence[int]], str] = lambda _: ""
    """The address that a person opens in a browser; empty if there is none."""
    exports: Callable[[Sequence[int]], Mapping[str, str]] = lambda _: {}
    """Environment variables with which other programs reach the process at these ports."""
    check: Callable[[], None] = lambda: None
    """Raises ConfigError if a package is not installed that the process needs."""

    def ports(self, base: int | None) -> tuple[int, ...]:
        """Return the default ports, or those of a port base."""
        if base is None:
            return self.default_ports
        return tuple(base + self.offset + number for number in range(len(self.default_ports)))


class LogKeeper(LineSinks, Protocol):
    """Keeps the lines of the attempts of one process."""

    health: LoopHealth
    """That of the loop which writes them."""

    def start(self) -> None:
        """Begin to capture lines, and to write them on the running loop."""

    async def stop(self) -> None:
        """Write what is left, but wait for MongoDB a few seconds at most. Call this after the attempts have ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptLine:
    """A line of an attempt, or of the events of an external worker."""

    node_id: str
    attempt: int
    """The epoch of the attempt."""
    shard: int
    left_out: int
    """Number of lines of its attempt before it that were not kept."""
    at: float
    """Seconds since the Unix epoch."""
    level: str
    logger: str
    text: str
    batch_uid: str
    worker_id: str
    place: str
    """Where it is among the lines that `LogReader.page` returns; texts sort like places."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinePage:
    """Some lines of one attempt of a node, oldest first."""

    lines: list[KeptLine]
    earlier: bool
    """Whether there are lines before them."""
    later: bool
    """Whether there are lines after them."""
    end: str
    """The `after` of the next page, which has what MongoDB has stored since. Lines of a lower level come in no page."""


class LogReader(Protocol):
    """Finds kept lines. All methods raise StoreUnavailable."""

    def lines(
        self, task_id: str, node_id: str | None = None, *, attempt: int | None = None, level: str = "DEBUG"
    ) -> AsyncIterator[list[KeptLine]]:
        """Yield the lines of a task, of a node or of an attempt so far, oldest first; then, again and again, new ones.

        An empty list means that there are no more at present; the next step looks again. The caller pauses. A step
        that has raised StoreUnavailable can be repeated: no line is lost, and none comes twice.
        """

    async def page(
        self,
        task_id: str,
        node_id: str,
        attempt: int,
        *,
        level: str = "DEBUG",
        before: str = "",
        after: str = "",
        limit: int = 200,
    ) -> LinePage:
        """Return the last lines of an attempt; or those before a place; or the next ones after the `end` of a page."""

    async def kept_sec(self) -> float | None:
        """Return how long lines are kept; None for ever."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Logs:
    """A product that keeps the lines of attempts. Each function takes a database first."""

    keeper: Callable[[Database, KeptLogs], LogKeeper]
    """Returns what keeps the lines of a process with these settings."""
    reader: Callable[[Database], LogReader]
    """Returns what finds them again."""
    expire_after: Callable[[Database, float], Awaitable[None]]
    """Lets MongoDB delete lines after so many seconds; 0 means never."""


class ProcessMetrics(Protocol):
    """What a process measures. The methods are called on any thread."""

    def create_runtime(self, logging: LoggingConfig | None = None) -> Runtime:
        """Return a runtime for Temporal's SDK whose metrics, if it has any, are among those of the process."""

    def render(self, health: Mapping[str, Any] | None = None) -> bytes:
        """Return all metrics at this moment. `health` is that of the process, as JSON values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """How the processes of FlowKit measure what they do, and the text in which they serve it."""

    content_type: str
    """The media type of the text."""
    start: Callable[[str, str, bool], ProcessMetrics]
    """Lets this process measure itself from now on.

    Its arguments are the kind of the process, such as `engine`, its task queue, and whether runtimes of Temporal's SDK
    measure themselves, too.
    """
    join: Callable[[Mapping[str, bytes]], bytes]
    """Returns one text of those of several processes, by their names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """One product, as it registers itself."""

    name: str
    commands: Mapping[str, Callable[[], typer.Typer]] = field(default_factory=dict)
    """Groups of commands below `flowkit`, by name. Each is loaded when it is needed."""
    process: UpProcess | None = None
    submissions: Callable[[Database, str], Submissions] | None = None
    """Returns what submits tasks of a database to a queue."""
    on_closed: Callable[[Database], OnClosed] | None = None
    """Returns what an engine calls for each task of a database that has closed."""
    logs: Logs | None = None
    """Keeps the lines that handlers and functions log, and finds them again."""
    belongings: tuple[str, ...] = ()
    """Collections whose rows belong to a task, by the field `task_id`: `flowkit purge` deletes them with it."""
    graphviz: Callable[[], Path] | None = None
    """Returns the file of a Graphviz in WebAssembly, an ES module with which a browser draws pictures of graphs."""
    metrics: Callable[[], Metrics | None] | None = None
    """Returns how processes measure what they do; None if a package is not installed that this needs."""


@cache
def installed() -> tuple[Product, ...]:
    """Return the installed products, sorted by name. An entry point whose code is missing does not count.

    Raise ConfigError if one cannot be loaded, or if two products have the same name.
    """
    loaded: dict[str, tuple[Product, str]] = {}
    for entry in metadata.entry_points(group=GROUP):
        if (product := _load(entry)) is None:
            continue
        _, other = loaded.setdefault(product.name, (product, entry.value))
        if other != entry.value:
            raise ConfigError(
                f"two installed products have the name {product.name!r}: {other} and {entry.value}; uninstall one"
            )
    return tuple(loaded[name][0] for name in sorted(loaded))


def _load(entry: metadata.EntryPoint) -> Product | None:
    try:
        product = entry.load()
    except ModuleNotFoundError as error:
        if error.name and f"{entry.module}.".startswith(f"{error.name}."):
            return None
        raise _unusable(entry, f"needs the module {error.name!r}") from error
    except Exception as error:
        raise _unusable(entry, f"fails to load: {type(error).__name__}: {error}") from error
    if not isinstance(product, Product):
        raise _unusable(entry, f"is of the type {type(product).__name__!r}, not a Product")
    return product


def _unusable(entry: metadata.EntryPoint, problem: str) -> ConfigError:
    package = f" of the package {entry.dist.name!r}" if entry.dist is not None else ""
    return ConfigError(
        f"the product {entry.value}{package} {problem}: repair or uninstall the package that provides it"
    )


def processes() -> dict[str, UpProcess]:
    """Return the processes of products that `flowkit up` can start, by product, in the order of their ports."""
    known = {each.name: each.process for each in installed() if each.process is not None}
    return dict(sorted(known.items(), key=lambda each: each[1].offset))


def is_ready(name: str) -> bool:
    """Return whether `flowkit up` can start the process of a product: it is registered, and has all packages."""
    process = processes().get(name)
    try:
        if process is not None:
            process.check()
    except ConfigError:
        return False
    return process is not None


def submissions(db: Database, queue: str) -> Submissions | None:
    """Return what submits tasks to a queue; None if no installed product does."""
    return next((each.submissions(db, queue) for each in installed() if each.submissions), None)


def logs() -> Logs | None:
    """Return what keeps the lines of attempts; None if no installed product does."""
    return next((each.logs for each in installed() if each.logs), None)


def keep_logs(db: Database, settings: KeptLogs) -> LogKeeper | None:
    """Return what keeps the lines of this process; None if the settings or the installed products keep none."""
    found = None if settings.least_kept_level() is None else logs()
    return None if found is None else found.keeper(db, settings)


def belongings() -> tuple[str, ...]:
    """Return the collections of products whose rows belong to a task."""
    return tuple(name for each in installed() for name in each.belongings)


def graphviz() -> Path | None:
    """Return the file of a Graphviz in WebAssembly; None if no installed product has one."""
    files = (each.graphviz() for each in installed() if each.graphviz)
    return next((file for file in files if file.is_file()), None)


def metrics() -> Metrics | None:
    """Return how processes measure what they do; None if no installed product does."""
    found = (each.metrics() for each in installed() if each.metrics)
    return next((each for each in found if each is not None), None)


def on_closed(db: Database) -> list[OnClosed]:
    """Return what an engine calls for each task that has closed.

    Log a warning for a product of FlowKit whose code is there, and which is not registered: nothing else would say so.
    """
    for extra in sorted({*EXTRAS.values()} - {each.name for each in installed()}):
        if _has_code(extra):
            _logger.warning("%s", _describe_outdated(f"the product {extra!r}", extra))
    return [each.on_closed(db) for each in installed() if each.on_closed is not None]


def missing(what: str, product: str) -> ConfigError:
    """Return the error of a call that needs a product of FlowKit which is not installed; it names the extra.

    If its code is there, the package was installed from a checkout of older code, and has to register the product anew.
    """
    extra = EXTRAS.get(product, product)
    if _has_code(extra):
        return ConfigError(_describe_outdated(what, extra))
    return ConfigError(f"{what} is not installed: run pip install 'flowkit-temporal[{extra}]'")


def _has_code(extra: str) -> bool:
    code = find_spec(f"flowkit.{extra}")
    return code is not None and code.origin is not None  # Deleted code may have left an empty folder.


def _describe_outdated(what: str, extra: str) -> str:
    return (
        f"{what} is not registered, because this installation of FlowKit is older than its code: "
        f"run pip install -e '.[{extra}]' in the checkout"
    )
