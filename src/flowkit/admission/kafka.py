"""Admission over Kafka: requests and reports from topics, and the events about requests to topics.

Names, fields and texts are those of the admission specification, section 4. The records are untrusted,
because any program may write to the topics: what the queue stores of one is checked and bounded, and one
that is malformed goes to a topic of its own. Offsets are committed after what the records change is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, get_args

from cachetools import LRUCache
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, TypeAdapter, ValidationError

from flowkit import reason_codes
from flowkit.admission import rules
from flowkit.admission.fields import ExecutionFields, NewId, RequestId, Tenant, UserId
from flowkit.admission.models import ENDED, RUNNING, Door, Kind, Report, Request, State
from flowkit.admission.queue import owner
from flowkit.attempt.background import BackgroundLoop, Expected, OutageLogger
from flowkit.bridge.kafka.topics import TopicCreator, check_distinct, check_topic
from flowkit.core.utils import Fields, dumps
from flowkit.errors import (
    CommandTooLarge,
    ConfigError,
    KafkaUnavailable,
    SendUncertain,
    StoreRefused,
    StoreUnavailable,
    TaskIdTaken,
)
from flowkit.limits import CANCEL_REASON_CHARS, KAFKA_RECORD_BYTES, LAST_ERROR_CHARS
from flowkit.models.admission import DEFAULT_TENANT, RANKS, Priority
from flowkit.text import clean, shorten, shown, truncate
from flowkit.validation.arguments import require
from flowkit.validation.invalid import describe, problem_with
from flowkit.validation.json_keys import load_json
from flowkit.validation.values import NAME, one_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from aiokafka import ConsumerRecord

    from flowkit.admission.queue import AdmissionQueue
    from flowkit.bridge.kafka.clients import KafkaConnection
    from flowkit.bridge.kafka.producer import Producer
    from flowkit.config import CoordinatorConfig

    Record: TypeAlias = ConsumerRecord[bytes, bytes]
    Place = tuple[str, int, int]

_logger = logging.getLogger("flowkit.admission")

# --- topics -------------------------------------------------------------------------------------------------------

Style = Literal["per_type", "shared"]

GROUP: Final = "execution-coordinator"
EVENTS_TOPIC: Final = "execution_events"
RESULTS_TOPIC: Final = "execution_results"
"""In the shared style, executors may report here, too."""
COMMANDS_TOPIC: Final = "saga_commands"

COMMANDS: Final = (rules.CREATE_POD, rules.DELETE_POD)
CONSUMED: Final = (rules.REQUESTED, rules.COMPLETED, rules.FAILED, rules.TIMEOUT, rules.CANCELLED)
OPTIONAL: Final = (rules.QUEUED, rules.STARTED, rules.RUNNING)
PRODUCED: Final = (rules.ACCEPTED, rules.FAILED, rules.TIMEOUT, rules.CANCELLED, *OPTIONAL, *COMMANDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class TopicRights:
    """What the writers of a topic may do. By default, everything."""

    max_priority: Priority | str = Priority.CRITICAL
    """The most urgent band of their requests. One that asks for a more urgent band gets this one."""
    tenants: Sequence[str] = ()
    """The tenants whose requests they may submit, end and cancel. A request that names no tenant is that of
    the first one. Empty for all tenants, with `default` as the first one."""

    def allow(self, tenant: str) -> bool:
        """Return whether the writers may submit, end and cancel the requests of a tenant."""
        return not self.tenants or tenant in self.tenants

    def limit(self, priority: Priority) -> Priority:
        """Return the band that a request gets which asks for this one."""
        return max(priority, Priority(self.max_priority), key=lambda each: each.rank)


EVERYTHING: Final = TopicRights()
_TENANT: Final[TypeAdapter[str]] = TypeAdapter(Tenant)


@dataclass(frozen=True, kw_only=True)
class AdmissionTopics:
    """The topics of an admission queue, its consumer group, and which events it sends. Raises ConfigError."""

    style: Style = "per_type"
    """`per_type`: each type of events has a topic with its name. `shared`: all executions share a topic for
    events and one for commands, and a field says which type an event has."""
    prefix: str = ""
    """What every topic begins with, separator included. The original system used `pref`."""
    group: str | None = None
    """The consumer group. By default, each queue has one of its own, so that each reads every record of its topics."""
    dead_letters: str = "dead_letters"
    """The topic of malformed records, without the prefix."""
    events: Collection[str] = frozenset(OPTIONAL)
    """Which of the optional events are sent."""
    rights: Mapping[str, TopicRights] = field(default_factory=dict)
    """What the writers of topics may do, by the name of the topic without the prefix. Those of others may
    do everything."""

    def __post_init__(self) -> None:
        """Check names, events and rights."""
        group = GROUP if self.group is None else self.group
        require(
            problem_with(self.style, one_of(*get_args(Style)), "AdmissionTopics.style"),
            problem_with(group, NAME, "AdmissionTopics.group"),
        )
        if unknown := sorted(set(self.events) - set(OPTIONAL)):
            raise ConfigError(
                f"AdmissionTopics.events has {unknown[0]!r}; the optional events are {', '.join(OPTIONAL)}"
            )
        named = {f"the topic of {kind}": self.topic(kind) for kind in (*CONSUMED, *PRODUCED)}
        for setting, topic in {**named, "dead_letters": self.dead_letter_topic}.items():
            check_topic(f"AdmissionTopics: {setting}", topic)
        distinct = {topic: setting for setting, topic in named.items()}
        check_distinct(
            [
                *((setting, topic) for topic, setting in distinct.items()),
                ("dead_letters", self.dead_letter_topic),
            ]
        )
        for topic, rights in self.rights.items():
            _check_rights(topic, rights, [each.removeprefix(self.prefix) for each in self.consumed()])

    def rights_of(self, topic: str) -> TopicRights:
        """Return what the writers of a topic, whose name has the prefix, may do."""
        return self.rights.get(topic.removeprefix(self.prefix), EVERYTHING)

    def group_of(self, queue: str) -> str:
        """Return the consumer group of a queue."""
        return f"{GROUP}-{queue}" if self.group is None else self.group

    @property
    def dead_letter_topic(self) -> str:
        """The topic of malformed records."""
        return self.prefix + self.dead_letters

    def topic(self, event_type: str) -> str:
        """Return the topic of a type of events."""
        if self.style == "per_type":
            return self.prefix + event_type
        return self.prefix + (COMMANDS_TOPIC if event_type in COMMANDS else EVENTS_TOPIC)

    def sends(self, event_type: str) -> bool:
        """Return whether events of this type are sent."""
        return event_type not in OPTIONAL or event_type in self.events

    def consumed(self) -> tuple[str, ...]:
        """Return the topics with requests and reports."""
        results = (self.prefix + RESULTS_TOPIC,) if self.style == "shared" else ()
        return (*dict.fromkeys(map(self.topic, CONSUMED)), *results)

    def produced(self) -> tuple[str, ...]:
        """Return the topics to which events, commands and malformed records are sent."""
        sent = (self.topic(kind) for kind in PRODUCED if self.sends(kind))
        return (*dict.fromkeys(sent), self.dead_letter_topic)

    async def create(self, connection: KafkaConnection, cfg: CoordinatorConfig) -> None:
        """Create the topics that do not exist, as the settings `kafka_…` say. Raise KafkaUnavailable."""
        wanted = dict.fromkeys((*self.consumed(), *self.produced()), cfg.kafka_cmd_partitions)
        await TopicCreator(connection, cfg).ensure({**wanted, self.dead_letter_topic: 1})


def _check_rights(topic: str, rights: TopicRights, topics: Sequence[str]) -> None:
    if topic not in topics:
        raise ConfigError(
            f"AdmissionTopics.rights names the topic {shown(topic)}; choose from {', '.join(topics)}"
        )
    if rights.max_priority not in RANKS:
        given, bands = shown(rights.max_priority), ", ".join(RANKS)
        raise ConfigError(f"the max_priority of the topic {topic} is {given}; choose from {bands}")
    if isinstance(rights.tenants, str):
        raise ConfigError(
            f"the tenants of the topic {topic} are {shown(rights.tenants)}; pass a list of names"
        )
    for tenant in rights.tenants:
        try:
            _TENANT.validate_python(tenant)
        except ValidationError as error:
            raise ConfigError(describe(error, f"a tenant of the topic {topic}")) from None


# --- records ------------------------------------------------------------------------------------------------------

ANONYMOUS: Final = "anonymous"
"""The user of requests that name none."""
DEAD_LETTER_BYTES: Final = 900_000
"""How much of a malformed record its dead letter has."""
_DEAD_KEY_BYTES: Final = 1_000
_LOG_SEC: Final = 60.0
"""Malformed records are logged once in this time, for each reason."""
_SHOWN_CHARS: Final = 300
OWN_HEADER: Final = "flowkit-queue"
"""The header by which a queue recognises its own events when they return. Its value is the name of the queue."""
POLL_SEC: Final = 1.0
"""How often events are looked for that this process has not stored."""
TAKE_OVER_SEC: Final = 2.0
"""After which time a process sends the events of requests of others."""
_SLOW_SEC: Final = 10.0
_BATCH: Final = 100
"""Most requests whose events are read together."""
_REMEMBERED: Final = 10_000
NUMBERED: Final = {
    0: Priority.CRITICAL,
    1: Priority.HIGH,
    5: Priority.NORMAL,
    8: Priority.LOW,
    10: Priority.BACKGROUND,
}
"""The priorities by the numbers that older events have."""


def _by_number(value: Any) -> Any:
    """Return the priority with a number. A bool is no number."""
    return NUMBERED.get(value, value) if type(value) is int else value


def _null_is(default: Any) -> BeforeValidator:
    """Let null, and an empty text, mean the default of a field."""
    return BeforeValidator(lambda value: default if value is None or value == "" else value)


Band = Annotated[Priority, BeforeValidator(_by_number), _null_is(Priority.NORMAL)]
Text = Annotated[str, Field(max_length=1_000)]
Whole = Annotated[int, Field(ge=0, le=2**53, strict=True)]
ExitCode = Annotated[int, Field(ge=-(2**31), lt=2**31, strict=True)]


class _EventPart(BaseModel):
    """A part of an event. Fields that it does not name are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Metadata(_EventPart):
    """Who asks, and from which service."""

    service_name: Text | None = None
    service_version: Text | None = None
    environment: Text | None = None
    correlation_id: Text | None = None
    ip_address: Text | None = None
    user_agent: Text | None = None
    user_id: Annotated[UserId, _null_is(ANONYMOUS)] = ANONYMOUS
    tenant: Annotated[Tenant | None, _null_is(None)] = None


