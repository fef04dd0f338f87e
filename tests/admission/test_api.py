"""The HTTP API of an admission queue. Every response is validated against the OpenAPI document of the server."""

from __future__ import annotations

import asyncio
import io
import re
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator

from flowkit import reason_codes
from flowkit.admission.api import OPERATIONS, PREFIX, admission_routes
from flowkit.admission.models import Door, Kind, Limits, Override, Report, Request, State
from flowkit.admission.queue import AdmissionQueue
from flowkit.admission.store import AdmissionStore
from flowkit.core.utils import dumps
from flowkit.errors import StoreRefused, StoreUnavailable
from flowkit.models.admission import Priority
from flowkit.server.token_store import TokenStore
from flowkit.server.tokens import Right
from flowkit.testing import memory_database
from tests.server.servers import Gate, serving, url
from tests.tenants import create_tenants

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.server.serving import HttpServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCRIPT = {"script": "print(6*7)", "lang": "python", "lang_version": "3.11"}
GRAPH = {"nodes": [{"node_id": "a", "type": "counter"}]}
ENDLESS = {"properties": {"p": {"pattern": "^(a+)+$"}}}
OPERATOR, USER, OTHER, FLOWS, LIMITED = "operator", "7", "8", "flows", "limited"
ADMIN = f"{PREFIX}/admin"

Answer = tuple[int, dict[str, Any], dict[str, str]]


class Front:
    """A server with an empty queue, and a client with a token of each kind."""

    def __init__(self, server: HttpServer, client: aiohttp.ClientSession, tokens: dict[str, str]) -> None:
        self._server = server
        self._client = client
        self._tokens = tokens
        self.document: dict[str, Any] = {}
        self.queue: AdmissionQueue = empty_queue()

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        by: str = USER,
        validated: bool = True,
        **options: Any,
    ) -> Answer:
        """Make a call. Return status, body and headers, after a check against the OpenAPI document."""
        headers = {"Authorization": f"Bearer {self._tokens.get(by, by)}", **options.pop("headers", {})}
        given = {"json": body} if body is not None else {}
        async with self._client.request(
            method, url(self._server, path), headers=headers, **given, **options
        ) as response:
            status, found = response.status, await response.json()
            if validated:
                self._validate(method.lower(), path.partition("?")[0], status, found)
            return status, found, {**response.headers}

    def _validate(self, method: str, path: str, status: int, found: Any) -> None:
        pattern = next(each for each in sorted(self.document["paths"]) if matches(each, path, self.document))
        response = self.document["paths"][pattern][method]["responses"][str(status)]
        schema = response["content"]["application/json"]["schema"]
        Draft202012Validator(
            {**schema, "components": self.document["components"]},
            format_checker=Draft202012Validator.FORMAT_CHECKER,
        ).validate(found)

    async def submit(self, body: Any = SCRIPT, *, by: str = USER, **options: Any) -> Answer:
        """Submit a script or a task."""
        return await self.call("POST", f"{PREFIX}/execute", body, by=by, **options)

    async def queued(self, **fields: Any) -> str:
        """Submit a script that gets its place. Return its id."""
        by = fields.pop("by", USER)
        status, found, _ = await self.submit({**SCRIPT, **fields}, by=by)
        assert (status, found["status"]) == (200, "queued")
        return str(found["execution_id"])

    async def get(self, path: str, *, by: str = USER) -> dict[str, Any]:
        """Return the body of a successful call."""
        status, found, _ = await self.call("GET", f"{PREFIX}/{path}", by=by)
        assert status == 200, found
        return found


def matches(pattern: str, path: str, document: dict[str, Any]) -> bool:
    """Return whether a path of the document describes a path of a call. A path without parameters comes first."""
    if path in document["paths"]:
        return pattern == path
    return re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", pattern), path) is not None


