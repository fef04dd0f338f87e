"""What a process of FlowKit measures: one instrument for each number, and the recorder that listens to them.

FlowKit itself keeps no numbers. A product installs a recorder with `listen`; without one, an instrument costs one
comparison. The names follow the conventions of Prometheus, and docs/metrics.md describes them. No label holds the id
of a task, an attempt, a batch or a worker. Instruments can be used on any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol


class Recorder(Protocol):
    """Keeps the numbers of a process. Its methods are called on any thread, return at once and never raise."""

    def add(self, instrument: Counter, amount: float, labels: tuple[str, ...]) -> None:
        """Add to a counter."""

    def observe(self, instrument: Histogram, value: float, labels: tuple[str, ...]) -> None:
        """Note one value of a histogram."""

    def set(self, instrument: Gauge, values: dict[tuple[str, ...], float]) -> None:
        """Replace all values of a gauge, by their labels."""


class _Listening:
    """The recorder of this process."""

    recorder: Recorder | None = None


def listen(recorder: Recorder | None) -> None:
    """Let a recorder have all that this process measures from now on; none with None."""
    _Listening.recorder = recorder


def is_measured() -> bool:
    """Return whether a recorder listens: for values that cost something to compute."""
    return _Listening.recorder is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Instrument:
    name: str
    """The name in Prometheus, with the unit; that of a counter ends with `_total`."""
    text: str
    """What it counts or measures: one sentence."""
    labels: tuple[str, ...] = ()
    """Names of the labels, in the order in which their values are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter(_Instrument):
    """A number that grows. It is about what this process has done, so dashboards sum it over processes."""

    def add(self, *labels: str, amount: float = 1) -> None:
        """Add to the number with these labels."""
        if (recorder := _Listening.recorder) is not None:
            recorder.add(self, amount, labels)


SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1_800, 7_200)
"""Upper bounds of the buckets of times: from some milliseconds to hours."""
COMMAND_SECONDS: Final = (0.001, 0.0025, *SECONDS[:12])
"""Upper bounds of the buckets of times of commands of a server: from a millisecond to half a minute."""
SIZES: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000)
"""Upper bounds of the buckets of sizes of groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram(_Instrument):
    """Values of one kind, in buckets. Dashboards sum the buckets over processes."""

    buckets: tuple[float, ...] = SECONDS

    def observe(self, value: float, *labels: str) -> None:
        """Note a value with these labels."""
        if (recorder := _Listening.recorder) is not None:
            recorder.observe(self, value, labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge(_Instrument):
    """A state that rises and falls. Several processes may report it; its text says how to read them together."""

    is_maximum: bool = False
    """Whether it is the largest of several values, so that those of labels beyond a bound become their largest one.
    Those of other gauges are summed."""

    def set(self, values: dict[tuple[str, ...], float]) -> None:
        """Replace all values, by their labels. Labels that are missing now have no value any more."""
        if (recorder := _Listening.recorder) is not None:
            recorder.set(self, values)


TASKS_OPENED: Final = Counter(name="flowkit_tasks_opened_total", text="Tasks that an engine has opened.")
TASKS_CLOSED: Final = Counter(
    name="flowkit_tasks_closed_total", text="Tasks that have ended, by their status.", labels=("status",)
)
TASKS_REFUSED: Final = Counter(
    name="flowkit_scheduled_tasks_refused_total",
    text="Tasks of schedules that an engine has refused at their time, by the reason code; `task_id_taken` counts "
    "tasks that a client of Temporal has started with the id of one.",
    labels=("reason",),
)
TAKEN_TIMES: Final = Gauge(
    name="flowkit_taken_nominal_times",
    text="How many of the latest and the next nominal times of a schedule have an id that a workflow has which was not "
    "started for them, by schedule. One engine of each queue reports all schedules of its deployment: read them with "
    "`max`.",
    labels=("schedule",),
)
NODES_CLOSED: Final = Counter(
    name="flowkit_nodes_closed_total",
    text="Nodes of tasks that have ended, by role and status, counted when their task ends.",
    labels=("role", "status"),
)
ATTEMPTS_STARTED: Final = Counter(
    name="flowkit_attempts_started_total",
    text="Attempts that have begun, by role, and whether it is the first one of its node or a later one.",
    labels=("role", "try"),
)
ATTEMPTS_ENDED: Final = Counter(
    name="flowkit_attempts_ended_total",
    text="Attempts that have ended, by role, outcome and reason code, which is empty for those that succeeded or were "
    "cancelled. The process that finds an attempt lost counts its loss.",
    labels=("role", "outcome", "reason"),
)
NODE_WAIT: Final = Histogram(
    name="flowkit_node_wait_seconds",
    text="How long an attempt waited from the moment when its node was ready until a worker began it, by role. Waits "
    "for slots count, waits for retries do not. Of the shards of a node, the first one counts.",
    labels=("role",),
)
ATTEMPT_TIME: Final = Histogram(
    name="flowkit_attempt_duration_seconds",
    text="How long an attempt ran, by role and outcome. Those that were lost do not count.",
    labels=("role", "outcome"),
)
BATCHES: Final = Counter(
    name="flowkit_batches_total",
    text="Batches by role and outcome: stored, failed, set_aside.",
    labels=("role", "outcome"),
)
ITEMS: Final = Counter(
    name="flowkit_items_total",
    text="Items in the batches that handlers have processed, by role. A batch without a list of items counts as one.",
    labels=("role",),
)
STORED_BYTES: Final = Counter(
    name="flowkit_stored_bytes_total",
    text="Bytes of the user's data that were written to MongoDB, by what they are: artifacts, metrics, variables, "
    "inputs, logs.",
    labels=("kind",),
)
FENCED_WRITES: Final = Counter(
    name="flowkit_fenced_writes_total",
    text="Attempts whose writes MongoDB refused because a newer attempt had taken over, by role.",
    labels=("role",),
)
GROUP_SIZE: Final = Histogram(
    name="flowkit_group_size",
    text="How many writes went to MongoDB together, by what was written: attempts, leases, artifacts, metrics, and "
    "those of an admission queue.",
    labels=("kind",),
    buckets=SIZES,
)
UPDATES: Final = Counter(
    name="flowkit_updates_total",
    text="Updates of tasks that this engine has processed, such as actions of operators, by name and outcome: "
    "accepted, rejected.",
    labels=("name", "outcome"),
)
LONG_HISTORIES: Final = Counter(
    name="flowkit_long_histories_total",
    text="Workflow tasks of this engine for runs whose history has more than 80 % of the events or bytes at which "
    "Temporal ends a run.",
)
FAILED_DELIVERIES: Final = Counter(
    name="flowkit_gateway_failed_deliveries_total",
    text="Jobs that the gateway could not deliver to their supervisor, or of which it got no outcome, by reason code.",
    labels=("reason",),
)
SHARDS_STARTED: Final = Counter(
    name="flowkit_shards_started_total", text="Attempts of shards that have begun, by role.", labels=("role",)
)
LATE_HEARTBEATS: Final = Counter(
    name="flowkit_late_heartbeats_total",
    text="Heartbeats that a worker or bridge has sent at least one interval late, because it was busy or suspended, by "
    "role of the attempt.",
    labels=("role",),
)
SLOT_WAIT: Final = Histogram(
    name="flowkit_slot_wait_seconds",
    text="How long an attempt waited for the slot that it got, by each concurrency limit that applies to it: the role, "
    "or `*` for the limit of all roles together.",
    labels=("limit",),
)
ERRORS: Final = Counter(
    name="flowkit_errors_total",
    text="Requests to MongoDB or Kafka that have failed, by server and reason. Temporal's SDK counts its own.",
    labels=("server", "reason"),
)
COMMAND_TIME: Final = Histogram(
    name="flowkit_mongodb_command_seconds",
    text="How long commands took that a process of the command line sent to MongoDB, with those that failed, by "
    "command: find, getMore, insert, update, delete, findAndModify, aggregate, distinct, other.",
    labels=("command",),
    buckets=COMMAND_SECONDS,
)
DISPATCHES: Final = Counter(
    name="flowkit_bridge_dispatches_total",
    text="Attempts that a bridge has sent to external workers, by role.",
    labels=("role",),
)
BRIDGE_EVENTS: Final = Counter(
    name="flowkit_bridge_events_total",
    text="Status events of external workers that a bridge has processed, by role and kind; those that it could not "
    "read have the kind `malformed`.",
    labels=("role", "kind"),
)
MALFORMED: Final = Counter(
    name="flowkit_bridge_malformed_records_total",
    text="Records of Kafka that a bridge skipped because they are not messages of the protocol, by topic.",
    labels=("topic",),
)
OPEN_TASKS: Final = Gauge(
    name="flowkit_open_tasks",
    text="Tasks of the namespace that have not ended, by status. One engine of each queue reports it; take the largest "
    "value.",
    labels=("status",),
)
OPEN_NODES: Final = Gauge(
    name="flowkit_open_nodes",
    text="Nodes of open tasks that have not ended, by role and status; `decision` are those that wait for a person, "
    "and `event` those that wait for prerequisites. One engine of each queue reports it; take the largest value.",
    labels=("role", "status"),
)
OLDEST_READY: Final = Gauge(
    name="flowkit_oldest_ready_seconds",
    text="How long the oldest waiting attempt has waited for a worker or a slot, by role; no value while none waits. "
    "One engine of each queue reports it; take the largest value.",
    labels=("role",),
    is_maximum=True,
)
OLDEST_DECISION: Final = Gauge(
    name="flowkit_oldest_decision_seconds",
    text="How long the oldest held failure or approval has waited for the decision of a person, by role; no value "
    "while none waits. One engine of each queue reports it; take the largest value.",
    labels=("role",),
    is_maximum=True,
)
OLDEST_EVENT: Final = Gauge(
    name="flowkit_oldest_event_seconds",
    text="How long the oldest node has lacked prerequisites, by role, which begins with its task; no value while none "
    "lacks any. One engine of each queue reports it; take the largest value.",
    labels=("role",),
    is_maximum=True,
)
ROLE_WORKERS: Final = Gauge(
    name="flowkit_role_workers",
    text="Processes of the queue that serve a role, and external workers; 0 for a role of open nodes that none serves. "
    "One engine of each queue reports it; take the largest value.",
    labels=("role",),
)
SLOTS: Final = Gauge(
    name="flowkit_limit_slots",
    text="Slots of each concurrency limit, which is a role or `*` for all: used, size, and waiting, the number of "
    "tasks that wait for one. One engine of each queue reports it; take the largest value.",
    labels=("limit", "state"),
)
BRIDGE_ATTEMPTS: Final = Gauge(
    name="flowkit_bridge_attempts",
    text="Attempts of external workers that this bridge supervises, by role.",
    labels=("role",),
)
BRIDGE_QUEUED: Final = Gauge(
    name="flowkit_bridge_queued_commands",
    text="Commands that no external worker has read yet, by role. Every bridge of a role reports the same.",
    labels=("role",),
)
BRIDGE_LAG: Final = Gauge(
    name="flowkit_bridge_status_lag",
    text="Status events that no bridge has processed yet, by role. Every bridge of a role reports the same.",
    labels=("role",),
)
LOG_LINES: Final = Counter(
    name="flowkit_log_lines_total",
    text="Lines of handlers that were kept with their attempt, by role and level.",
    labels=("role", "level"),
)
LOG_LINES_DROPPED: Final = Counter(
    name="flowkit_log_lines_dropped_total",
    text="Lines of handlers that were not kept, by role and reason: bound, outage, refused.",
    labels=("role", "reason"),
)

ALL: Final[tuple[Counter | Histogram | Gauge, ...]] = tuple(
    each for each in globals().values() if isinstance(each, Counter | Histogram | Gauge)
)
"""All instruments of FlowKit, in the order of this file."""