class ResourceUsage(_EventPart):
    """What an execution has used."""

    execution_time_wall_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    cpu_time_jiffies: Whole = 0
    clk_tck_hertz: Whole = 0
    peak_memory_kb: Whole = 0


class IncomingEvent(_EventPart):
    """What all events have that the queue receives."""

    execution_id: RequestId
    event_id: Text | None = None
    metadata: Annotated[Metadata, _null_is(Metadata())] = Metadata()


class Requested(IncomingEvent, ExecutionFields):
    """`execution_requested`: an execution asks for admission."""

    execution_id: NewId
    priority: Band = Priority.NORMAL

    def request(self, rights: TopicRights = EVERYTHING) -> Request:
        """Return the request for the queue, as the writers of its topic may make it.

        Raise BadRecord if they may not.
        """
        tenant = self.metadata.tenant or next(iter(rights.tenants), DEFAULT_TENANT)
        if not rights.allow(tenant):
            text = "metadata.tenant: the writers of this topic may not submit requests of this tenant"
            raise BadRecord("tenant_not_permitted", text)
        priority = rights.limit(self.priority)
        body = self.model_dump(mode="json", exclude={"event_id", "metadata"})
        return Request(
            execution_id=self.execution_id,
            user_id=self.metadata.user_id,
            door=Door.KAFKA,
            tenant=tenant,
            kind=Kind.EXECUTION,
            priority=priority,
            body={**body, "priority": priority.value},
            metadata=self.metadata.model_dump(exclude_unset=True, exclude_none=True),
            request_id=self.event_id,
        )