def empty_queue() -> AdmissionQueue:
    """Return a queue on an empty database in memory."""
    return AdmissionQueue(AdmissionStore(memory_database(), queue="q"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Front]:
    """The server of this module."""
    database = memory_database()
    store = TokenStore(database)
    tenants = await create_tenants(database, first=int(USER), second=int(OTHER))
    _, limited = await store.create(actor=int(USER), rights={Right.ADMISSION}, roles=["counter", "sum"])
    tokens = {
        OPERATOR: tenants.operator,
        USER: tenants.first[Right.ADMISSION],
        OTHER: tenants.second[Right.ADMISSION],
        FLOWS: tenants.first[Right.FLOWS],
        LIMITED: limited,
    }
    queue = empty_queue()
    routes = admission_routes(queue, max_nodes=3, external_roles=["outside"])
    async with aiohttp.ClientSession() as client, serving(store, Gate(), routed=routes) as served:
        front = Front(served, client, tokens)
        front.queue = queue
        _, front.document, _ = await front.call("GET", f"{PREFIX}/openapi.json", validated=False)
        yield front


@pytest_asyncio.fixture(loop_scope="module")
async def front(server: Front) -> Front:
    """The server with an empty queue."""
    fresh = empty_queue()
    await fresh.store.prepare()
    vars(server.queue).update(vars(fresh))
    return server


def error_of(answer: Answer) -> tuple[int, str]:
    """Return the status of a response and the code of its error."""
    return answer[0], answer[1]["error"]["code"]


def message_of(answer: Answer) -> str:
    """Return the text of an error."""
    return str(answer[1]["error"]["message"])


# --- submitting ---------------------------------------------------------------------------------------------------


async def test_script_gets_its_place_and_the_default_runtime(front: Front) -> None:
    status, found, _ = await front.submit()
    assert (status, found["status"], found["position"]) == (200, "queued", 1)
    assert await front.queue.body(found["execution_id"]) == {
        "script": "print(6*7)",
        "language": "python",
        "language_version": "3.11",
        "runtime_image": "python:3.11-slim",
        "runtime_command": ["python", "/scripts/main.py"],
        "runtime_filename": "main.py",
        "timeout_seconds": 60,
        "cpu_limit": "1000m",
        "memory_limit": "128Mi",
        "cpu_request": "500m",
        "memory_request": "64Mi",
        "priority": "normal",
    }


async def test_request_keeps_what_its_client_chose(front: Front) -> None:
    given = {
        **SCRIPT,
        "lang": "ruby",
        "lang_version": "3.3",
        "runtime_image": "ruby:3.3",
        "runtime_command": ["ruby", "/scripts/main.rb"],
        "runtime_filename": "main.rb",
        "timeout_seconds": 5,
        "cpu_limit": "2",
        "memory_limit": "1Gi",
        "execution_id": "e1",
        "tenant": "acme",
        "priority": "critical",
        "user_id": "dora",
    }
    status, found, _ = await front.submit(given, by=OPERATOR)
    assert (status, found["execution_id"]) == (200, "e1")
    shown = await front.get("executions/e1", by=OPERATOR)
    assert (shown["tenant"], shown["user_id"], shown["priority"]) == ("acme", "dora", "critical")
    stored = await front.queue.body("e1")
    assert stored is not None
    assert (stored["language"], stored["runtime_image"], stored["timeout_seconds"]) == ("ruby", "ruby:3.3", 5)


async def test_task_is_stored_with_the_default_values_of_its_params(front: Front) -> None:
    graph = {**GRAPH, "params_schema": {"properties": {"n": {"default": 1}}}}
    await front.submit({"graph": graph, "params": {"m": 2}, "execution_id": "t-2"})
    assert await front.queue.body("t-2") == {"graph": graph, "params": {"m": 2, "n": 1}}


async def test_default_image_is_that_of_the_version_of_python(front: Front) -> None:
    stored = await front.queue.body(await front.queued(lang_version="3.13"))
    assert stored is not None
    assert stored["runtime_image"] == "python:3.13-slim"


async def test_id_of_a_task_is_that_of_its_request(front: Front) -> None:
    _, found, _ = await front.submit({"graph": GRAPH, "params": {"n": 1}, "task_id": "t-1"})
    assert found["task_id"] == found["execution_id"] == "t-1"
    assert await front.queue.body("t-1") == {"graph": GRAPH, "params": {"n": 1}}
    assert (await front.get("executions/t-1"))["task_id"] == "t-1"
    _, again, _ = await front.submit({"graph": GRAPH, "params": {"n": 1}, "execution_id": "t-1"})
    assert again["task_id"] == "t-1"
    _, other, _ = await front.submit({"graph": GRAPH})
    assert other["task_id"] == other["execution_id"]


def node_of(type: str, **io: str) -> dict[str, Any]:
    """Return a graph whose second node has this type and input."""
    return {"graph": {"nodes": [*GRAPH["nodes"], {"node_id": "b", "type": type, "io": io}]}}


@pytest.mark.parametrize(
    ("by", "body", "problem"),
    [
        (USER, node_of("job"), "node 'b' needs the role 'job', and the token does not name it"),
        (
            LIMITED,
            node_of("job"),
            "node 'b' needs the role 'job', and the token may use only counter and sum",
        ),
        (
            LIMITED,
            node_of("coordinator_fn"),
            "node 'b' needs the function 'noop', and the token may use only",
        ),
        (LIMITED, node_of("coordinator_fn", fn="vars.set"), "node 'b' needs the function 'vars.set'"),
        (LIMITED, SCRIPT, "a script has no role, and the token may use only counter and sum"),
    ],
)
async def test_graph_has_only_roles_and_functions_that_its_token_may_use(
    front: Front, by: str, body: Any, problem: str
) -> None:
    answer = await front.submit(body, by=by)
    assert error_of(answer) == (403, "role_not_permitted")
    assert problem in message_of(answer)
    assert "--role" in message_of(answer)
    assert (await front.queue.page()).total == 0


@pytest.mark.parametrize(
    ("by", "body"),
    [
        (LIMITED, node_of("coordinator_fn", fn="sum")),
        (LIMITED, {"graph": {"nodes": [*GRAPH["nodes"], {"node_id": "b", "type": "approval"}]}}),
        (USER, node_of("coordinator_fn", fn="vars.set")),
        (OPERATOR, node_of("job")),
        (OPERATOR, SCRIPT),
    ],
)
async def test_roles_that_a_token_may_use_are_accepted(front: Front, by: str, body: Any) -> None:
    assert (await front.submit(body, by=by))[0] == 200


async def test_a_token_with_fewer_roles_does_not_repeat_a_task_of_its_actor(front: Front) -> None:
    id = (await front.submit({"graph": {"nodes": [{"node_id": "a", "type": "other"}]}}))[1]["execution_id"]
    await front.queue.cancel(id, reason="r", by="7")
    retry = f"{PREFIX}/executions/{id}/retry"
    assert error_of(await front.call("POST", retry, by=LIMITED)) == (403, "role_not_permitted")
    assert (await front.call("POST", retry))[0] == 200


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({}, "script is missing"),
        ({"script": ""}, "script is ''"),
        ({"script": "x", "lang": "ruby"}, "runtime_image, runtime_command, runtime_filename"),
        ({"script": "x", "prioritty": "low"}, "did you mean 'priority'"),
        ({"script": "x", "priority": "urgent"}, "priority is 'urgent'"),
        ({"script": "x", "timeout_seconds": "5"}, "timeout_seconds is '5'"),
        ({"script": "x", "timeout_seconds": 0}, "timeout_seconds is 0"),
        ({"script": "x", "cpu_limit": "much"}, "cpu_limit is 'much'"),
        ({"script": "x", "tenant": "a/b"}, "tenant is 'a/b'"),
        ({"script": "x", "user_id": "u" * 201}, "user_id is "),
        ({"script": "x", "execution_id": "e" * 201}, "execution_id is "),
        ({"graph": GRAPH, "script": "x"}, "script: there is no such field"),
        ({"graph": [GRAPH]}, "graph is a list"),
        ({"graph": {"nodes": [{"node_id": "a", "type": "t", "depends_on": ["b"]}]}}, "'b'"),
        ({"graph": {"nodes": [{"node_id": str(i), "type": "t"} for i in range(4)]}}, "4"),
        ({"graph": GRAPH, "task_id": "*"}, "task_id"),
        (
            {"graph": GRAPH, "task_id": "t", "execution_id": "e"},
            "task_id is 't', and execution_id is another",
        ),
        ({"graph": GRAPH, "params": {"n": 2**70}}, "params.n"),
        (
            {"graph": {**GRAPH, "params_schema": ENDLESS}, "params": {"p": "a" * 60 + "!"}},
            "the evaluation takes more than 0.5 s; simplify its patterns",
        ),
        ([SCRIPT], "the body is a list"),
    ],
)
async def test_invalid_field_is_named(front: Front, body: Any, problem: str) -> None:
    answer = await front.submit(body, by=OPERATOR)
    assert answer[0] == 422
    assert problem in message_of(answer)
    assert (await front.queue.page()).total == 0


