"""What processes have counted agrees with the documents of random tasks, although workers are killed."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from flowkit.core import instruments
from flowkit.local.ports import free_port
from tests.integration.harness import eventually, node, wait_seconds
from tests.unit.measured import measuring
from tests.unit.test_health_endpoint import respond

if TYPE_CHECKING:
    from tests.fork_server import ForkedProcess
    from tests.integration.harness import Harness
    from tests.unit.measured import Measured

pytestmark = pytest.mark.server

HANDLERS = "tests.integration.handlers"
ROLES = {"quick": "Quick", "paced": "Paced", "failing": "Failing"}
WORKERS, SLOTS, OPEN = 2, 2, 12
LEASE_SEC = 2.0
STARTED, ENDED = instruments.ATTEMPTS_STARTED.name, instruments.ATTEMPTS_ENDED.name


def random_nodes(chance: random.Random) -> list[dict[str, Any]]:
    """Return a graph whose nodes finish, fail, are tried again, or are skipped after another one."""
    nodes: list[dict[str, Any]] = []
    for number in range(chance.randint(1, 5)):
        parents = [each["node_id"] for each in nodes if chance.random() < 0.4]
        role = chance.choice([*ROLES])
        inline: dict[str, Any] = {"input_adapter": "noop"} if parents else {}
        inline |= {"batches": chance.randint(1, 3), "pause": chance.choice((0.0, 0.05, 0.3))}
        if role == "failing":
            inline |= {"failures": chance.randint(1, 3)}
        retries = {"max": chance.randint(0, 2), "backoff_sec": 0.05}
        nodes.append(
            node(
                *(f"n{number}", role, *parents),
                inline=inline,
                retry_policy=retries,
                allow_failure=chance.random() < 0.5,
            )
        )
    return nodes


class KilledWorker:
    """A worker in a process of its own. What it had counted when it was read last survives its kills."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self._before: Counter[tuple[str, ...]] = Counter()
        self._start()

    def _start(self) -> None:
        self._port = free_port()
        roles = (f"{HANDLERS}:{name}" for name in ROLES.values())
        options = ("--health-port", str(self._port), "--concurrency", str(SLOTS))
        self._process: ForkedProcess = self._harness.process("worker", *options, *roles)

    async def read(self) -> Counter[tuple[str, ...]] | None:
        """Return the samples of the process, by name and labels; None before it serves them."""
        try:
            _, text = await asyncio.to_thread(respond, self._port, path="/metrics")
        except OSError:
            return None
        families = text_string_to_metric_families(text.decode())
        samples = [sample for family in families for sample in family.samples]
        return Counter({(each.name, *each.labels.values()): each.value for each in samples})

    async def kill(self) -> None:
        """Read what the process has counted, kill it, and start another one."""
        self._before += await eventually(self.read)
        self._process.send_signal(signal.SIGKILL)
        self._start()

    async def counted(self) -> Counter[tuple[str, ...]]:
        """Return what the processes have counted, as far as it was read."""
        return self._before + await eventually(self.read)


async def has_ended(harness: Harness, task_id: str) -> bool:
    """Return whether a task has closed its document."""
    return (await harness.document(task_id))["finished_at"] is not None


async def run_tasks(harness: Harness, chance: random.Random, tasks: int) -> list[str]:
    """Run random tasks, some of which are cancelled, and return their ids when all have ended."""
    slots = asyncio.Semaphore(OPEN)

    async def run(nodes: list[dict[str, Any]], cancel_after: int | None) -> str:
        async with slots:
            task_id = await harness.create(*nodes)
            if cancel_after is not None:
                await harness.until_status(task_id, "running")
                await (await harness.handle(task_id)).cancel(reason="enough")
            await eventually(partial(has_ended, harness, task_id))
            return task_id

    plans = [(random_nodes(chance), chance.choice((None, None, None, 1))) for _ in range(tasks)]
    return await asyncio.gather(*(run(*plan) for plan in plans))


def sums(counts: Counter[tuple[str, ...]], name: str) -> Counter[str]:
    """Return the values of a counter by its first label, which is the role."""
    found: Counter[str] = Counter()
    for (sample, *labels), value in counts.items():
        if sample == name:
            found[labels[0]] += int(value)
    return found


def check_ends(measured: Measured, documents: list[dict[str, Any]]) -> None:
    """Compare the engine's counts of tasks and nodes that have ended with the documents."""
    tasks = Counter((document["status"],) for document in documents)
    nodes = Counter(
        (each["type"], each["status"]) for document in documents for each in document["graph"]["nodes"]
    )
    assert measured.counted(instruments.TASKS_OPENED) == {(): len(documents)}
    assert measured.counted(instruments.TASKS_CLOSED) == dict(tasks)
    assert measured.counted(instruments.NODES_CLOSED) == dict(nodes)


def check_attempts(counted: Counter[tuple[str, ...]], documents: list[dict[str, Any]], kills: int) -> None:
    """Compare the workers' counts of attempts with the epochs of the documents.

    What a process has counted between the last read and its kill is lost: at most the attempts in its slots, and those
    that began before the signal arrived. An attempt that was cancelled before a worker began it has an epoch only.
    """
    nodes = [each for document in documents for each in document["graph"]["nodes"]]
    epochs = sum(each.get("attempt_epoch", 0) for each in nodes)
    unknown = 2 * kills * SLOTS * len(ROLES) + sum(each["status"] == "cancelled" for each in nodes)
    for name in (STARTED, ENDED):
        assert epochs - unknown <= sums(counted, name).total() <= epochs, (name, epochs, counted)


@pytest.mark.parametrize(
    ("tasks", "kills", "pause_sec"),
    [
        pytest.param(10, 1, 0.5),
        pytest.param(100, 10, 4.0, marks=(pytest.mark.nightly, pytest.mark.timeout(600))),
    ],
)
async def test_counts_agree_with_documents_although_workers_are_killed(
    harness: Harness, tasks: int, kills: int, pause_sec: float
) -> None:
    chance = random.Random(tasks)
    harness.settings["lease_ttl_sec"] = LEASE_SEC
    with measuring() as measured:
        await harness.engine()
        workers = [KilledWorker(harness) for _ in range(WORKERS)]

        async def kill_one_after_the_other() -> None:
            for number in range(kills):
                await wait_seconds(pause_sec)
                await workers[number % WORKERS].kill()

        ids, _ = await asyncio.gather(run_tasks(harness, chance, tasks), kill_one_after_the_other())
        documents = [await harness.document(task_id) for task_id in ids]
        check_ends(measured, documents)
        counted: Counter[tuple[str, ...]] = Counter()
        for worker in workers:
            counted += await worker.counted()
        check_attempts(counted, documents, kills)
