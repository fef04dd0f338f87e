"""A node that names the address of a supervisor uses the secret and the topic of the runner that is
registered there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.gateway import models
from flowkit.gateway.delivery import JobOutcome
from flowkit.gateway.destinations import Destination, parse_destination
from flowkit.gateway.jobs import JobHandler
from flowkit.gateway.secret_box import SecretBox
from flowkit.gateway.service import Gateway
from flowkit.gateway.store import FLOWS, JOBS, FlowStore, key
from flowkit.server.auth import Caller
from flowkit.server.rpc import Call, InvalidParams
from flowkit.server.tokens import Right
from flowkit.testing import memory_database
from flowkit.worker import Batch

if TYPE_CHECKING:
    from collections.abc import Awaitable

RUN = "flow:1f2e3d4c:3:40/1"
KEY = "ab" * 32
OPERATOR = Call(caller=Caller(actor=None, rights=frozenset({Right.OPERATOR})))


class Sent:
    """A supervisor that ends each job at once, and notes where it was sent, and the secret."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Destination, str]] = []

    async def run(self, to: Destination, job: Any, secret: str, **options: Any) -> JobOutcome:
        """Note a job."""
        self.jobs.append((to, secret))
        return JobOutcome(success=True, text="done")


async def send(runner: dict[str, str], url: str) -> tuple[Destination, str]:
    """Register a runner, run a job at an address, and return where it was sent, and the secret."""
    store, sent = FlowStore(memory_database()), Sent()
    supervisors: Any = sent
    nothing: Any = None
    gateway = Gateway(store, nothing, supervisors, SecretBox())
    await gateway.context_create(OPERATOR, models.ContextCreate(context=models.ContextData(id=3)))
    own = {"id": 71, "secret": "env:SUPERVISOR_SECRET", "topic": "own"}
    given = models.RunnerData.model_validate({**own, **runner})
    await gateway.runner_create(OPERATOR, models.RunnerCreate(context_id=3, runner=given))
    job = models.JobData(id=1, caller_id=11, context_id=3, executor="echo", script="one")
    await store.put(JOBS, key(3, 11, 1), job.model_dump(), 0.0)
    nodes = [models.FlowNode(id=1, supervisor_url=url).model_dump()]
    flow = {"context_id": 3, "caller_id": 11, "id": 40, "nodes": nodes, "env_vars": {}, "run": 1}
    await store.put(FLOWS, "3:40", {**flow, "task_id": RUN}, 0.0)
    ids = {"context_id": 3, "caller_id": 11, "flow_id": 40, "run": 1, "job_id": 1}
    handler = JobHandler(store, supervisors, SecretBox())
    result = await handler.process_batch(Batch(batch_uid="result", payload=ids), attempt())
    assert result.success
    return sent.jobs[0]


def attempt() -> Any:
    """Return the context of an attempt."""

    async def cancellable(work: Awaitable[Any]) -> Any:
        return await work

    fields = {"generation": 0, "failures": 0, "attempt_epoch": 1, "kv": {}}
    return SimpleNamespace(task_id=RUN, node_id="1", cancellable=cancellable, **fields)


@pytest.mark.parametrize(
    ("runner", "url"),
    [
        ({"address": "http://Host.example:80"}, "HTTP://host.example./"),
        ({"address": "https://h/rpc/"}, "https://h:443/rpc#part"),
        ({"address": "http://[2001:DB8:0:0::1]:3030/"}, "http://[2001:db8::1]:3030"),
        ({"address": "56d:0524::7"}, "mycelium:56D:524:0::7"),
        ({"address": "Mycelium:56d:524::7"}, "mycelium:56d:524::7"),
        ({"pubkey": KEY.upper()}, f"mycelium:{KEY}"),
        ({"pubkey": KEY, "address": "56d:524::7"}, "mycelium:56d:524:0::7"),
    ],
)
async def test_a_runner_is_found_by_every_spelling_of_its_addresses(
    runner: dict[str, str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUPERVISOR_SECRET", "word")
    to, secret = await send(runner, url)
    assert (to.key, to.topic, secret) == (parse_destination(url).key, "own", "word")


@pytest.mark.parametrize(
    "url",
    ["http://host:3031", "https://host:3030", "http://host:3030/other", "http://host.example:3030"],
)
async def test_another_address_gets_no_secret(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUPERVISOR_SECRET", "word")
    to, secret = await send({"address": "http://host:3030"}, url)
    assert (to.address, to.topic, secret) == (url, "supervisor.rpc", "")


@pytest.mark.parametrize(("field", "value"), [("address", "ftp://host"), ("pubkey", "xy")])
async def test_a_runner_without_a_usable_address_is_refused_with_its_value(field: str, value: str) -> None:
    nothing: Any = None
    gateway = Gateway(FlowStore(memory_database()), nothing, nothing, SecretBox())
    await gateway.context_create(OPERATOR, models.ContextCreate(context=models.ContextData(id=3)))
    given = models.RunnerData.model_validate({"id": 71, field: value})
    with pytest.raises(InvalidParams) as raised:
        await gateway.runner_create(OPERATOR, models.RunnerCreate(context_id=3, runner=given))
    [problem] = raised.value.data["problems"]
    assert problem["field"] == f"runner.{field}"
    assert value in problem["value"]