async def test_script_has_at_most_one_mebibyte(front: Front) -> None:
    for script, status in (("é" * 524_288, 200), ("é" * 524_289, 422)):
        sent = io.BytesIO(dumps({"script": script}))
        answer = await front.call("POST", f"{PREFIX}/execute", data=sent)
        assert answer[0] == status
    assert "1,048,578 bytes" in message_of(answer)


async def test_endless_pattern_of_a_graph_is_given_up(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowkit.activities.params_checks.check_sec", lambda *_: 0.1)
    graph = {**GRAPH, "params_schema": {"properties": {"p": {"pattern": "^(a+)+$"}}}}
    answer = await front.submit({"graph": graph, "params": {"p": "a" * 60 + "!"}})
    assert error_of(answer) == (422, "invalid_graph")
    assert "params_schema" in message_of(answer)
    assert (await front.queue.page()).total == 0


@pytest.mark.parametrize("text", ["{", '{"script": NaN}', '{"script": "\\ud800"}'])
async def test_body_must_be_json(front: Front, text: str) -> None:
    answer = await front.call("POST", f"{PREFIX}/execute", data=text)
    assert error_of(answer) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"script": "a", "script": "b"}', "'script' twice"),
        ('{"timeout_seconds": 1e999}', "timeout_seconds is '1e999'"),
    ],
)
async def test_body_with_a_key_twice_or_a_number_beyond_the_range_is_refused(
    front: Front, text: str, problem: str
) -> None:
    answer = await front.call("POST", f"{PREFIX}/execute", data=text)
    assert error_of(answer) == (400, "invalid_json")
    assert problem in message_of(answer)


# --- ids that occur twice -----------------------------------------------------------------------------------------


async def test_same_key_and_body_returns_the_first_response(front: Front) -> None:
    await front.queued(priority="low")
    headers = {"Idempotency-Key": "order 1"}
    status, first, _ = await front.submit(headers=headers)
    await front.queued(by=OTHER)
    assert (status, first["position"]) == (200, 1)
    await front.queue.dispatch()
    assert (await front.submit(headers=headers))[:2] == (200, first)
    assert (await front.queue.page()).total == 3


