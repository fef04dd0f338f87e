"""Options that several commands share."""

import functools
import getpass
import inspect
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer

from flowkit.cli.output import log_warnings
from flowkit.config import DEFAULT_QUEUE, CoordinatorConfig
from flowkit.errors import ConfigError
from flowkit.text import shell_command, shown_address
from flowkit.validation import arguments
from flowkit.validation.invalid import field_problem

DEFAULT_MONGO_URL = "mongodb://localhost:27017"
DEFAULT_DATABASE = "flowkit"
MAX_PROCESSES = 256
DEFAULT_HEALTH_HOST = "127.0.0.1"
"""Only this machine can read the health, unless the address is set."""


def _check_queue(given: str | None) -> str | None:
    if given is not None:
        arguments.require(field_problem(CoordinatorConfig, "queue", given, "--queue (FLOWKIT_QUEUE)"))
    return given


def _check_timeout(given: float | None) -> float | None:
    if arguments.timeout_problem(given):
        how = "a number of seconds, 0 or more; omit it to watch without a timeout"
        raise ConfigError(f"--timeout is {given}; it must be {how}")
    return given


def _check_id(given: str) -> str:
    arguments.require(arguments.task_id_problem(given, "TASK"))
    return given


def _check_node(given: str) -> str:
    arguments.require(arguments.node_id_problem(given, "NODE"))
    return given


def _check_new_id(given: str | None) -> str | None:
    if given is not None:
        arguments.require(arguments.new_task_id_problem(given, "--task-id"))
    return given


def current_user() -> str:
    """Return the user and the host of this process, who is the caller of an action."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):
        return socket.gethostname()


MongoUrl = Annotated[str, typer.Option("--mongo-url", envvar="MONGO_URL", help="Address of MongoDB.")]
MongoDatabase = Annotated[
    str, typer.Option("--database", envvar="MONGO_DATABASE", help="Name of the MongoDB database.")
]
Queue = Annotated[
    str | None,
    typer.Option(
        "--queue",
        envvar="FLOWKIT_QUEUE",
        callback=_check_queue,
        help="Task queue of the engine; workers use it too.",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log more; show tracebacks.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Timeout = Annotated[
    float | None,
    typer.Option(
        min=0,
        callback=_check_timeout,
        help="With --watch: seconds after which to stop watching (exit code 124).",
    ),
]
PortBase = Annotated[
    int | None,
    typer.Option(
        envvar="FLOWKIT_PORT_BASE",
        min=1,
        max=65_527,
        help="First of nine ports: Temporal, Web UI, MongoDB, Temporal's HTTP API, Kafka, gateway (two), admission, "
        "page. The processes serve their health and metrics on the ports that follow, if they are free.  "
        "[default: 7233, 8233, 27017, any, 9092, 9652, 9653, 9654, 9655]",
    ),
]
HealthPath = Annotated[
    str | None,
    typer.Option(
        "--health-file",
        envvar="FLOWKIT_HEALTH_FILE",
        help="File to which the process writes its health every five seconds.",
    ),
]
HealthPort = Annotated[
    int | None,
    typer.Option(
        "--health-port",
        envvar="FLOWKIT_HEALTH_PORT",
        min=1,
        max=65_535,
        help="Serve the same data over HTTP on this port: status 200 if the process is healthy, else 503.",
    ),
]
HealthHost = Annotated[
    str,
    typer.Option(
        "--health-host", envvar="FLOWKIT_HEALTH_HOST", help="Address on which the health port listens."
    ),
]
HealthNames = Annotated[
    str | None,
    typer.Option(
        "--health-name",
        envvar="FLOWKIT_HEALTH_NAMES",
        help="Names of this host with which probes may call the health port, separated by commas; they may always use "
        "its addresses.",
    ),
]
ServesMetrics = Annotated[
    bool,
    typer.Option(
        "--metrics/--no-metrics",
        envvar="FLOWKIT_METRICS",
        help="Serve metrics for Prometheus at /metrics of the health port.",
    ),
]
MeasuresSdk = Annotated[
    bool,
    typer.Option(
        "--sdk-metrics/--no-sdk-metrics",
        envvar="FLOWKIT_SDK_METRICS",
        help="Add the metrics of Temporal's SDK, which cost more than those of FlowKit.",
    ),
]
Processes = Annotated[
    int,
    typer.Option(
        min=1,
        max=MAX_PROCESSES,
        help="Number of processes to run. Each Python process uses one core.",
    ),
]
Check = Annotated[
    bool, typer.Option("--check", help="Load handlers, functions and settings, report errors, and exit.")
]
After = Annotated[
    Path | None,
    typer.Option(
        hidden=True,
        help="Load handlers, functions and settings, then wait for the lock of this file: `flowkit up --reload`.",
    ),
]
Functions = Annotated[
    list[str] | None, typer.Option("--function", help="Coordinator function, as NAME=module:function.")
]
HostedRoles = Annotated[
    list[str] | None,
    typer.Option(
        "--role",
        help="Handler that the engine hosts, as module:CLASS or module:object. It runs inline handlers itself. "
        "Can be repeated.",
    ),
]
TaskId = Annotated[str, typer.Argument(callback=_check_id, help="Id of the task.")]
TaskNode = Annotated[str, typer.Argument(callback=_check_node, help="Id of the node.")]
NodeId = Annotated[str | None, typer.Argument(help="Id of a node.")]
NewTaskId = Annotated[
    str | None,
    typer.Option("--task-id", callback=_check_new_id, help="Id of the task. Default: a new UUID."),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthOptions:
    """Where a process reports its health. A group of options."""

    file: HealthPath = None
    port: HealthPort = None
    host: HealthHost = DEFAULT_HEALTH_HOST
    names: HealthNames = None
    metrics: ServesMetrics = True
    sdk_metrics: MeasuresSdk = True

    @property
    def known_names(self) -> list[str]:
        """The names of this host with which probes may call the health port."""
        return [each.strip() for each in (self.names or "").split(",") if each.strip()]

    @property
    def measures(self) -> bool:
        """Whether the process measures what it does, for whoever reads its metrics."""
        return self.metrics and self.port is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentOptions:
    """The address of a deployment, without the Temporal server, which TEMPORAL_* names. A group of options."""

    mongo_url: MongoUrl = DEFAULT_MONGO_URL
    database: MongoDatabase = DEFAULT_DATABASE
    queue: Queue = None

    @property
    def engine_queue(self) -> str:
        """The engine's task queue."""
        return self.queue or DEFAULT_QUEUE