class Ended(IncomingEvent):
    """An event that ends an execution."""

    resource_usage: ResourceUsage | None = None

    def report(self) -> Report:
        """Return the report for the queue. It has the fields of the event without the outputs."""
        raise NotImplementedError

    def _fields(self) -> Fields:
        return self.model_dump(mode="json", include={"exit_code", "timeout_seconds", "resource_usage"})


class Completed(Ended):
    """`execution_completed`."""

    exit_code: Annotated[ExitCode, _null_is(0)] = 0

    def report(self) -> Report:
        """Return the report for the queue."""
        return Report(state=State.COMPLETED, fields=self._fields())


class Failed(Ended):
    """`execution_failed`. A part of the system that has these events sends no `error_message`."""

    exit_code: Annotated[ExitCode, _null_is(1)] = 1
    error_type: Text | None = None
    error_message: str | None = None
    stderr: str | None = None

    def report(self) -> Report:
        """Return the report for the queue."""
        text = self.error_message or self.stderr or f"exit code {self.exit_code}"
        return Report(
            state=State.FAILED,
            reason=self.error_type or reason_codes.ERROR,
            error=truncate(text, LAST_ERROR_CHARS),
            fields=self._fields(),
        )


class TimedOut(Ended):
    """`execution_timeout`."""

    timeout_seconds: Whole | None = None

    def report(self) -> Report:
        """Return the report for the queue."""
        limit = "its time" if self.timeout_seconds is None else f"{self.timeout_seconds} s"
        return Report(
            state=State.TIMEOUT,
            reason=reason_codes.TIMEOUT,
            error=f"the execution took longer than {limit}",
            fields=self._fields(),
        )