async def test_same_key_in_calls_at_the_same_time_is_one_request(front: Front) -> None:
    calls = [front.submit(headers={"Idempotency-Key": "k"}) for _ in range(5)]
    found = [answer[:2] for answer in await asyncio.gather(*calls)]
    assert found == [found[0]] * 5
    assert (await front.queue.page()).total == 1


async def test_key_belongs_to_its_user(front: Front) -> None:
    headers = {"Idempotency-Key": "order 1"}
    ids = {(await front.submit(by=by, headers=headers))[1]["execution_id"] for by in (USER, OTHER, OPERATOR)}
    assert len(ids) == 3


async def test_nobody_can_compute_the_id_behind_a_key_and_use_it_first(front: Front) -> None:
    ids = set()
    for _ in range(2):  # two deployments, whose queues have the same name
        vars(front.queue).update(vars(empty_queue()))
        await front.queue.store.prepare()
        ids.add((await front.submit(headers={"Idempotency-Key": "order 1"}))[1]["execution_id"])
        again = (await front.submit(headers={"Idempotency-Key": "order 1"}))[1]["execution_id"]
        assert again in ids
    assert len(ids) == 2


async def test_users_that_name_one_new_id_at_once_get_it_or_a_conflict(front: Front) -> None:
    calls = [front.submit({**SCRIPT, "execution_id": "e"}, by=by) for by in (USER, OTHER) * 4]
    found = await asyncio.gather(*calls)
    owner = (await front.get("executions/e", by=OPERATOR))["user_id"]
    for by, answer in zip((USER, OTHER) * 4, found, strict=True):
        assert answer[0] == 200 if by == owner else error_of(answer) == (409, "execution_id_taken")


async def test_same_key_with_another_body_is_a_conflict(front: Front) -> None:
    headers = {"Idempotency-Key": "order 1"}
    await front.submit(headers=headers)
    answer = await front.submit({**SCRIPT, "script": "print(1)"}, headers=headers)
    assert error_of(answer) == (409, "idempotency_key_reused")
    assert "'order 1'" in message_of(answer)


async def test_repeated_task_has_the_task_id_of_the_first_one(front: Front) -> None:
    headers = {"Idempotency-Key": "k"}
    first = (await front.submit({"graph": GRAPH}, headers=headers))[1]
    assert (await front.submit({"graph": GRAPH}, headers=headers))[1] == first


async def test_rejected_request_can_be_submitted_again_with_its_key(front: Front) -> None:
    await front.queue.store.set_limits(Limits(max_per_user=1))
    id = await front.queued()
    headers = {"Idempotency-Key": "k"}
    assert (await front.submit(headers=headers))[0] == 429
    assert (await front.submit(headers=headers))[0] == 429
    await front.queue.cancel(id, reason="r", by="7")
    await front.queue.dispatch(0)
    assert (await front.submit(headers=headers))[0] == 200


@pytest.mark.parametrize("key", ["", "k" * 256, "k\tk", "ké"])
async def test_invalid_key_is_named(front: Front, key: str) -> None:
    answer = await front.submit(headers={"Idempotency-Key": key})
    assert error_of(answer) == (422, "invalid_request")
    assert "Idempotency-Key" in message_of(answer)


async def test_key_and_id_exclude_each_other(front: Front) -> None:
    answer = await front.submit({**SCRIPT, "execution_id": "e"}, headers={"Idempotency-Key": "k"})
    assert error_of(answer) == (422, "invalid_request")


async def test_same_id_is_one_request_of_its_user(front: Front) -> None:
    given = {**SCRIPT, "execution_id": "e"}
    first = (await front.submit(given))[1]
    assert (await front.submit(given))[:2] == (200, first)
    assert error_of(await front.submit({**given, "script": "y"})) == (409, "execution_id_taken")
    assert error_of(await front.submit(given, by=OTHER)) == (409, "execution_id_taken")


async def test_rejected_request_of_another_user_is_not_replaced(front: Front) -> None:
    await front.queue.store.set_limits(Limits(users={"7": Override(max_total=1)}))
    await front.queued()
    given = {**SCRIPT, "execution_id": "e"}
    assert (await front.submit(given))[0] == 429
    assert error_of(await front.submit(given, by=OTHER)) == (409, "execution_id_taken")
    assert (await front.get("executions/e"))["status"] == "error"


# --- rejections ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "code", "text"),
    [
        (Limits(max_per_user=1), reason_codes.USER_LIMIT, "User execution limit exceeded (1)"),
        (Limits(max_pending=1), reason_codes.QUEUE_FULL, "Queue is full"),
        (
            Limits(tenants={"default": Override(max_total=1)}),
            reason_codes.TENANT_LIMIT,
            "Tenant execution limit exceeded (1)",
        ),
    ],
)
async def test_rejection_says_why_and_when_to_try_again(
    front: Front, limits: Limits, code: str, text: str
) -> None:
    await front.queue.store.set_limits(limits)
    await front.queued()
    answer = await front.submit({**SCRIPT, "execution_id": "late"})
    assert error_of(answer) == (429, code)
    assert message_of(answer) == f"{text}; try again after 10 s"
    assert answer[2]["Retry-After"] == "10"
    shown = await front.get("executions/late")
    assert (shown["status"], shown["state"], shown["reason"]) == ("error", "rejected", code)


