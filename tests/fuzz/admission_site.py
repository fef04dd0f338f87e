"""One deployment with an admission queue: its processes and its engine, its callers, an executor, and what they see."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import time
import uuid
from collections import Counter, defaultdict
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from aiokafka import AIOKafkaConsumer
from pymongo.errors import PyMongoError
from temporalio.service import RPCError, RPCStatusCode
from tests.admission.events import requested
from tests.fuzz.admission_reference import (
    AGAIN,
    BANDS,
    STATUSES,
    Caps,
    Event,
    Own,
    Seen,
    Submit,
    arrow_problem,
    rejection_problem,
)
from tests.integration.chaos.cluster import ManagedProcess, periodically
from tests.integration.harness import Harness, eventually, node
from tests.tenants import create_tenants

from flowkit import Admission, CoordinatorConfig
from flowkit.admission.kafka import AdmissionTopics
from flowkit.bridge.kafka.clients import KafkaConnection
from flowkit.bridge.kafka.offsets import Offsets
from flowkit.bridge.kafka.producer import Producer
from flowkit.connection import TemporalUnavailable
from flowkit.core.utils import dumps
from flowkit.errors import (
    AdmissionRejected,
    FlowKitError,
    StoreUnavailable,
    TaskIdTaken,
)
from flowkit.local.ports import free_port
from flowkit.server.tokens import Right

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from flowkit.admission.kafka import Style

Fields = dict[str, Any]

ACTORS: Final = (7, 8)
"""Users of the tenant `default` that have tokens of their own."""
DEAF: Final = "-deaf-"
"""Part of the ids of executions whose executor does not stop when it is asked to."""
GATE: Final = "gate"
"""The node of every task, which waits for a decision."""


class AdmissionProgram(ManagedProcess):
    """A process of the queue."""

    module = "tests.fuzz.admission_process"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer to a call over HTTP, with the number of calls that it took."""

    status: int
    body: Fields
    tries: int

    @property
    def code(self) -> str:
        """The code of an error."""
        return str(self.body["error"]["code"])