class CancelEvent(Ended):
    """`execution_cancelled`: an execution has been stopped, or is to be."""

    reason: str | None = None
    cancelled_by: Annotated[UserId | None, _null_is(None)] = None
    force_terminated: Annotated[StrictBool, _null_is(False)] = False
    """Whether the executor has stopped it already."""

    @property
    def why(self) -> str:
        """The reason that was given."""
        return truncate(self.reason or reason_codes.USER_REQUEST, CANCEL_REASON_CHARS)

    @property
    def by(self) -> str:
        """Who has cancelled."""
        return self.cancelled_by or self.metadata.user_id

    def report(self) -> Report:
        """Return the report for the queue."""
        return Report(
            state=State.CANCELLED, reason=reason_codes.USER_REQUEST, error=self.why, fields=self._fields()
        )


MODELS: Final[dict[str, type[Requested | Ended]]] = {
    rules.REQUESTED: Requested,
    rules.COMPLETED: Completed,
    rules.FAILED: Failed,
    rules.TIMEOUT: TimedOut,
    rules.CANCELLED: CancelEvent,
}
"""The events that the queue reads."""


class BadRecord(ValueError):
    """A record that is malformed."""

    def __init__(self, reason: str, text: str) -> None:
        self.reason = reason
        """One of a few words, for counters."""
        super().__init__(text)


def read(topics: AdmissionTopics, topic: str, value: bytes | None) -> Requested | Ended | None:
    """Return the event of a record; None for one that is not for the queue. Raise BadRecord."""
    found = _json_object(value)
    kind = _kind_of(topics, topic, found.get("event_type"))
    if kind is None:
        return None
    try:
        return MODELS[kind].model_validate(found)
    except ValidationError as error:
        problem = describe(error, hides=lambda path, value: True, quotes=False)
        raise BadRecord("invalid_field", shorten(clean(problem), _SHOWN_CHARS)) from None