# --- looking ------------------------------------------------------------------------------------------------------


async def test_execution_has_position_state_and_times(front: Front) -> None:
    await front.queued()
    shown = await front.get(f"executions/{await front.queued()}")
    assert (shown["status"], shown["state"], shown["position"]) == ("queued", "queued", 2)
    assert (shown["kind"], shown["task_id"], shown["started_at"]) == ("execution", None, None)
    assert shown["queued_at"].endswith("Z")


async def test_statuses_are_the_documented_ones(front: Front) -> None:
    script = await front.queued(execution_id="script")
    await front.submit({"graph": GRAPH, "execution_id": "task"})
    await front.queue.dispatch()
    shown = [(await front.get(f"executions/{id}")) for id in (script, "task")]
    assert [(each["status"], each["state"]) for each in shown] == [
        ("running", "active"),
        ("scheduled", "starting"),
    ]
    await front.queue.report(script, Report(state=State.FAILED, reason="x", error="no"))
    ended = await front.get("executions/script")
    assert (ended["status"], ended["reason"], ended["error"]) == ("failed", "x", "no")
    assert ended["ended_at"] is not None


async def test_expired_execution_has_timed_out(front: Front) -> None:
    id = await front.queued()
    late = front.queue.clock() + 4_000
    front.queue.clock = lambda: late
    assert (await front.queue.take_due()).ended == 1
    shown = await front.get(f"executions/{id}")
    assert (shown["status"], shown["state"], shown["reason"]) == ("timeout", "expired", "stale")
    listed = await front.get("admin/executions/?status=timeout", by=OPERATOR)
    assert [each["execution_id"] for each in listed["executions"]] == [id]


async def test_events_are_those_of_the_queue(front: Front) -> None:
    id = await front.queued()
    await front.queue.dispatch()
    found = await front.get(f"executions/{id}/events")
    assert [each["event_type"] for each in found["events"]] == [
        "execution_accepted",
        "execution_queued",
        "create_pod_command",
        "execution_started",
        "execution_running",
    ]
    assert found["events"] == await front.queue.events(id)


# --- cancelling and repeating -------------------------------------------------------------------------------------


async def test_waiting_execution_is_cancelled_at_once(front: Front) -> None:
    id = await front.queued()
    cancel = f"{PREFIX}/executions/{id}/cancel"
    _, found, _ = await front.call("POST", cancel, {"reason": "wrong input"})
    [event] = [each for each in await front.queue.events(id) if each["event_type"] == "execution_cancelled"]
    assert (found["status"], found["event_id"]) == ("cancellation_requested", event["event_id"])
    assert (event["reason"], event["cancelled_by"]) == ("wrong input", "7")
    _, again, _ = await front.call("POST", cancel, {"reason": "again"})
    assert (again["status"], again["event_id"]) == ("already_cancelled", None)
    assert (await front.get(f"executions/{id}"))["status"] == "cancelled"


async def test_running_execution_is_asked_to_stop(front: Front) -> None:
    id = await front.queued()
    await front.queue.dispatch()
    cancel = f"{PREFIX}/executions/{id}/cancel"
    _, found, _ = await front.call("POST", cancel, {"reason": "r"})
    _, again, _ = await front.call("POST", cancel, {"reason": "r"})
    last = (await front.queue.events(id))[-1]
    assert last["event_type"] == "delete_pod_command"
    assert [each["event_id"] for each in (found, again)] == [last["event_id"], None]
    assert {each["status"] for each in (found, again)} == {"cancellation_requested"}
    shown = await front.get(f"executions/{id}")
    assert (shown["status"], shown["cancel_requested"]) == ("running", True)


async def test_running_task_is_asked_to_stop_without_an_event(front: Front) -> None:
    await front.submit({"graph": GRAPH, "execution_id": "t"})
    await front.queue.dispatch()
    _, found, _ = await front.call("POST", f"{PREFIX}/executions/t/cancel", {"reason": "r"})
    assert (found["status"], found["event_id"]) == ("cancellation_requested", None)


async def test_ended_execution_cannot_be_cancelled(front: Front) -> None:
    id = await front.queued()
    await front.queue.dispatch()
    await front.queue.report(id, Report(state=State.COMPLETED))
    answer = await front.call("POST", f"{PREFIX}/executions/{id}/cancel", {"reason": "r"})
    assert error_of(answer) == (400, "already_ended")
    assert "completed" in message_of(answer)


async def test_ended_execution_runs_again_as_a_new_one(front: Front) -> None:
    id = await front.queued(script="again")
    retry = f"{PREFIX}/executions/{id}/retry"
    assert error_of(await front.call("POST", retry)) == (400, "not_ended")
    await front.queue.dispatch()
    assert error_of(await front.call("POST", retry)) == (400, "not_ended")
    await front.queue.report(id, Report(state=State.FAILED))
    status, found, _ = await front.call("POST", retry)
    assert (status, found["status"]) == (200, "queued")
    assert found["execution_id"] != id
    assert await front.queue.body(found["execution_id"]) == await front.queue.body(id)


