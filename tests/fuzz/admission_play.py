"""One admission queue on servers of its own: clients, an executor and processes, which are killed together with servers."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import uuid
from collections import Counter
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from aiokafka import AIOKafkaConsumer
from tests.admission.events import requested
from tests.fuzz.admission_model import (
    FLOODER,
    FLOODER_MOST,
    LIMITS,
    USERS,
    Door,
    Journal,
    Wanted,
    both,
    cap_problems,
    order_problems,
    random_request,
    request_problems,
    sequence_problems,
)
from tests.integration.chaos.cluster import (
    ManagedProcess,
    frozen,
    periodically,
    pid_of,
    retry_until_available,
)
from tests.integration.harness import Harness, eventually, node, wait_seconds

from flowkit import Admission, CoordinatorConfig
from flowkit.adapters.admission import AdmissionStore
from flowkit.admission import rules
from flowkit.admission.kafka import AdmissionTopics, Requested
from flowkit.admission.queue import AdmissionQueue, Fenced, request_of
from flowkit.bridge.kafka.clients import KafkaConnection
from flowkit.bridge.kafka.offsets import Offsets
from flowkit.bridge.kafka.producer import Producer
from flowkit.core.utils import dumps
from flowkit.local.ports import free_port
from flowkit.models.admission import ENDED, PENDING, RUNNING, Kind, Override, Priority, State

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence
    from pathlib import Path

    from flowkit.local import Kafka, MongoServer, TemporalServer
    from flowkit.models.admission import Request, Ticket

Fields = dict[str, Any]

CALM: Final = 24
"""How many requests the first process starts alone, before the faults begin."""
DRAIN_SEC: Final = 90.0
_TRIES: Final = 4
"""How often a caller submits a request that is rejected."""
_RUN_SEC: Final = 0.2
"""Longest time that an execution runs."""
_LOOK_SEC: Final = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much happens in a play."""

    requests: int
    faults: Sequence[str]
    pause: tuple[float, float]
    """Least and most seconds before a fault."""
    away: tuple[float, float]
    """The same for how long a fault lasts."""
    dispatchers: int
    clients: int
    rest: float
    """Mean seconds between two requests of a client."""
    session_sec: float
    """After which time the steps of a killed process are ended by others."""


# --- processes and servers --------------------------------------------------------------------------------------

KILL, FREEZE = "process killed", "process frozen"
KILL_KAFKA, KILL_TEMPORAL, FREEZE_MONGO = "Kafka killed", "Temporal killed", "MongoDB frozen"
KILL_ENGINE = "engine killed"


class AdmissionProgram(ManagedProcess):
    """A process of the queue."""

    module = "tests.fuzz.admission_process"


class Plant:
    """The servers, the processes of the queue, and an engine."""

    def __init__(
        self,
        harness: Harness,
        servers: tuple[TemporalServer, MongoServer, Kafka],
        folder: Path,
        size: Size,
        topics: AdmissionTopics,
    ) -> None:
        temporal, self._mongo, kafka = servers
        self.harness = harness
        self.topics = topics
        self.connection = KafkaConnection(bootstrap=kafka.bootstrap_servers)
        self.injected: Counter[str] = Counter()
        self._restarts = {
            KILL_KAFKA: (kafka.kill, kafka.start),
            KILL_TEMPORAL: (temporal.kill, temporal.start),
        }
        self.cfg = CoordinatorConfig(kafka_bootstrap=kafka.bootstrap_servers, kafka_cmd_partitions=2)
        config = folder / "config.json"
        settings = {"kafka_bootstrap": kafka.bootstrap_servers, "kafka_cmd_partitions": 2}
        config.write_text(json.dumps(settings), encoding="utf-8")
        harness.environment["ADMISSION_SESSION_SEC"] = str(size.session_sec)
        styled = ("--topics", topics.style, "--topic-prefix", topics.prefix)
        command = ("admission", "run", "--kafka", "--config", str(config), *styled)
        self.ports = [free_port() for _ in range(size.dispatchers)]
        self.dispatchers = [
            AdmissionProgram(harness, folder, f"admission-{port}", *command, "--port", str(port))
            for port in self.ports
        ]
        engine = ("engine", "--role", "tests.integration.handlers:InlineQuick")
        self.engine = ManagedProcess(harness, folder, "engine", *engine)
        self.running: list[ManagedProcess] = [self.engine, self.dispatchers[0]]
        """The processes that start again when they end. The others wait until the calm part of the play is over."""

    async def supervise(self) -> None:
        """Start processes that have ended, until cancelled."""

        async def look() -> None:
            for process in self.running:
                process.ensure_started()

        await periodically(0.1, look)

    async def inject(self, kind: str, away: float, victim: ManagedProcess) -> None:
        """Inject a fault. Return when servers are up again."""
        self.injected[kind] += 1
        if kind in self._restarts:
            end, start = self._restarts[kind]
            await asyncio.to_thread(end)
            await wait_seconds(away)
            await asyncio.to_thread(start)
        elif kind == FREEZE_MONGO:
            await frozen(away, partial(os.kill, pid_of(self._mongo.port)))
        elif kind == FREEZE:
            await frozen(away, victim.signal)
        elif kind == KILL_ENGINE:
            self.engine.end(signal.SIGKILL, 0.0)
        else:
            victim.end(signal.SIGKILL, 0.0)

    async def stop(self) -> None:
        """Stop the processes of the queue in an orderly way."""
        self.running.clear()
        for each in self.dispatchers:
            each.signal(signal.SIGTERM)

        async def look() -> bool:
            return not any(each.runs for each in self.dispatchers)

        await eventually(look)

    def close(self) -> None:
        """Kill all processes."""
        for each in (*self.dispatchers, self.engine):
            each.close()


