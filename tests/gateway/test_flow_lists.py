"""Lists of the gateway: their pages have a byte limit, and `next` continues them without a gap."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pymongo.errors import BulkWriteError

from flowkit.errors import StoreRefused
from flowkit.gateway import models
from flowkit.gateway.service import Gateway
from flowkit.gateway.store import EVENTS, JOBS, MESSAGES, PAGE_BYTES, FlowStore, key
from flowkit.server.auth import Caller
from flowkit.server.rpc import Call, InvalidParams
from flowkit.server.tokens import Right
from flowkit.testing import memory_database

CONTEXT = 3
OPERATOR = Call(caller=Caller(actor=None, rights=frozenset({Right.OPERATOR})))
LARGE = "x" * 1_000_000


@pytest.fixture
def store() -> FlowStore:
    """An empty store."""
    return FlowStore(memory_database())


async def gateway(store: FlowStore) -> Gateway:
    """Return a gateway with a context."""
    nothing: Any = None
    made = Gateway(store, nothing, nothing, nothing)
    context = models.ContextData(id=CONTEXT)
    await made.context_create(OPERATOR, models.ContextCreate(context=context))
    return made


async def pages(method: Any, kind: Any, **given: Any) -> list[dict[str, Any]]:
    """Return all pages of a list."""
    found = [(await method(OPERATOR, kind(**given))).model_dump(mode="json")]
    while found[-1]["next"] is not None:
        params = kind(**given, after=found[-1]["next"])
        found.append((await method(OPERATOR, params)).model_dump(mode="json"))
        assert len(found) < 20
    return found


async def test_page_of_jobs_ends_at_its_byte_limit(store: FlowStore) -> None:
    made = await gateway(store)
    for id in range(9):
        job = models.JobData(id=id, caller_id=1, context_id=CONTEXT, script=LARGE, executor="sh")
        await store.put(JOBS, key(CONTEXT, 1, id), job.model_dump(), id)
    found = await pages(made.job_list, models.CallerPage, context_id=CONTEXT, limit=500)
    assert [[job["id"] for job in page["jobs"]] for page in found] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert max(len(json.dumps(page)) for page in found) <= PAGE_BYTES
    one = await pages(made.job_list, models.CallerPage, context_id=CONTEXT, limit=1)
    assert [[job["id"] for job in page["jobs"]] for page in one] == [[id] for id in range(9)]


async def test_a_flow_is_created_without_reading_the_scripts_of_its_jobs(store: FlowStore) -> None:
    job = models.JobData(id=1, caller_id=1, context_id=CONTEXT, script=LARGE, executor="sh")
    await store.put(JOBS, key(CONTEXT, 1, 1), job.model_dump(), 1)
    assert await store.job_limits(CONTEXT, 1, [1, 2]) == {1: {"id": 1, "timeout": 3_600.0, "retries": 0}}


async def test_an_entry_over_the_limit_is_a_page_of_its_own(store: FlowStore) -> None:
    made = await gateway(store)
    for id in range(2):
        job = models.JobData(id=id, caller_id=1, context_id=CONTEXT, script="\x01" * 1_000_000, executor="sh")
        await store.put(JOBS, key(CONTEXT, 1, id), job.model_dump(), id)
    found = await pages(made.job_list, models.CallerPage, context_id=CONTEXT)
    assert [[job["id"] for job in page["jobs"]] for page in found] == [[0], [1]]


async def test_lists_by_id_continue_where_the_page_ended(store: FlowStore) -> None:
    made = await gateway(store)
    for id in range(5):
        await made.actor_create(OPERATOR, models.ActorCreate(actor=models.ActorData(id=id)))
        await made.context_create(OPERATOR, models.ContextCreate(context=models.ContextData(id=CONTEXT + id)))
        flow = {"context_id": CONTEXT, "caller_id": 1, "id": id, "jobs": [1], "nodes": []}
        await store.insert_flow(flow, id)
    found = await pages(made.actor_list, models.Page, limit=2)
    assert [[each["id"] for each in page["actors"]] for page in found] == [[0, 1], [2, 3], [4]]
    found = await pages(made.context_list, models.Page, limit=2)
    assert [[each["id"] for each in page["contexts"]] for page in found] == [[3, 4], [5, 6], [7]]
    found = await pages(made.flow_list, models.FlowPage, context_id=CONTEXT, limit=3)
    assert [[each["flow_id"] for each in page["flows"]] for page in found] == [[0, 1, 2], [3, 4]]
    found = await pages(made.flow_list, models.FlowPage, context_id=CONTEXT, limit=3, status="Finished")
    assert [page["flows"] for page in found] == [[], []]


async def test_messages_of_one_second_are_listed_once_newest_first(store: FlowStore) -> None:
    made = await gateway(store)
    for id in range(7):
        fields = {
            "id": id,
            "caller_id": 1,
            "context_id": CONTEXT,
            "message": LARGE,
            "late": [{"status": LARGE}],
        }
        state = {"status": "Created", "transport_status": "Queued"}
        await store.put(MESSAGES, key(CONTEXT, 1, id), {**fields, **state}, 1_700_000_000 + id // 4)
    found = await pages(made.message_list, models.MessagePage, context_id=CONTEXT)
    assert [[each["id"] for each in page["messages"]] for page in found] == [[6, 5, 4], [3, 2, 1], [0]]


async def test_logs_of_attempts_are_listed_in_pages(store: FlowStore) -> None:
    for number in range(7):
        id = f"d{number}"
        own = {"task_id": "t", "job_id": 1, "generation": number // 4, "retry": number % 4}
        await store.open_dispatch(
            id, {**own, "transport_id": id, "outcome": "failed", "logs": LARGE, "error": id}, 1, {}, number
        )
    assert [await store.latest_error("t", 1, each) for each in range(3)] == ["d3", "d6", None]
    found = await store.attempts("t", 1, skip=2, limit=500)
    assert ([row["transport_id"] for row in found.rows], found.more) == (["d2", "d3", "d4"], True)
    found = await store.attempts("t", 1, skip=5, limit=500)
    assert ([row["transport_id"] for row in found.rows], found.more) == (["d5", "d6"], False)
    assert all("logs" not in row for row in await store.dispatches("t", [1]))


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        ([{"id": id} for id in range(models.MAX_NODES)], "nodes are more than 10,000"),
        ([{"id": 0, "depends": [models.MAX_ID] * 600_000}], "nodes have more than 6,000,000 bytes of JSON"),
    ],
    ids=["nodes", "bytes"],
)
async def test_flow_does_not_grow_over_its_limits(
    store: FlowStore, stored: list[dict[str, Any]], problem: str
) -> None:
    made = await gateway(store)
    await store.insert_flow({"context_id": CONTEXT, "caller_id": 1, "id": 1, "jobs": [], "nodes": stored}, 1)
    added = models.FlowAdd(context_id=CONTEXT, id=1, nodes=[models.FlowNode(id=models.MAX_NODES)])
    with pytest.raises(InvalidParams, match=f"{problem}.*; split the flow"):
        await made.flow_add_nodes(OPERATOR, added)


class Refusing:
    """A collection that refuses to store documents."""

    def __init__(self, *codes: int) -> None:
        self._error = BulkWriteError({"writeErrors": [{"index": 0, "code": code} for code in codes]})

    async def insert_many(self, *given: object, **more: object) -> None:
        """Raise the error."""
        raise self._error


async def test_events_that_another_gateway_has_stored_first_are_not_stored() -> None:
    database: Any = {EVENTS: Refusing(11_000)}
    assert not await FlowStore(database).append_events([{"seq": 1}])
    database = {EVENTS: Refusing(11_000, 50)}
    with pytest.raises(StoreRefused):
        await FlowStore(database).append_events([{"seq": 1}])