@dataclass(kw_only=True)
class Journal:
    """What callers, the executor and readers of the topics know."""

    states: dict[str, str] = field(default_factory=dict)
    """The last state of each request that was seen."""
    again: set[str] = field(default_factory=set)
    """Requests that somebody may submit again."""
    events: defaultdict[str, dict[str, Event]] = field(default_factory=lambda: defaultdict(dict))
    """By request and event id."""
    started_at: dict[str, float] = field(default_factory=dict)
    """When the executor was told to start an execution."""
    scripts: dict[str, str] = field(default_factory=dict)
    """What the executor was told to run."""
    released_at: dict[str, float] = field(default_factory=dict)
    """When the end of an execution was reported first."""
    own: set[str] = field(default_factory=set)
    """The ids of the events that clients and executors have sent."""
    dead: list[str] = field(default_factory=list)
    """Ids of the executions of records that were set aside."""
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class Site:
    """A deployment. It shares its servers, and its Temporal namespace, with others."""

    def __init__(
        self, name: str, harness: Harness, folder: Path, kafka: str, *, style: Style, session_sec: float
    ) -> None:
        self.name = name
        self.harness = harness
        self.journal = Journal()
        self.topics = AdmissionTopics(style=style, prefix=f"{harness.database}.")
        self._connection = KafkaConnection(bootstrap=kafka)
        self._cfg = CoordinatorConfig(kafka_bootstrap=kafka, kafka_cmd_partitions=2)
        self._producer = Producer(self._connection)
        config = folder / f"{name}.json"
        config.write_text(json.dumps({"kafka_bootstrap": kafka, "kafka_cmd_partitions": 2}), encoding="utf-8")
        harness.environment["ADMISSION_SESSION_SEC"] = str(session_sec)
        command = (
            "admission",
            "run",
            "--kafka",
            "--config",
            str(config),
            *("--topics", style),
            "--topic-prefix",
            self.topics.prefix,
        )
        ports = [free_port(), free_port()]
        self._urls = itertools.cycle([f"http://127.0.0.1:{port}/api/v1/" for port in ports])
        self.dispatchers = [
            AdmissionProgram(harness, folder, f"{name}-admission-{port}", *command, "--port", str(port))
            for port in ports
        ]
        self.engine = ManagedProcess(harness, folder, f"{name}-engine", "engine")
        self._http: aiohttp.ClientSession
        self._operator = ""
        self._actors: dict[str, str] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the processes and the executor."""
        tenants = await create_tenants(self.harness.db, first=ACTORS[0], second=ACTORS[1])
        self._operator = tenants.operator
        self._actors = {
            str(ACTORS[0]): tenants.first[Right.ADMISSION],
            str(ACTORS[1]): tenants.second[Right.ADMISSION],
        }
        await self.topics.create(self._connection, self._cfg)
        async with AsyncExitStack() as stack:
            timeout = aiohttp.ClientTimeout(10)
            self._http = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
            stack.push_async_callback(self._producer.stop)
            group = await stack.enter_async_context(asyncio.TaskGroup())
            tasks = [group.create_task(work) for work in (self._supervise(), self._read())]
            await eventually(self._is_up)
            yield
            for task in tasks:
                task.cancel()

    async def _is_up(self) -> bool:
        answer = await self.call("GET", "admin/executions/queue")
        return answer.status == 200

    async def _supervise(self) -> None:
        """Start processes that have ended, until cancelled."""

        async def look() -> None:
            for process in (*self.dispatchers, self.engine):
                process.ensure_started()

        await periodically(0.1, look)

    async def stop(self) -> None:
        """Stop the processes of the queue in an orderly way."""
        for each in self.dispatchers:
            each.end(signal.SIGTERM, 3_600.0)

        async def look() -> bool:
            return not any(each.runs for each in self.dispatchers)

        await eventually(look)

    def close(self) -> None:
        """Kill all processes."""
        for each in (*self.dispatchers, self.engine):
            each.close()

    # --- HTTP

    async def call(
        self,
        method: str,
        path: str,
        body: Fields | None = None,
        *,
        actor: str | None = None,
        key: str | None = None,
    ) -> Answer:
        """Call one process after the other until one answers."""
        headers = {"Authorization": f"Bearer {self._actors[actor] if actor else self._operator}"}
        if key is not None:
            headers["Idempotency-Key"] = key
        tries = 0

        async def look() -> Answer | None:
            nonlocal tries
            tries += 1
            url = next(self._urls) + path
            try:
                async with self._http.request(method, url, json=body, headers=headers) as response:
                    text = await response.text()
            except (aiohttp.ClientError, TimeoutError):
                return None
            if response.status >= 500:
                if response.status != 503:
                    self.journal.problems.append(f"{method} {path} {body} has the response {text}")
                return None
            return Answer(status=response.status, body=json.loads(text), tries=tries)

        return await eventually(look)

    async def submit(self, wanted: Submit, *, actor: str | None = None, key: str | None = None) -> Answer:
        """Submit a request over HTTP, as its user or as an operator."""
        body = self._body_of(wanted)
        if not actor:
            body |= {"user_id": wanted.owner[2], "tenant": wanted.owner[1]}
        if key is not None:
            del body["execution_id"]
        return await self.call("POST", "execute", body, actor=actor, key=key)

    def _body_of(self, wanted: Submit) -> Fields:
        who: Fields = {"execution_id": wanted.id, "priority": BANDS[wanted.band]}
        return who | (task_of(wanted.id) if wanted.is_task else {"script": wanted.id, "timeout_seconds": 600})

    async def set_limits(self, caps: Caps) -> None:
        """Set the limits of the queue."""

        def shown(own: Mapping[str, Own]) -> Fields:
            return {name: {"max_total": each.total, "max_active": each.active} for name, each in own.items()}

        body = {
            "max_pending": caps.pending,
            "max_per_user": caps.per_user,
            "max_active": caps.active,
            "max_active_per_user": caps.active_per_user,
            "stale_sec": caps.stale_sec,
            "tenants": shown(caps.tenants),
            "users": shown(caps.users),
        }
        answer = await self.call("PUT", "admin/limits", body)
        assert answer.status == 200, answer

    # --- Python

    async def submit_by_call(self, wanted: Submit) -> tuple[str, int]:
        """Submit a task by a call of Python. Return the answer, and the number of calls that it took."""
        admit = Admission(user_id=wanted.owner[2], tenant=wanted.owner[1], priority=BANDS[wanted.band])
        tries = 0

        async def look() -> str | None:
            nonlocal tries
            tries += 1
            try:
                await self.harness.coordinator.create_task(**task_of(wanted.id), admit=admit)
            except AdmissionRejected as error:
                return error.reason
            except TaskIdTaken:
                return "taken"
            except (StoreUnavailable, TemporalUnavailable):
                return None
            return "accepted"

        return await eventually(look), tries

    async def cancel_by_call(self, id: str) -> str:
        """Cancel a task by a call of Python."""

        async def look() -> str | None:
            try:
                return "requested" if await self.harness.coordinator.cancel_task(id) else "no"
            except (StoreUnavailable, TemporalUnavailable):
                return None

        return await eventually(look)

    async def terminate(self, id: str) -> None:
        """Terminate the workflow of a task, as the Web UI of Temporal does."""

        async def look() -> bool:
            try:
                await (await self.harness.client()).get_workflow_handle(id).terminate("test")
            except RPCError as error:
                return error.status is RPCStatusCode.NOT_FOUND
            except TemporalUnavailable:
                return False
            return True

        await eventually(look)

    async def decide(self, id: str, decision: str) -> None:
        """End a task that runs."""
        coordinator = self.harness.coordinator

        async def look() -> bool:
            try:
                found = await self.harness.db.tasks.find_one({"id": id}, {"status": 1, "graph.nodes": 1})
                if found is None or found["graph"]["nodes"][0]["status"] != "deferred":
                    return found is not None and found["status"] in ("finished", "failed", "cancelled")
                await coordinator.decide(id, GATE, decision)
            except (FlowKitError, PyMongoError, RPCError) as error:
                self.journal.counts[f"repeated decision {type(error).__name__}"] += 1
                return False
            return True

        await eventually(look)

    # --- Kafka

    async def send_request(self, wanted: Submit) -> None:
        """Submit an execution by a record."""
        metadata = {"service_name": "test", "user_id": wanted.owner[2], "tenant": wanted.owner[1]}
        event = requested(
            wanted.id,
            event_id=str(uuid.uuid4()),
            metadata=metadata,
            timeout_seconds=600,
            priority=BANDS[wanted.band],
        )
        await self._produce("execution_requested", wanted.id, event)

    async def report(self, state: str, id: str, times: int = 1) -> None:
        """Report the end of an execution, or cancel it by an event."""
        if id in self.journal.started_at:
            self.journal.released_at.setdefault(id, time.time())
        event_id = str(uuid.uuid4())
        self.journal.own.add(event_id)
        kind = f"execution_{state}"
        event = {
            "event_id": event_id,
            "event_type": kind,
            "execution_id": id,
            "exit_code": 0,
            "reason": "test",
            "force_terminated": DEAF in id,  # nothing else would report its end
        }
        for _ in range(times):
            await self._produce(kind, id, event)

    async def _produce(self, kind: str, id: str, event: Fields) -> None:
        async def look() -> bool:
            try:
                await self._producer.send(self.topics.topic(kind), id, dumps(event), partition=0)
            except FlowKitError:
                return False
            return True

        await eventually(look)

    async def until_read(self) -> None:
        """Wait until the queue has stored the effects of all records that its topics have now."""
        offsets, group = Offsets(self._connection), self.topics.group_of(self.harness.queue)
        try:
            for topic in self.topics.consumed():
                ends = await offsets.read_ends(topic)
                await eventually(partial(offsets.has_caught_up, group, topic, ends))
        finally:
            await offsets.close()

    async def until_started(self, id: str) -> None:
        """Wait until the executor was told to start an execution."""

        async def look() -> bool:
            return id in self.journal.started_at

        await eventually(look)

    async def _read(self) -> None:
        """Read what the queue sends, and do what an executor does."""
        async with AIOKafkaConsumer(
            *{*self.topics.produced(), *self.topics.consumed()},
            bootstrap_servers=self._connection.bootstrap,
            auto_offset_reset="earliest",
        ) as reader:
            while True:
                for batch in (await reader.getmany(timeout_ms=100)).values():
                    for record in batch:
                        await self._receive(record)

    async def _receive(self, record: Any) -> None:
        body = json.loads(record.value)
        if record.topic == self.topics.dead_letter_topic:
            self.journal.dead.append(body["execution_id"])
            return
        id, event_id = body["execution_id"], body["event_id"]
        if event_id in self.journal.own or body["event_type"] == "execution_requested":
            return
        is_new = event_id not in self.journal.events[id]
        kind = "rejected" if body.get("error_type") == "resource_limit" else body["event_type"]
        if kind == "rejected" and (problem := rejection_problem(body["error_message"], body["stderr"])):
            self.journal.problems.append(f"{id}: {problem}")
        self.journal.counts[kind if is_new else "repeated events"] += 1
        if is_new:
            self.journal.events[id][event_id] = Event(kind=kind, id=id, at=record.timestamp)
        if kind == "create_pod_command":
            self.journal.started_at.setdefault(id, record.timestamp / 1_000)
            self.journal.scripts[id] = body["script"]
        if kind == "delete_pod_command" and is_new and DEAF not in id:
            await self.report("cancelled", id)

    # --- what operators see

    async def view(self) -> dict[str, Seen]:
        """Return all requests without their positions, and check that each has moved along the arrows."""
        found: dict[str, Seen] = {}
        for skip in itertools.count(0, 200):
            page = (await self.call("GET", f"admin/executions/?limit=200&skip={skip}")).body
            for shown in page["executions"]:
                self._look_at(shown)
                found.setdefault(shown["execution_id"], seen_of(shown))
            if not page["has_more"]:
                return found
        raise AssertionError

    async def with_positions(self, seen: Mapping[str, Seen]) -> dict[str, Seen]:
        """Return requests, and the positions of those that wait."""
        waiting = [id for id, each in seen.items() if each.state == "queued"]
        answers = await asyncio.gather(*(self.call("GET", f"executions/{id}") for id in waiting))
        return {**seen, **{id: seen_of(answer.body) for id, answer in zip(waiting, answers, strict=True)}}

    def _look_at(self, shown: Fields) -> None:
        id, state = shown["execution_id"], shown["state"]
        if state == "reserving":
            return
        before = self.journal.states.get(id, "")
        if problem := arrow_problem(id, before, state, id in self.journal.again):
            self.journal.problems.append(problem)
        if shown["status"] != STATUSES[state]:
            self.journal.problems.append(f"{id} is {state}, and its status is {shown['status']}")
        self.journal.states[id] = state

    def submits(self, id: str) -> None:
        """Note that somebody submits a request, perhaps again."""
        if self.journal.states.get(id, "rejected") in AGAIN:
            self.journal.again.add(id)


def seen_of(shown: Fields) -> Seen:
    """Return a request as a call over HTTP shows it."""
    return Seen(
        state=shown["state"],
        band=BANDS.index(shown["priority"]),
        reason=shown["reason"],
        position=shown["position"],
    )


def task_of(id: str) -> Fields:
    """Return a task that waits for a decision."""
    return {"graph": {"nodes": [node(GATE, "approval")]}, "params": {"value": id}, "task_id": id}