async def test_repeated_task_gets_a_new_task_id(front: Front) -> None:
    await front.submit({"graph": GRAPH, "params": {"n": 1}, "execution_id": "e"})
    await front.queue.cancel("e", reason="r", by="7")
    _, found, _ = await front.call("POST", f"{PREFIX}/executions/e/retry")
    body = await front.queue.body(found["execution_id"])
    assert body is not None
    assert (body["graph"], body["params"]) == (GRAPH, {"n": 1})
    assert found["task_id"] == found["execution_id"] != "e"


async def test_retry_does_not_give_a_user_a_priority_of_operators(front: Front) -> None:
    id = await front.queued(priority="critical", user_id="7", by=OPERATOR)
    await front.queue.cancel(id, reason="r", by="7")
    retry = f"{PREFIX}/executions/{id}/retry"
    made = [(await front.call("POST", retry, by=by))[1]["execution_id"] for by in (USER, OPERATOR)]
    shown = [await front.get(f"executions/{each}") for each in made]
    assert [each["priority"] for each in shown] == ["normal", "critical"]
    assert [each["user_id"] for each in shown] == ["7", "7"]


async def test_what_is_no_longer_kept_cannot_run_again(front: Front) -> None:
    await front.queue.store.set_limits(Limits(max_per_user=1))
    await front.queued()
    assert (await front.submit({"script": "x", "execution_id": "e"}))[0] == 429
    answer = await front.call("POST", f"{PREFIX}/executions/e/retry")
    assert error_of(answer) == (400, "body_not_kept")
    assert f"submit it again with POST {PREFIX}/execute" in message_of(answer)


async def test_retry_can_be_rejected(front: Front) -> None:
    await front.queue.store.set_limits(Limits(max_per_user=1))
    id = await front.queued()
    await front.queue.cancel(id, reason="r", by="7")
    await front.queue.dispatch(0)
    await front.queued()
    answer = await front.call("POST", f"{PREFIX}/executions/{id}/retry")
    assert answer[0] == 429
    assert "Retry-After" in answer[2]


# --- what operators do --------------------------------------------------------------------------------------------


async def test_list_is_filtered_and_in_pages(front: Front) -> None:
    ids = [await front.queued(by=by) for by in (USER, OTHER, USER)]
    await front.queued(tenant="acme", user_id="7", priority="high", by=OPERATOR)
    first = await front.get("admin/executions/?limit=2", by=OPERATOR)
    rest = await front.get("admin/executions/?limit=2&skip=2", by=OPERATOR)
    assert (first["total"], first["limit"], first["skip"], first["has_more"]) == (4, 2, 0, True)
    assert (rest["has_more"], [each["execution_id"] for each in rest["executions"]]) == (False, ids[1::-1])
    for query, count in (
        ("user_id=7", 3),
        ("tenant=acme", 1),
        ("priority=high", 1),
        ("status=queued", 4),
        ("status=running", 0),
        ("user_id=7&tenant=default&priority=normal", 2),
    ):
        assert (await front.get(f"admin/executions/?{query}", by=OPERATOR))["total"] == count, query


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=201", "limit=x", "skip=-1", "status=waiting", "state=queued"]
)
async def test_invalid_parameter_of_a_list_is_named(front: Front, query: str) -> None:
    answer = await front.call("GET", f"{ADMIN}/executions/?{query}", by=OPERATOR)
    assert error_of(answer) == (422, "invalid_request")
    assert query.partition("=")[0] in message_of(answer)


async def test_priority_of_a_waiting_execution_changes(front: Front) -> None:
    await front.queued()
    id = await front.queued()
    path = f"{ADMIN}/executions/{id}/priority"
    status, found, _ = await front.call("PUT", path, {"priority": "high"}, by=OPERATOR)
    assert (status, found["priority"], found["position"]) == (200, "high", 1)
    await front.queue.dispatch()
    answer = await front.call("PUT", path, {"priority": "low"}, by=OPERATOR)
    assert error_of(answer) == (409, "not_waiting")


async def test_priority_must_be_a_band_of_a_known_execution(front: Front) -> None:
    path = f"{ADMIN}/executions/none/priority"
    assert error_of(await front.call("PUT", path, {"priority": "high"}, by=OPERATOR))[0] == 404
    answer = await front.call("PUT", path, {"priority": 1}, by=OPERATOR)
    assert error_of(answer) == (422, "invalid_request")
    assert "priority is 1" in message_of(answer)


async def test_queue_shows_its_load(front: Front) -> None:
    await front.queue.store.set_limits(
        Limits(max_pending=4, max_active=1, tenants={"acme": Override(max_total=9)})
    )
    for fields in ({}, {"priority": "low"}, {"by": OTHER}):
        await front.queued(**fields)
    for _ in range(2):  # the second call confirms what the first one has changed
        await front.queue.dispatch()
    found = await front.get("admin/executions/queue", by=OPERATOR)
    assert (found["queue_depth"], found["active_count"], found["max_concurrent"]) == (2, 1, 1)
    assert found["by_priority"] == {"normal": 1, "low": 1}
    assert (found["utilization"], found["started_last_minute"]) == (0.5, 1)
    assert found["top_users"][0] == {"tenant": "default", "user_id": "7", "pending": 1, "active": 1}
    assert found["limits"]["tenants"] == {"acme": {"max_total": 9, "max_active": None}}
    assert found["oldest_age_seconds"] >= 0