# --- the executor -----------------------------------------------------------------------------------------------


class Executor:
    """Runs executions as commands ask for, each once, and reports how they end."""

    def __init__(self, play: Play) -> None:
        self._play = play
        self._journal = play.journal
        self._sagas: dict[str, str] = {}
        self._stops: dict[str, asyncio.Event] = {}
        self._running: dict[str, str] = {}
        """Users of the executions that run, as the queue must see it."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.may_end = asyncio.Event()
        """Executions do not end while it is not set."""
        self.may_end.set()

    def receive(self, kind: str, body: Fields) -> None:
        """Note a command. One that is repeated has no effect."""
        id, saga = body["execution_id"], body["saga_id"]
        if kind == rules.DELETE_POD:
            self._stops.setdefault(id, asyncio.Event()).set()
        elif id in self._sagas:
            self._journal.counts["repeated commands"] += 1
            if self._sagas[id] != saga:
                self._journal.problems.append(f"{id} has the sagas {self._sagas[id]} and {saga}")
        else:
            self._sagas[id] = saga
            self._start(id, body["metadata"]["user_id"])

    def _start(self, id: str, user_id: str) -> None:
        if id not in self._journal.cancelled_by_event:
            self._running[id] = user_id
        users = Counter(self._running.values())
        own = LIMITS.users.get(user_id, Override()).max_active or LIMITS.max_active
        if len(self._running) > LIMITS.max_active or users[user_id] > own:
            self._journal.problems.append(f"{id} starts while {self._running} run")
        task = asyncio.create_task(self._run(id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def give_up(self, id: str) -> None:
        """Note that the queue will count an execution as ended, although it may still run."""
        self._running.pop(id, None)

    async def _run(self, id: str) -> None:
        chance = self._play.chance
        stop, seconds = self._stops.setdefault(id, asyncio.Event()), chance.uniform(0, _RUN_SEC)
        ended = chance.choices([State.COMPLETED, State.FAILED], [4, 1])[0]
        waits = [asyncio.create_task(wait_seconds(seconds)), asyncio.create_task(stop.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        waits[1].cancel()
        await self.may_end.wait()
        self._journal.reports[id] = State.CANCELLED if stop.is_set() else ended
        self._running.pop(id, None)
        await self._play.send(f"execution_{self._journal.reports[id].value}", id, exit_code=0)

    async def idle(self) -> None:
        """Wait until everything is reported."""
        await asyncio.gather(*self._tasks)


# --- the play ---------------------------------------------------------------------------------------------------


class Play:
    """Requests, their callers, the executor, and who looks at everything meanwhile."""

    def __init__(self, plant: Plant, size: Size, chance: random.Random, name: str) -> None:
        self.plant = plant
        self.size = size
        self.chance = chance
        self.journal = Journal()
        calm = [self._calm_request(f"{name}-calm-{number}") for number in range(CALM)]
        rest = [random_request(chance, f"{name}-{number}", size.rest) for number in range(size.requests)]
        self.calm, self._rest = calm, rest
        self._flood = [
            Wanted(id=f"{name}-flood-{number}", user_id=FLOODER, priority=Priority.NORMAL, doors=[door])
            for number, door in enumerate([*[Door.QUEUE] * (FLOODER_MOST + 1), Door.HTTP])
        ]
        self._faults = [
            (chance.uniform(*size.pause), kind, chance.uniform(*size.away)) for kind in size.faults
        ]
        self.executor = Executor(self)
        self._producer = Producer(plant.connection)
        self.queue = AdmissionQueue(AdmissionStore(plant.harness.db, queue=plant.harness.queue))
        self._urls = itertools.cycle([f"http://127.0.0.1:{port}" for port in plant.ports])
        self._http: aiohttp.ClientSession
        self._cap_problems: set[str] = set()

    def _calm_request(self, id: str) -> Wanted:
        return Wanted(
            id=id,
            user_id=f"u{self.chance.randrange(len(LIMITS.users), USERS)}",
            priority=self.chance.choice([*Priority]),
            is_task=self.chance.random() < 0.3,
            doors=[Door.QUEUE],
        )

    @property
    def requests(self) -> list[Wanted]:
        """All requests."""
        return [*self.calm, *self._flood, *self._rest]

    async def run(self) -> list[str]:
        """Play, wait until everything has ended, and return all problems."""
        harness = self.plant.harness
        await self.queue.store.prepare()
        await self.queue.store.send_events()
        await self.queue.store.set_limits(LIMITS)
        await self.plant.topics.create(self.plant.connection, self.plant.cfg)
        async with AsyncExitStack() as stack:
            self._http = await stack.enter_async_context(
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(5))
            )
            stack.push_async_callback(self._producer.stop)
            reader = await stack.enter_async_context(self._reader())
            for wanted in self.calm:
                await self._submit(wanted, Door.QUEUE)
            others = [self._read(reader), self._look_at_caps(), self.plant.supervise()]
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(each) for each in others]
                await self._play_and_drain(reader)
                for each in running:
                    each.cancel()
        found = {item["_id"]: item async for item in harness.db.admission_items.find()}
        return [*self.journal.problems, *self._cap_problems, *self._order(found), *self._requests(found)]

    async def _play_and_drain(self, reader: AIOKafkaConsumer) -> None:
        await eventually(lambda: self._have_started(self.calm))
        await self._exceed_limit()
        self.plant.running.extend(self.plant.dispatchers[1:])
        left = iter(self._rest)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._inject())
            for _ in range(self.size.clients):
                group.create_task(self._client(left))
        await self._until_read()
        await self._drain()
        await self.plant.stop()
        await self.queue.session.close()
        self.journal.counts["stray entries"] += await self.queue.drop_stray_holds()
        await self._check_counters()
        await self._check_tasks()
        await eventually(partial(self._has_read_all, reader))

    async def _exceed_limit(self) -> None:
        """Submit more requests of one user than may be open, while none of them ends."""
        self.executor.may_end.clear()
        for wanted in self._flood:
            await self._submit(wanted, wanted.doors[0])
        self.executor.may_end.set()

    async def _have_started(self, some: Sequence[Wanted]) -> bool:
        items = await self.queue.store.load({wanted.id for wanted in some})
        return all(item.get("popped_at") for item in items.values())

    async def _inject(self) -> None:
        for number, (pause, kind, away) in enumerate(self._faults):
            await wait_seconds(pause)
            victim = self.plant.dispatchers[number % len(self.plant.dispatchers)]
            await self.plant.inject(kind, away, victim)

    # --- callers

    async def _client(self, left: Any) -> None:
        for wanted in left:
            await wait_seconds(wanted.pause)
            await asyncio.gather(*(self._submit_until_accepted(wanted, door) for door in wanted.doors))
            if wanted.cancel is not None:
                await self._cancel(wanted, wanted.cancel)
            if wanted.move is not None:
                await self._move(wanted, wanted.move)
            if wanted.repeat is not None:
                await self._submit(wanted, wanted.repeat)

    async def _submit_until_accepted(self, wanted: Wanted, door: Door) -> None:
        for _ in range(_TRIES):
            if await self._submit(wanted, door) not in ("rejected", "HTTP 429"):
                return
            await wait_seconds(self.chance.uniform(0.3, 1.5))

    async def _submit(self, wanted: Wanted, door: Door) -> str:
        """Submit a request, and note the answer."""
        if door is Door.KAFKA:
            event = self._event_of(wanted)
            for _ in range(self.chance.choice([1, 1, 1, 2])):
                await self._produce(rules.REQUESTED, wanted.id, event)
            answer = "sent"
        elif door is Door.HTTP:
            answer = f"HTTP {await self._post(self._body_of(wanted))}"
        else:
            answer = answer_of(await retry_until_available(lambda: self.queue.submit(self._request(wanted))))
        self.journal.answers[wanted.id][answer] += 1
        self.journal.counts[answer] += 1
        if answer in ("accepted", "HTTP 200"):
            self.journal.waits_since.setdefault(wanted.id, self.queue.clock())
        return answer

    def _event_of(self, wanted: Wanted) -> Fields:
        metadata = {"service_name": "test", "user_id": wanted.user_id}
        given = {"event_id": str(uuid.uuid4()), "metadata": metadata, "timeout_seconds": 600}
        return requested(wanted.id, **given, priority=wanted.priority.value)

    def _request(self, wanted: Wanted) -> Request:
        if not wanted.is_task:
            return Requested.model_validate(self._event_of(wanted)).request()
        admission = Admission(user_id=wanted.user_id, priority=wanted.priority)
        return request_of(admission, wanted.id, task_of(wanted), Kind.TASK)

    def _body_of(self, wanted: Wanted) -> Fields:
        who = {"execution_id": wanted.id, "user_id": wanted.user_id, "priority": wanted.priority.value}
        return {**who, **(task_of(wanted) if wanted.is_task else {"script": "x", "timeout_seconds": 600})}

    async def _post(self, body: Fields, path: str = "execute") -> int:
        """Call the HTTP API of one process after the other, until one responds. Return the status."""

        async def call() -> int:
            try:
                async with self._http.post(f"{next(self._urls)}/api/v1/{path}", json=body) as response:
                    text = await response.text()
            except (aiohttp.ClientError, TimeoutError):
                return 0
            if response.status >= 500 and response.status != 503:
                self.journal.problems.append(f"{path} {body} has the response {text}")
            return response.status if response.status < 500 else 0

        return await eventually(call)

    async def _cancel(self, wanted: Wanted, door: Door) -> None:
        if door is Door.KAFKA:
            self.journal.cancelled_by_event.add(wanted.id)
            self.executor.give_up(wanted.id)
            await self.send(rules.CANCELLED, wanted.id, reason="test", metadata={"user_id": wanted.user_id})
        elif door is Door.HTTP:
            await self._post({"reason": "test"}, f"executions/{wanted.id}/cancel")
        else:
            change = await retry_until_available(
                lambda: self.queue.cancel(wanted.id, reason="test", by="test")
            )
            self.journal.cancelled[wanted.id] = change.outcome
            self.journal.counts[f"cancel {change.outcome}"] += 1

    async def _move(self, wanted: Wanted, priority: Priority) -> None:
        change = await retry_until_available(lambda: self.queue.set_priority(wanted.id, priority))
        self.journal.counts[f"move {change.outcome}"] += 1

    async def send(self, kind: str, id: str, **fields: Any) -> None:
        """Send an event about an execution, as a client or an executor does."""
        event_id = str(uuid.uuid4())
        self.journal.own.add(event_id)
        await self._produce(
            kind, id, {"event_id": event_id, "event_type": kind, "execution_id": id, **fields}
        )

    async def _produce(self, kind: str, id: str, event: Fields) -> None:
        topic = self.plant.topics.topic(kind)
        await retry_until_available(lambda: self._producer.send(topic, id, dumps(event)))

    # --- who looks

    def _reader(self) -> AIOKafkaConsumer:
        return AIOKafkaConsumer(
            *{*self.plant.topics.consumed(), *self.plant.topics.produced()},
            bootstrap_servers=self.plant.connection.bootstrap,
            auto_offset_reset="earliest",
        )

    async def _read(self, reader: AIOKafkaConsumer) -> None:
        """Read all events from the beginning."""
        while True:
            for batch in (await reader.getmany(timeout_ms=100)).values():
                for record in batch:
                    if record.topic == self.plant.topics.dead_letter_topic:
                        self.journal.problems.append(f"a record was set aside: {record}")
                    else:
                        self._receive(json.loads(record.value), record.timestamp)

    def _receive(self, body: Fields, at: int) -> None:
        kind = body["event_type"]
        if kind == rules.REQUESTED:
            return
        self.journal.see(kind, at, body)
        if kind in (rules.CREATE_POD, rules.DELETE_POD):
            self.executor.receive(kind, body)

    async def _has_read_all(self, reader: AIOKafkaConsumer) -> bool:
        ends = await reader.end_offsets(reader.assignment())
        return all([await reader.position(place) >= end for place, end in ends.items()])

    async def _look_at_caps(self) -> None:
        """Look at the requests twice, and check the limits for those that were there both times."""
        before: list[Fields] = []

        async def look() -> None:
            nonlocal before
            now = await retry_until_available(self._open_items)
            self._cap_problems.update(cap_problems(both(before, now)))
            before = now
            self.journal.counts["looks"] += 1

        await periodically(_LOOK_SEC, look)

    async def _open_items(self) -> list[Fields]:
        states = [state.value for state in (*PENDING, *RUNNING) if state is not State.RESERVING]
        wanted = dict.fromkeys(("user_id", "place", "state"), 1)
        found = self.plant.harness.db.admission_items.find({"state": {"$in": states}}, wanted)
        return [item async for item in found]

    # --- the end

    async def _until_read(self) -> None:
        """Wait until the queue has read everything that its topics contain now."""
        offsets, topics = Offsets(self.plant.connection), self.plant.topics
        try:
            for topic in topics.consumed():
                ends = await offsets.read_ends(topic)
                await eventually(
                    partial(offsets.has_caught_up, topics.group_of(self.plant.harness.queue), topic, ends)
                )
        finally:
            await offsets.close()

    async def _drain(self) -> None:
        """Wait until all requests are decided and have ended, and nothing is in doubt or unsent."""

        async def look() -> bool:
            counters = await retry_until_available(self.queue.store.counters)
            unsent = await self.queue.store.count_items({"unsent": self.queue.store.queue})
            live = len(self.plant.dispatchers) + 1
            busy = counters["pending"], counters["active"], counters["doubt"], unsent
            if any(busy) or len(counters["sessions"]) > live:
                with suppress(Fenced):  # this process may be slower than its session is long
                    await self.queue.session.end_due()
                return False
            return await self._are_decided()

        try:
            await eventually(look, DRAIN_SEC)
        except AssertionError as error:
            counters, left = await self.queue.store.counters(), await self._open_items()
            self.journal.problems.append(f"not drained: {error}, {counters}, {left}")
        await self.executor.idle()

    async def _are_decided(self) -> bool:
        items = await self.queue.store.load({wanted.id for wanted in self.requests})
        decided = {*ENDED}
        return len(items) == len(self.requests) and all(item["state"] in decided for item in items.values())

    async def _check_counters(self) -> None:
        counters = await self.queue.store.counters()
        left = {name: counters[name] for name in ("pending", "active", "doubt", "sessions")}
        if any(left.values()) or any(counters["bands"].values()):
            self.journal.problems.append(f"the counters are {counters}")
        async for holder, lists in self.queue.store.all_holders():
            if any(lists.values()):
                self.journal.problems.append(f"{holder} still holds {lists}")

    async def _check_tasks(self) -> None:
        """Check that each task that has started ran once, and ended as its request says."""
        store, db = self.queue.store, self.plant.harness.db
        items = await store.load({wanted.id for wanted in self.requests if wanted.is_task})
        started = {id: item for id, item in items.items() if item.get("popped_at")}
        ends = {"finished": State.COMPLETED, "failed": State.FAILED, "cancelled": State.CANCELLED}
        async for task in db.tasks.find({}, {"id": 1, "status": 1}):
            item = started.get(task["id"])
            if item is None or item["state"] != ends.get(task["status"]):
                self.journal.problems.append(f"the task {task} has the request {item}")
        client = await self.plant.harness.client()

        async def look() -> list[str]:
            query = f"TaskQueue = '{self.plant.harness.queue}'"
            found = [each.id async for each in client.list_workflows(query)]
            return found if len(found) >= len(started) else []

        runs = Counter(await eventually(look)) if started else Counter[str]()
        self.journal.counts["workflows"] = runs.total()
        if runs != Counter(started.keys()):
            self.journal.problems.append(f"workflows: {runs - Counter(started)}, {Counter(started) - runs}")

    def _order(self, found: dict[str, Fields]) -> list[str]:
        calm = [found[wanted.id] for wanted in self.calm]
        ordinary = [found[wanted.id] for wanted in self._rest if wanted.is_ordinary and wanted.id in found]
        popped = [item for item in ordinary if item.get("popped_at")]
        self.journal.counts["compared for their order"] = len(popped)
        return [*sequence_problems(calm), *order_problems(popped, self.journal.waits_since)]

    def _requests(self, found: dict[str, Fields]) -> list[str]:
        self.journal.counts.update(item["state"] for item in found.values())
        return [
            problem
            for wanted in self.requests
            for problem in request_problems(wanted, found.get(wanted.id), self.journal)
        ]


def answer_of(ticket: Ticket) -> str:
    """Return how a call was answered, in one word."""
    if ticket.duplicate:
        return "duplicate" if ticket.accepted else "rejected before"
    return "accepted" if ticket.accepted else "rejected"


def task_of(wanted: Wanted) -> Fields:
    """Return a task of one inline node, with the id of its request."""
    return {"graph": {"nodes": [node("only", "inline")]}, "params": {}, "task_id": wanted.id}
