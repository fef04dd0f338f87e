"""The entities of the gateway, and the parameters and results of its methods. The OpenRPC document describes them.

Ids are chosen by the caller. The id of a flow or a runner is unique in its context, that of a job or a message among
those of its caller in the context.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field

from flowkit.limits import PREREQUISITES
from flowkit.server.rpc import Params

MAX_ID: Final = 2**32 - 1
MAX_NODES: Final = 10_000
"""Largest number of nodes of a flow."""
NODES_BYTES: Final = 6_000_000
"""Largest size of the nodes of a flow, in bytes of JSON with all fields."""
SCRIPT_CHARS: Final = 1_000_000
DEFAULT_TIMEOUT_SEC: Final = 3_600.0
MAX_PAGE: Final = 500
"""Largest number of entries of a page."""
MAX_ATTEMPT: Final = 1_000_000

NEXT: Final = "Pass it as `after` for the next page. Null after the last one."

Id = Annotated[int, Field(ge=0, le=MAX_ID, strict=True)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
EnvVars = dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=200)], str]
Time = Annotated[int, Field(description="Seconds since the Unix epoch.")]


class FlowStatus(StrEnum):
    """Status of a flow."""

    CREATED = "Created"
    STARTED = "Started"
    FINISHED = "Finished"
    ERROR = "Error"


class NodeStatus(StrEnum):
    """Status of a node of a flow."""

    PENDING = "Pending"
    READY = "Ready"
    DISPATCHED = "Dispatched"
    RUNNING = "Running"
    COMPLETED = "Completed"
    FAILED = "Failed"
    CANCELLED = "Cancelled"


class MessageStatus(StrEnum):
    """Status of a message. Those that the gateway sends are acknowledged when the supervisor has replied."""

    CREATED = "Created"
    DISPATCHED = "Dispatched"
    ACKNOWLEDGED = "Acknowledged"
    ERROR = "Error"


class TransportStatus(StrEnum):
    """How far the transport of a message is."""

    QUEUED = "Queued"
    SENT = "Sent"
    DELIVERED = "Delivered"
    FAILED = "Failed"


# --- entities ---------------------------------------------------------------------------------------------------


class ActorData(Params):
    """A security principal."""

    id: Id
    pubkey: str = Field(default="", max_length=200)
    address: list[str] = Field(default_factory=list, max_length=20)


class Actor(ActorData):
    """An actor, as it is stored."""

    created_at: Time
    updated_at: Time


class ContextData(Params):
    """A tenant: who may do what with its runners, jobs and flows."""

    id: Id
    admins: list[Id] = Field(default_factory=list, max_length=1_000)
    readers: list[Id] = Field(default_factory=list, max_length=1_000)
    executors: list[Id] = Field(default_factory=list, max_length=1_000)


class Context(ContextData):
    """A context, as it is stored."""

    created_at: Time
    updated_at: Time


class RunnerFields(Params):
    """What a runner and its stored form have in common."""

    id: Id
    pubkey: str = Field(default="", max_length=200, description="Mycelium public key: 64 hexadecimal digits.")
    address: str = Field(
        default="",
        max_length=500,
        description="An http(s) URL, or a Mycelium address. Used without a pubkey.",
    )
    topic: str = Field(default="supervisor.rpc", min_length=1, max_length=255)
    executors: list[Name] = Field(
        default_factory=list, max_length=100, description="The executors that the runner has. Empty for all."
    )


class RunnerData(RunnerFields):
    """A supervisor that is registered in a context."""

    secret: str | None = Field(
        default=None,
        max_length=4_000,
        description="`env:NAME` or `file:PATH` refers to a secret. Any other text is stored encrypted.",
    )


class Runner(RunnerFields):
    """A runner, as it is stored."""

    secret: str | None = Field(default=None, description="A reference, or `***` for a stored secret.")
    created_at: Time
    updated_at: Time


class JobData(Params):
    """A unit of work. Status and dependencies belong to the node of a flow."""

    id: Id
    caller_id: Id
    context_id: Id
    script: str = Field(max_length=SCRIPT_CHARS)
    executor: Name
    timeout: float = Field(default=DEFAULT_TIMEOUT_SEC, gt=0, le=30 * 86_400, description="Seconds.")
    retries: int = Field(default=0, ge=0, le=10_000, strict=True)
    env_vars: EnvVars = Field(default_factory=dict)


class Job(JobData):
    """A job, as it is stored."""

    created_at: Time
    updated_at: Time


class FlowNode(Params):
    """A node of a flow: a job, and what it waits for."""

    id: Id = Field(description="Id of the job.")
    depends: list[Id] = Field(default_factory=list, description="Jobs that must be completed before.")
    prerequisites: list[Name] = Field(
        default_factory=list, max_length=PREREQUISITES, description="See `node.satisfy`."
    )
    supervisor_url: str = Field(
        default="",
        max_length=500,
        description="`runner:ID`, `http(s)://…` or `mycelium:KEY`. Empty for the least busy runner of the executor.",
    )
    node_status: NodeStatus | None = Field(default=None, description="Ignored.")


class FlowData(Params):
    """A graph of jobs."""

    id: Id
    caller_id: Id
    context_id: Id
    jobs: list[Id] = Field(default_factory=list, max_length=MAX_NODES)
    nodes: list[FlowNode] = Field(
        default_factory=list, max_length=MAX_NODES, description="Jobs without a node depend on nothing."
    )
    env_vars: EnvVars = Field(
        default_factory=dict, description="Copied into every job. A job's own value comes first."
    )
    on_failure: Literal["finish_running", "continue"] = Field(
        default="finish_running",
        description="After a failed job, `finish_running` starts no further job, and `continue` starts those that do "
        "not depend on it.",
    )
    execution_timeout: float | None = Field(
        default=None, gt=0, le=365 * 86_400, description="Seconds from the start of the flow to its end."
    )


class Flow(FlowData):
    """A flow, as it is stored."""

    status: FlowStatus
    run_id: str | None = Field(description="The latest run.")
    created_at: Time
    updated_at: Time


class MessageFields(Params):
    """What a message and its stored form have in common."""

    caller_id: Id
    context_id: Id
    flow_id: Id | None = None
    message: str = Field(default="", max_length=SCRIPT_CHARS)
    message_type: Literal["job", "chat", "mail"] = "chat"
    message_format_type: Literal["html", "text", "md"] = "text"
    nodes: list[FlowNode] = Field(default_factory=list, max_length=MAX_NODES)


class MessageData(MessageFields):
    """A message that a client stores."""

    id: Id
    job: list[Any] = Field(default_factory=list, description="Replaced by `nodes`. Accepted and ignored.")


class Message(MessageFields):
    """A message, as it is stored. Those with a text as their id are dispatches, which the gateway writes itself."""

    id: Id | str
    status: MessageStatus
    transport_id: str | None = Field(default=None, description="Id of the job at its supervisor.")
    transport_status: TransportStatus
    created_at: Time
    updated_at: Time


# --- parameters -------------------------------------------------------------------------------------------------


class ById(Params):
    """An actor or a context."""

    id: Id


class InContext(Params):
    """An entity of a context."""

    context_id: Id
    id: Id


class OfCaller(Params):
    """A job of a caller."""

    context_id: Id
    caller_id: Id
    id: Id


class ByMessage(Params):
    """A message of a caller. Dispatches have a text as their id."""

    context_id: Id
    caller_id: Id
    id: Id | str


class Page(Params):
    """A part of a list."""

    after: Id | None = Field(default=None, description="List only entries with a higher id.")
    limit: int = Field(default=100, ge=1, le=MAX_PAGE, strict=True)


class ContextPage(Page):
    """A part of a list of a context."""

    context_id: Id


class CallerPage(ContextPage):
    """A part of a list of a context, optionally of one caller."""

    caller_id: Id | None = None


class FlowPage(CallerPage):
    """A part of the list of flows."""

    status: FlowStatus | None = None


class MessagePage(Params):
    """The newest messages of a context or of one flow."""

    context_id: Id
    flow_id: Id | None = None
    after: str | None = Field(
        default=None,
        pattern=r"^[0-9]{1,12}/",
        max_length=1_000,
        description="List only messages after this place: `next` of the page before.",
    )
    limit: int = Field(default=100, ge=1, le=MAX_PAGE, strict=True)


class ActorCreate(Params):
    """Parameters of `actor.create`."""

    actor: ActorData


class ContextCreate(Params):
    """Parameters of `context.create`."""

    context: ContextData


class RunnerCreate(Params):
    """Parameters of `runner.create`."""

    context_id: Id
    runner: RunnerData


class JobCreate(Params):
    """Parameters of `job.create`."""

    context_id: Id
    job: JobData


class FlowCreate(Params):
    """Parameters of `flow.create`."""

    context_id: Id
    flow: FlowData


class MessageCreate(Params):
    """Parameters of `message.create`."""

    context_id: Id
    message: MessageData


class FlowAdd(InContext):
    """Parameters of `flow.add_nodes`."""

    nodes: list[FlowNode] = Field(min_length=1, max_length=MAX_NODES)


class FlowCancel(InContext):
    """Parameters of `flow.cancel`."""

    reason: str = Field(default="", max_length=1_000)


class FlowRetry(InContext):
    """Parameters of `flow.retry`."""

    nodes: list[Id] = Field(
        default_factory=list, description="Jobs to run again. Empty for those that did not complete."
    )


class NodeSatisfy(InContext):
    """Parameters of `node.satisfy`."""

    prerequisite: Name


class OfJob(Params):
    """A job in the latest run of a flow."""

    context_id: Id
    id: Id = Field(description="Id of the job.")
    flow_id: Id | None = Field(default=None, description="Needed if several flows have the job.")
    caller_id: Id | None = None


class JobAttempts(OfJob):
    """A part of the attempts of a job."""

    after: int = Field(default=0, ge=0, le=MAX_ATTEMPT, strict=True, description="List only later attempts.")
    limit: int = Field(default=100, ge=1, le=MAX_PAGE, strict=True)


class FlowSubscribe(InContext):
    """Parameters of `flow.subscribe`."""

    after: int = Field(
        default=0, ge=0, strict=True, description="Send the events after this sequence number."
    )


# --- results ----------------------------------------------------------------------------------------------------


class Started(Params):
    """A run of a flow."""

    started: bool = Field(description="Whether this call started the run. False if it was running already.")
    flow_id: Id
    run_id: str
    status: FlowStatus


class NodeView(Params):
    """A node of a flow in its latest run."""

    node_status: NodeStatus
    cause: str | None = Field(default=None, description="Why the node was cancelled.")
    attempt: int = Field(description="Number of attempts that have begun, lost ones included.")
    waiting_on: list[str] = Field(description="Prerequisites that are not satisfied.")
    supervisor_url: str
    error: str | None = Field(
        default=None, description="Truncated if many jobs have failed; `job.result` has all of it."
    )
    retry_at: Time | None = Field(default=None, description="When a failed job is tried again.")


_FAILED_JOB: Final = "The first job that has failed and has no retry left."


class FlowView(Params):
    """A flow in its latest run."""

    flow_id: Id
    run_id: str | None
    status: FlowStatus
    cause: str | None = Field(default=None, description="Why the flow ended with an error.")
    failed_job: Id | None = Field(default=None, description=_FAILED_JOB)
    nodes: dict[str, NodeView] = Field(description="By id of the job.")
    created_at: Time
    started_at: Time | None = None
    finished_at: Time | None = None


class FlowDag(Params):
    """The graph of a flow, with the state of its latest run."""

    flow_id: Id
    run_id: str | None
    status: FlowStatus
    edges: list[tuple[Id, Id]] = Field(description="Pairs of a job and one that depends on it.")
    roots: list[Id]
    leaves: list[Id]
    levels: list[list[Id]] = Field(description="Jobs by the length of the longest path to them.")
    started: list[Id]
    completed: list[Id]
    failed_job: Id | None = Field(description=_FAILED_JOB)
    nodes: dict[str, NodeView]


class FlowSummary(Params):
    """A flow in a list."""

    flow_id: Id
    caller_id: Id
    run_id: str | None
    status: FlowStatus
    jobs: int
    created_at: Time
    updated_at: Time


class Satisfied(Params):
    """Result of `node.satisfy`."""

    prerequisite: str
    satisfied: bool = Field(description="Whether this call satisfied it. False if it was satisfied already.")
    nodes: list[Id] = Field(description="The nodes that waited for it.")


class Cancelled(Params):
    """Result of `flow.cancel`."""

    flow_id: Id
    run_id: str | None
    requested: bool = Field(description="Whether the cancel was requested. False if no run was open.")


class JobResult(Params):
    """What the latest attempt of a job has brought."""

    flow_id: Id
    run_id: str | None
    job_id: Id
    node_status: NodeStatus
    attempt: int
    result: str | None = Field(description="What the supervisor returned; null unless the job is completed.")
    error: str | None = None
    finished_at: Time | None = None


class AttemptLog(Params):
    """The log of one attempt of a job."""

    attempt: int
    transport_id: str
    outcome: Literal["completed", "failed", "abandoned"] | None = Field(
        description="`abandoned` if no attempt waits for the supervisor any more. Null until then."
    )
    logs: str | None = Field(description="Null if the supervisor has none.")
    error: str | None


class JobLogs(Params):
    """The logs of a job, oldest attempt first."""

    flow_id: Id
    run_id: str | None
    job_id: Id
    attempts: list[AttemptLog]
    next: int | None = Field(description=NEXT)


class Ping(Params):
    """Result of `runner.ping`."""

    runners: list[str] = Field(description="What the supervisor returns as its runners.")


class MessageState(Params):
    """Result of `message.status`."""

    id: Id | str
    status: MessageStatus
    transport_id: str | None
    transport_status: TransportStatus
    late_replies: int = Field(default=0, description="Replies that came too late and were not applied.")
    updated_at: Time


class Subscription(Params):
    """Result of `flow.subscribe`. The events follow as notifications `flow.event`."""

    flow_id: Id
    run_id: str | None
    status: FlowStatus
    after: int


class FlowEvent(Params):
    """A change of the status of a node, or of the flow if `node` is null: the parameters of `flow.event`."""

    model_config = ConfigDict(populate_by_name=True)

    seq: int = Field(description="Number of the event in its flow, from 1 without gaps.")
    context_id: Id
    flow_id: Id
    run_id: str
    node: Id | None
    from_: str = Field(alias="from")
    to: str
    attempt: int
    at: float = Field(description="Unix time in seconds at which the gateway saw the change.")
    filled: bool = Field(
        description="Whether the gateway saw only a later status, and this one must have come before."
    )


class Actors(Params):
    """A page of a list of actors."""

    actors: list[Actor]
    next: Id | None = Field(description=NEXT)


class Contexts(Params):
    """A page of a list of contexts."""

    contexts: list[Context]
    next: Id | None = Field(description=NEXT)


class Runners(Params):
    """A page of a list of runners."""

    runners: list[Runner]
    next: Id | None = Field(description=NEXT)


class Jobs(Params):
    """A page of a list of jobs."""

    jobs: list[Job]
    next: Id | None = Field(description=NEXT)


class Flows(Params):
    """A page of a list of flows."""

    flows: list[FlowSummary]
    next: Id | None = Field(description=NEXT)


class Messages(Params):
    """A page of a list of messages."""

    messages: list[Message]
    next: str | None = Field(description=NEXT)