async def test_limits_are_replaced(front: Front) -> None:
    before = await front.get("admin/limits", by=OPERATOR)
    assert (before["max_pending"], before["max_per_user"], before["stale_sec"]) == (10_000, 100, 3_600)
    wanted = {
        **before,
        "max_active": 3,
        "max_active_per_user": 2,
        "users": {"acme/b.c": {"max_total": 10_000}},
    }
    status, after, _ = await front.call("PUT", f"{ADMIN}/limits", wanted, by=OPERATOR)
    assert status == 200
    assert after == {**wanted, "users": {"acme/b.c": {"max_total": 10_000, "max_active": None}}}
    assert await front.get("admin/limits", by=OPERATOR) == after
    assert (await front.queue.store.limits()).users == {"acme/b.c": Override(max_total=10_000)}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_pending": 0}, "max_pending is 0"),
        ({"max_active": 1.5}, "max_active is 1.5"),
        ({"max_per_user": True}, "max_per_user is True"),
        ({"stale_sec": 0.5}, "stale_sec is 0.5"),
        ({"stale_sec": 31 * 86_400}, "stale_sec is"),
        ({"tenants": {"a": {"max_total": 10_001}}}, "tenants.a.max_total is 10001"),
        ({"tenants": {"a/b": {}}}, "tenants.a/b"),
        ({"users": {"a": {"total": 1}}}, "users.a.total"),
        ({"max_pendig": 1}, "did you mean 'max_pending'"),
    ],
)
async def test_invalid_limit_is_named(front: Front, change: dict[str, Any], field: str) -> None:
    before = await front.get("admin/limits", by=OPERATOR)
    answer = await front.call("PUT", f"{ADMIN}/limits", {**before, **change}, by=OPERATOR)
    assert error_of(answer) == (422, "invalid_request")
    assert field in message_of(answer)
    assert await front.get("admin/limits", by=OPERATOR) == before


# --- rights -------------------------------------------------------------------------------------------------------


async def test_user_sees_and_changes_only_its_own_requests(front: Front) -> None:
    id = await front.queued(by=OTHER)
    calls: list[tuple[str, str, Any]] = [
        ("GET", f"executions/{id}", None),
        ("GET", f"executions/{id}/events", None),
        ("POST", f"executions/{id}/cancel", {"reason": "r"}),
        ("POST", f"executions/{id}/retry", None),
    ]
    for method, path, body in calls:
        answer = await front.call(method, f"{PREFIX}/{path}", body)
        unknown = await front.call(method, f"{PREFIX}/{path.replace(id, 'none')}", body)
        assert error_of(answer) == error_of(unknown) == (404, "execution_not_found")
    assert (await front.get(f"executions/{id}", by=OPERATOR))["status"] == "queued"


def request_of(door: Door, tenant: str) -> Request:
    """Return a request of the user 7 that its actor has not made."""
    body = {"script": "x", "priority": "normal"}
    return Request(execution_id="e", user_id=USER, door=door, tenant=tenant, kind=Kind.EXECUTION, body=body)


@pytest.mark.parametrize(
    ("door", "tenant"), [(Door.HTTP, "acme"), (Door.KAFKA, "default"), (Door.PYTHON, "default")]
)
async def test_user_of_another_tenant_or_door_is_another_user(front: Front, door: Door, tenant: str) -> None:
    await front.queue.submit(request_of(door, tenant))
    for method, path, body in (
        ("GET", "executions/e", None),
        ("GET", "executions/e/events", None),
        ("POST", "executions/e/cancel", {"reason": "r"}),
        ("POST", "executions/e/retry", None),
    ):
        answer = await front.call(method, f"{PREFIX}/{path}", body)
        assert error_of(answer) == (404, "execution_not_found")
    assert error_of(await front.submit({**SCRIPT, "execution_id": "e"})) == (409, "execution_id_taken")
    shown = await front.get("executions/e", by=OPERATOR)
    assert (shown["status"], shown["door"], shown["tenant"]) == ("queued", door, tenant)


async def test_request_that_an_operator_repeats_stays_that_of_its_door(front: Front) -> None:
    await front.queue.submit(request_of(Door.KAFKA, "default"))
    await front.queue.cancel("e", reason="r", by="u")
    _, made, _ = await front.call("POST", f"{PREFIX}/executions/e/retry", by=OPERATOR)
    shown = await front.get(f"executions/{made['execution_id']}", by=OPERATOR)
    assert (shown["door"], shown["user_id"]) == ("kafka", USER)
    answer = await front.call("GET", f"{PREFIX}/executions/{made['execution_id']}")
    assert error_of(answer) == (404, "execution_not_found")