def _json_object(value: bytes | None) -> Fields:
    if not value:
        raise BadRecord("no_value", "the record has no value")
    if len(value) > KAFKA_RECORD_BYTES:
        raise BadRecord("too_large", f"the record has more than {KAFKA_RECORD_BYTES:,} bytes")
    try:
        found = load_json(value, strict=True)
    except ValueError as error:
        raise BadRecord("not_json", shorten(clean(str(error)), _SHOWN_CHARS)) from None
    if not isinstance(found, dict):
        raise BadRecord("not_an_object", "the record is not a JSON object")
    return found


def _kind_of(topics: AdmissionTopics, topic: str, given: Any) -> str | None:
    """Return the type of an event; None for one that the queue does not read. In its own topic, it need not say so."""
    if topics.style == "shared":
        if not isinstance(given, str):
            raise BadRecord("no_event_type", "event_type is missing; this topic has events of several types")
        if given == rules.REQUESTED and topic == topics.prefix + RESULTS_TOPIC:
            raise BadRecord("wrong_event_type", f"this topic has reports; send requests to {EVENTS_TOPIC}")
        return given if given in MODELS else None
    kind = topic.removeprefix(topics.prefix)
    if given not in (None, kind):
        raise BadRecord("wrong_event_type", f"event_type must be {kind!r} in this topic")
    return kind


def why_without_effect(item: Fields | None, event: Ended, rights: TopicRights = EVERYTHING) -> str | None:
    """Return why a report about a stored request has no effect, in a few words; None if it has one."""
    if item is None or item["state"] == State.RESERVING:
        return "unknown"
    if not rights.allow(item["tenant"]):
        return "tenant_not_permitted"
    if item["state"] in ENDED:
        return "ended"
    if isinstance(event, CancelEvent):
        return None
    if item["kind"] == Kind.TASK:
        return "task"  # Temporal reports the end of a task
    return None if item["state"] in RUNNING else "not_active"


class _Effect:
    """What a report does to a stored request. It is decided anew if the request changes meanwhile."""

    def __init__(self, event: Ended, rights: TopicRights, at: float, source: str) -> None:
        """`source` is the same for every delivery of the event."""
        self._event = event
        self._rights = rights
        self._at = at
        self._source = source
        self.missing: str | None = None
        """Why the report has no effect."""
        self.cancels = False
        """Whether the request is to be cancelled, and ends when that is confirmed, unless it waits."""

    def end_of(self, item: Fields | None) -> tuple[Report, Sequence[Fields]] | None:
        """Return how the request ends, and the command that stops an execution that is cancelled.

        None if it does not end.
        """
        event = self._event
        self.missing, self.cancels = why_without_effect(item, event, self._rights), False
        if item is None or self.missing is not None:
            return None
        if not isinstance(event, CancelEvent):
            return event.report(), ()
        cancel = item.get("cancel")
        runs = item["state"] in RUNNING and item["kind"] == Kind.EXECUTION
        if runs and event.force_terminated:
            return event.report(), () if cancel else [rules.delete_pod(item, self._at, event.why)]
        if runs and cancel:
            return None if cancel.get("source") == self._source else (event.report(), ())
        self.cancels = True
        return None


def is_own(record: Record, queue: str) -> bool:
    """Return whether this queue has sent a record.

    Its events return to it where they share topics with those of executors.

    About an earlier try of an id, such an event must not end the present one. To the queue, what another
    one has sent is a record as any other.
    """
    return (OWN_HEADER, queue.encode()) in record.headers


def in_order(records: Iterable[Record]) -> list[Record]:
    """Return records of several partitions by their time. Those of one partition keep their order."""
    latest: dict[tuple[str, int], int] = defaultdict(int)
    timed = []
    for record in records:
        place = record.topic, record.partition
        latest[place] = max(latest[place], record.timestamp)
        timed.append((latest[place], record))
    return [record for _, record in sorted(timed, key=lambda each: each[0])]