@dataclass(frozen=True, slots=True)
class WithoutOption:
    """Leaves an option out of a group."""

    name: str


AnyQueue = Annotated[DeploymentOptions, WithoutOption("queue")]
"""The address of a deployment for commands that need no queue."""

R = TypeVar("R")


def with_options(command: Callable[..., R]) -> Callable[..., R]:
    """Give a command the single options in place of each parameter whose type is a group of options.

    A group is a dataclass whose fields are options with their names. A command without a parameter `verbose` gets the
    option, and logs as a short command does.
    """
    signature = inspect.signature(command, eval_str=True)
    parameters = signature.parameters
    groups = {name: options for name, each in parameters.items() if (options := _options_of(each))}
    single = [option for each in parameters.values() for option in groups.get(each.name, {"": each}).values()]
    logs = "verbose" not in parameters
    if logs:
        single.append(inspect.Parameter("verbose", _BY_NAME, default=False, annotation=Verbose))

    @functools.wraps(command)
    def run(**given: Any) -> R:
        if logs:
            log_warnings(given.pop("verbose"))
        for name, options in groups.items():
            kind = _kind_of(parameters[name])
            given[name] = kind(**{field: given.pop(option.name) for field, option in options.items()})
        return command(**given)

    vars(run)["__signature__"] = signature.replace(
        parameters=[each.replace(kind=_BY_NAME) for each in single]
    )
    return run


_BY_NAME = inspect.Parameter.KEYWORD_ONLY


def _kind_of(parameter: inspect.Parameter) -> Any:
    """Return the type of a parameter without what annotates it."""
    kind = parameter.annotation
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _options_of(parameter: inspect.Parameter) -> dict[str, inspect.Parameter]:
    """Return the options in a group, by field; none if the parameter is a single option."""
    kind = _kind_of(parameter)
    if not is_dataclass(kind):
        return {}
    left_out = {each.name for each in get_args(parameter.annotation)[1:] if isinstance(each, WithoutOption)}
    return {
        each.name: inspect.Parameter(
            f"{parameter.name}_{each.name}",
            _BY_NAME,
            default=inspect.Parameter.empty if each.default is MISSING else each.default,
            annotation=each.type,
        )
        for each in fields(kind)
        if each.name not in left_out
    }


def repeated_command(context: typer.Context, *, without: Sequence[str], instead: Mapping[str, object]) -> str:
    """Return the command that runs, as a user can paste it, without some options and with these values for others.

    An option whose value is None is left out. So are values from the environment, because the next command has them as
    well, and an address with a password.
    """
    arguments: list[str] = []
    options: list[str] = []
    for parameter in context.command.params:
        name, label = str(parameter.name), parameter.opts[0]
        source = context.get_parameter_source(name)
        is_given = source is not None and source.name == "COMMANDLINE" and label not in without
        value = instead[label] if label in instead else context.params[name] if is_given else None
        values = [*value] if isinstance(value, (list, tuple)) else [] if value is None else [value]
        if parameter.param_type_name == "argument":
            arguments += map(str, values)
        elif not (label == "--mongo-url" and shown_address(str(value)) != value):
            options += [word for each in values for word in _repeated_option(parameter, each)]
    command = context.command_path.removeprefix(context.find_root().command_path)
    return shell_command(f"flowkit{command}", *arguments, options=options)


def _repeated_option(option: Any, value: object) -> list[str]:
    if isinstance(value, bool):
        return [*(option.opts if value else option.secondary_opts)[:1]]
    label = option.opts[0]
    return [f"{label}={value}"] if str(value).startswith("-") else [label, str(value)]