@pytest.mark.parametrize("by", [USER, FLOWS])
async def test_only_operators_use_the_admin_routes(front: Front, by: str) -> None:
    id = await front.queued()
    for method, path, body in (
        ("GET", "executions/", None),
        ("GET", "executions/queue", None),
        ("PUT", f"executions/{id}/priority", {"priority": "low"}),
        ("GET", "limits", None),
        ("PUT", "limits", {}),
    ):
        answer = await front.call(method, f"{ADMIN}/{path}", body, by=by)
        assert error_of(answer) == (403, "permission_denied")


async def test_token_needs_the_right(front: Front) -> None:
    answer = await front.submit(by=FLOWS)
    assert error_of(answer) == (403, "permission_denied")
    assert "--right admission" in message_of(answer)


async def test_call_needs_a_token(front: Front) -> None:
    assert error_of(await front.submit(by="fk_none")) == (401, "unauthorized")


async def test_deployment_knows_no_token_of_another_one(front: Front) -> None:
    id = await front.queued()
    other = await create_tenants(memory_database(), first=int(USER), second=int(OTHER))
    for token in (other.operator, other.first[Right.ADMISSION]):
        answer = await front.call("GET", f"{PREFIX}/executions/{id}", by=token)
        assert error_of(answer) == (401, "unauthorized")


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"user_id": "8"}, "user_not_permitted"),
        ({"tenant": "acme"}, "tenant_not_permitted"),
        ({"priority": "high"}, "priority_not_permitted"),
        ({"priority": "critical"}, "priority_not_permitted"),
    ],
)
async def test_user_cannot_choose_what_operators_choose(front: Front, fields: Any, code: str) -> None:
    answer = await front.submit({**SCRIPT, **fields})
    assert error_of(answer) == (403, code)
    assert (await front.queue.page()).total == 0


@pytest.mark.parametrize("priority", [Priority.NORMAL, Priority.LOW, Priority.BACKGROUND])
async def test_user_may_lower_its_priority(front: Front, priority: Priority) -> None:
    id = await front.queued(priority=priority.value, user_id="7")
    assert (await front.get(f"executions/{id}"))["priority"] == priority


async def test_operator_acts_for_itself_unless_it_names_a_user(front: Front) -> None:
    own, other = await front.queued(by=OPERATOR), await front.queued(by=OPERATOR, user_id="7")
    assert (await front.get(f"executions/{own}", by=OPERATOR))["user_id"] == "operator"
    assert (await front.get(f"executions/{other}"))["user_id"] == "7"


# --- the store, and the document ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (StoreUnavailable("no server at 10.0.0.1"), (503, "mongo_unavailable")),
        (StoreRefused("key 'secret' is refused"), (422, "mongo_refused")),
    ],
)
async def test_errors_of_mongodb_have_a_status_and_no_details(
    front: Front, monkeypatch: pytest.MonkeyPatch, error: Exception, expected: tuple[int, str]
) -> None:
    async def fail(request: Request) -> None:
        raise error

    monkeypatch.setattr(front.queue, "submit", fail)
    answer = await front.submit()
    assert error_of(answer) == expected
    assert str(error) not in message_of(answer)
    assert ("Retry-After" in answer[2]) == (expected[0] == 503)


async def test_a_request_of_another_source_is_shown_too(front: Front) -> None:
    await front.queue.submit(
        Request(execution_id="k", user_id="7", door=Door.HTTP, kind=Kind.EXECUTION, body={"script": "x"})
    )
    assert (await front.get("executions/k"))["status"] == "queued"
    assert error_of(await front.submit({**SCRIPT, "execution_id": "k"})) == (409, "execution_id_taken")


async def test_document_describes_every_call(front: Front) -> None:
    described = {(method.upper(), path) for path, each in front.document["paths"].items() for method in each}
    assert described == {(each.method, each.path) for each in OPERATIONS}
    operations = [each for path in front.document["paths"].values() for each in path.values()]
    assert [each["operationId"] for each in operations if not each["summary"]] == []
    for schema in front.document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


async def test_bodies_of_the_document_are_what_the_server_accepts(front: Front) -> None:
    described = front.document["paths"][f"{PREFIX}/execute"]["post"]["requestBody"]
    schema = described["content"]["application/json"]["schema"]
    validator = Draft202012Validator({**schema, "components": front.document["components"]})
    for body, valid in ((SCRIPT, True), ({"graph": GRAPH}, True), ({**SCRIPT, "graph": GRAPH}, False)):
        assert validator.is_valid(body) is valid
        assert ((await front.submit(body))[0] == 200) is valid


async def test_list_does_not_read_what_the_requests_contain(front: Front) -> None:
    id = await front.queued(script="x" * 1_000_000)
    items, total = await front.queue.store.page({}, skip=0, limit=200)
    assert (total, [item["_id"] for item in items]) == (1, [id])
    assert items[0].keys().isdisjoint({"body", "events"})
    status, found, _ = await front.call("GET", f"{ADMIN}/executions/", by=OPERATOR)
    assert (status, found["executions"][0]["execution_id"]) == (200, id)