class AdmissionConsumer:
    """Passes requests and reports to the queue. `handle` is for a `RecordConsumer` of the topics `consumed()`.

    Records of one execution are handled in order, those of different ones concurrently. If MongoDB does not respond,
    `handle` raises StoreUnavailable; when it is called with the same records again, it continues where it stopped.
    """

    def __init__(
        self,
        queue: AdmissionQueue,
        topics: AdmissionTopics,
        producer: Producer,
    ) -> None:
        self._queue = queue
        self._topics = topics
        self._producer = producer
        self._handled: set[Place] = set()
        """The records of an unfinished poll that were handled."""
        self._logged: dict[str, float] = {}
        """When a malformed record was last logged, by reason."""
        self._alone = asyncio.Lock()

    async def handle(self, records: Sequence[Record]) -> None:
        """Handle one poll. Return once everything is stored."""
        chains: dict[str | Place, list[tuple[Record, Requested | Ended | BadRecord]]] = {}
        for record in in_order(records):
            if is_own(record, self._queue.store.queue):
                self._queue.counts["ignored", "own_event"] += 1
                continue
            try:
                event = read(self._topics, record.topic, record.value)
            except BadRecord as bad:
                chains[_place(record)] = [(record, bad)]
                continue
            if event is None:
                self._queue.counts["ignored", "other_event_type"] += 1
            else:
                chains.setdefault(event.execution_id, []).append((record, event))
        results = await asyncio.gather(*map(self._handle_chain, chains.values()), return_exceptions=True)
        _raise_first(results)
        self._handled.clear()

    async def _handle_chain(self, chain: Sequence[tuple[Record, Requested | Ended | BadRecord]]) -> None:
        for record, event in chain:
            if _place(record) in self._handled:
                continue
            try:
                if isinstance(event, BadRecord):
                    raise event
                await self._apply(record, event)
            except BadRecord as error:
                await self._set_aside(record, error)
            except StoreRefused as error:
                await self._set_aside(record, BadRecord("refused", str(error)))
            self._handled.add(_place(record))

    async def _apply(self, record: Record, event: Requested | Ended) -> None:
        rights = self._topics.rights_of(record.topic)
        if isinstance(event, Requested):
            await self._submit(record, event.request(rights))
            return
        source = event.event_id or "/".join(map(str, _place(record)))
        effect = _Effect(event, rights, self._queue.clock(), source)
        await self._queue.end(event.execution_id, effect.end_of)
        if effect.missing is not None:
            self._queue.counts["ignored", effect.missing] += 1
        elif effect.cancels and isinstance(event, CancelEvent):
            await self._queue.cancel(
                event.execution_id, reason=event.why, by=event.by, source=source, within=rules.STOP_SEC
            )

    async def _submit(self, record: Record, request: Request) -> None:
        """Submit a request. Raise BadRecord, or StoreRefused."""
        try:
            await self._submit_or_retry(request)
        except StoreRefused as error:
            await self._fail(record, request, error)
            raise
        except TaskIdTaken as error:
            raise BadRecord("id_taken", str(error)) from None
        except ConfigError as error:
            raise BadRecord("invalid_field", str(error)) from None

    async def _submit_or_retry(self, request: Request) -> None:
        """Submit a request. What MongoDB refuses fails the whole group of requests, so each is tried alone then."""
        try:
            await self._queue.submit(request)
        except StoreRefused:
            async with self._alone:
                await self._queue.submit(request)

    async def _fail(self, record: Record, request: Request, error: StoreRefused) -> None:
        """Send the event of a failed request, which the queue cannot store with its event.

        If there is a request with this id, which may be that of another user, consumers would take the
        event for its end.
        """
        if await self._queue.store.load([request.execution_id]):
            return
        item: Fields = {"_id": request.execution_id, "v": 0, "user_id": request.user_id, "body": {}}
        item["metadata"] = request.metadata
        text, at = str(error), self._queue.clock()
        event = rules.failed(item, at, "system_error", text, f"Failed to queue execution: {text}")
        value = dumps(rules.envelope(item, event))
        topic, key = self._topics.topic(rules.FAILED), request.execution_id.encode()
        await self._send(record, topic, key, value, headers=own_headers(self._queue, rules.FAILED))

    async def _set_aside(self, record: Record, error: BadRecord) -> None:
        """Send a malformed record to the topic of dead letters."""
        headers = {
            "topic": record.topic,
            "partition": str(record.partition),
            "offset": str(record.offset),
            "reason": error.reason,
            "error": str(error),
        }
        sent = await self._send(
            record,
            self._topics.dead_letter_topic,
            None if record.key is None else record.key[:_DEAD_KEY_BYTES],
            b"" if error.reason == "too_large" else (record.value or b"")[:DEAD_LETTER_BYTES],
            headers=[(name, clean(text).encode()) for name, text in headers.items()],
        )
        if sent:
            self._queue.counts["dead_letter", error.reason] += 1
            self._log(error.reason, record, error)

    async def _send(
        self,
        record: Record,
        topic: str,
        key: bytes | None,
        value: bytes,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> bool:
        """Send what a record that cannot be handled leads to, or drop it, since the partition must go on.

        Return whether it was sent.
        """
        try:
            await self._producer.send(topic, key, value, headers=headers)
        except (CommandTooLarge, KafkaUnavailable) as error:
            self._queue.counts["dropped", ""] += 1
            self._log("dropped", record, error)
            return False
        return True

    def _log(self, reason: str, record: Record, error: Exception) -> None:
        now = time.monotonic()
        if now - self._logged.get(reason, -_LOG_SEC) >= _LOG_SEC:
            self._logged[reason] = now
            _logger.warning(
                "a malformed record was %s (topic %s, partition %d, offset %d): %s",
                *("dropped" if reason == "dropped" else "set aside", *_place(record), error),
            )


def _raise_first(results: Iterable[BaseException | None]) -> None:
    for error in results:
        if error is not None:
            raise error


def _place(record: Record) -> Place:
    return record.topic, record.partition, record.offset


# --- sending ------------------------------------------------------------------------------------------------------


def own_headers(queue: AdmissionQueue, kind: str) -> list[tuple[str, bytes]]:
    """Return the headers of an event that a queue sends.

    Commands have none, since executors may copy them to their reports.
    """
    return [(OWN_HEADER, queue.store.queue.encode())] if kind in MODELS else []


def _try_of(item: Fields) -> tuple[str, str]:
    """Return the id and the place of a request. One that is submitted again gets another place."""
    return item["_id"], item["place"]


def _starts(item: Fields) -> bool:
    """Return whether the command that starts an execution has not been sent."""
    return any(event["type"] == rules.CREATE_POD for event in item["events"][item["sent"] :])


class EventRelay:
    """Sends the events that requests carry, those of one execution in order, each at least once and with one id.

    Each process sends the events of the requests that it has admitted or started, and those that others have left
    unsent for some seconds. Events are kept for it once `AdmissionStore.send_events` was called.
    """

    def __init__(self, queue: AdmissionQueue, topics: AdmissionTopics, producer: Producer) -> None:
        self._queue = queue
        self._topics = topics
        self._producer = producer
        self._wanted = asyncio.Event()
        self._sent: LRUCache[tuple[str, str], int] = LRUCache(_REMEMBERED)
        """Up to which number events were sent lately, by the id and the place of their request."""
        queue.outbox.has_relay = True
        self._outage = OutageLogger("send the events of admission")
        errors = (StoreUnavailable, KafkaUnavailable, SendUncertain)
        self._loop = BackgroundLoop(
            "events of admission", self._step, expected=Expected(errors=errors, log=self._outage.failed)
        )
        self.health = self._loop.health

    def notify(self) -> None:
        """Send at once what there is to send."""
        self._wanted.set()

    async def run(self) -> None:
        """Run until cancelled. Outages are logged once, and the work is repeated."""
        await self._loop.run()

    async def _step(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_SEC):
                await self._wanted.wait()
        announced = self._wanted.is_set()
        self._wanted.clear()
        await self.relay(looks=not announced)
        self._outage.recovered()

    async def relay(self, *, looks: bool = True) -> int:
        """Send the events that are due. Return their number.

        Those that this process has just stored are at hand. The others are read, with `looks` or if there may be some.
        """
        items, others = self._queue.outbox.take()
        count = await self._send_all(items)
        if looks or others:
            found = await self._queue.store.unsent(_BATCH)
            count += await self._send_all([item for item in found if self._is_due(item)])
            if len(found) == _BATCH and count:
                self._queue.outbox.add_others()
                self.notify()
        return count

    async def _send_all(self, items: Sequence[Fields]) -> int:
        """Send the events of requests, and note what was sent. Return the number of events."""
        if not items:
            return 0
        for item in items:
            item["sent"] = max(item["sent"], self._sent.get(_try_of(item), 0))
        await self._add_bodies(items)
        sent: dict[tuple[str, str], int] = {}
        late = asyncio.get_running_loop().call_later(_SLOW_SEC, self._note_slowness)
        try:
            results = await asyncio.gather(
                *(self._send(item, sent) for item in items), return_exceptions=True
            )
        finally:
            late.cancel()
        self._sent.update(sent)
        await self._queue.store.mark_sent(sent)
        _raise_first(results)
        return sum(sent[_try_of(item)] - item["sent"] for item in items)

    async def _add_bodies(self, items: Sequence[Fields]) -> None:
        """Read what those executions ask for whose commands are to be sent, unless it is at hand."""
        lacking = [item for item in items if "body" not in item and _starts(item)]
        bodies = await self._queue.store.bodies([item["_id"] for item in lacking]) if lacking else {}
        for item in lacking:
            item["body"] = bodies.get(item["_id"], {})

    def _is_due(self, item: Fields) -> bool:
        """Return whether this process sends the events of a request: it is its own, or its process does not
        send them.
        """
        own = owner(item.get("slot") or item["place"]) == self._queue.session.id
        waiting: Sequence[Fields] = item["events"][item["sent"] :]
        oldest = min((each["at"] for each in waiting), default=0.0)
        return own or oldest <= self._queue.clock() - TAKE_OVER_SEC

    def _note_slowness(self) -> None:
        error = KafkaUnavailable("Kafka has not confirmed events for a while; they stay stored")
        self._outage.failed(error)
        self._loop.failed(error)

    async def _send(self, item: Fields, sent: dict[tuple[str, str], int]) -> None:
        """Send the events of one execution, and note in `sent` how many were sent so far."""
        key, events = _try_of(item), item["events"]
        sent[key] = item["sent"]
        for event in events[item["sent"] :]:
            if not await self._send_event(item, event):
                sent[key] = len(events)
                return
            sent[key] += 1

    async def _send_event(self, item: Fields, event: Fields) -> bool:
        """Send an event, or skip it. Return False if the execution cannot be started, so that the others are void."""
        kind = event["type"]
        if not self._topics.sends(kind) or (kind == rules.CREATE_POD and not item["body"]):
            return True  # an execution without a body has ended long ago
        value = dumps(rules.envelope(item, event))
        try:
            headers = own_headers(self._queue, kind)
            await self._producer.send(self._topics.topic(kind), item["_id"], value, headers=headers)
        except CommandTooLarge as error:
            if kind == rules.CREATE_POD:
                await self._give_up(item, error)
                return False
            _logger.warning("the event %s of the request %s is not sent: %s", kind, item["_id"], error)
        return True

    async def _give_up(self, item: Fields, error: Exception) -> None:
        """End an execution whose command cannot be sent."""
        text, at = str(error), self._queue.clock()
        stderr = f"Failed to schedule execution: {text}"
        await self._queue.report(
            item["_id"],
            Report(state=State.FAILED, reason=reason_codes.START_FAILED, error=text),
            events=[rules.failed(item, at, "system_error", text, stderr)],
        )
