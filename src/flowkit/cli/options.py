"""Options that several commands share."""

from dataclasses import dataclass
from typing import Annotated

import typer

from flowkit.config import DEFAULT_QUEUE

DEFAULT_MONGO_URL = "mongodb://localhost:27017"
DEFAULT_DATABASE = "flowkit"

MongoUrl = Annotated[str, typer.Option(envvar="MONGO_URL", help="MongoDB's address.")]
MongoDatabase = Annotated[str, typer.Option("--database", envvar="MONGO_DATABASE", help="Its database.")]
Queue = Annotated[
    str | None, typer.Option(envvar="FLOWKIT_QUEUE", help="Task queue of the engine; workers use it too.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log more; show tracebacks.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Timeout = Annotated[
    float | None,
    typer.Option(min=0, help="With --watch: seconds after which to stop watching (exit code 124)."),
]
PortBase = Annotated[
    int | None,
    typer.Option(
        envvar="FLOWKIT_PORT_BASE",
        min=1,
        max=65_532,
        help="First of four ports: Temporal, Web UI, MongoDB, Temporal's HTTP API.  [default: 7233, 8233, 27017, any]",
    ),
]
HealthPath = Annotated[
    str | None,
    typer.Option(
        "--health-file",
        envvar="FLOWKIT_HEALTH_FILE",
        help="Write this file every five seconds: whether the process runs, and how its background loops do.",
    ),
]
TaskId = Annotated[str, typer.Argument(help="Id of the task.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """Where a deployment is, beside what TEMPORAL_* says."""

    mongo_url: str = DEFAULT_MONGO_URL
    database: str = DEFAULT_DATABASE
    queue: str | None = None

    @property
    def engine_queue(self) -> str:
        """The engine's task queue."""
        return self.queue or DEFAULT_QUEUE
