"""One secret for each door through which data comes in, and every sink in which it could appear.

The documentation says what is stored as it is: MongoDB keeps params, inputs, variables and error texts; Kafka carries
what workers exchange. With a codec, Temporal stores none of it. The settings of a process appear nowhere.
"""

from __future__ import annotations

import asyncio
import json
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from bson.json_util import dumps
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.query.v1 import WorkflowQuery
from temporalio.api.workflowservice.v1 import QueryWorkflowRequest

from flowkit.observe import start_metrics
from flowkit.payload_converter import VARIABLE
from flowkit.testing.external import Result
from flowkit.worker import RoleHandler
from tests.fork_server import fork_server
from tests.integration.bridge.reading import messages
from tests.integration.harness import EVENT_TIMEOUT_SEC, ROOT, eventually, node
from tests.servers import with_options

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.bridge.external_tasks import ExternalTasks

pytestmark = pytest.mark.server

TASK_ID = "t-secrets"

DATA = ("params", "condition", "io", "literal", "vars", "result")
WORKERS = ("handler_error", "external_error", "external_metrics", "announcement")
SETTINGS = ("mongo_url", "api_key", "kafka_password", "environment")
DOORS = frozenset((*DATA, *WORKERS, *SETTINGS))

NOWHERE: frozenset[str] = frozenset()
ERRORS = frozenset({"handler_error", "external_error"})

ALLOWED = {
    "stderr": frozenset({"handler_error"}),
    "json": ERRORS,
    "history": NOWHERE,
    "query": NOWHERE,
    "document": ERRORS | {"params", "condition", "io", "literal", "vars"},
    "worker_events": ERRORS | {"external_metrics", "announcement"},
    "attempt_logs": frozenset({"handler_error"}),
    "logs": ERRORS,
    "metrics": NOWHERE,
    "kafka": frozenset({"io", "external_error", "external_metrics", "announcement"}),
    "doctor": NOWHERE,
}
"""The doors whose secret a sink may contain, by the documentation. A worker logs and keeps tracebacks of handlers."""


def secret(door: str) -> str:
    """Return the secret of a door, which the detector of sensitive values recognizes."""
    return f"Zq7{door.title().replace('_', '')}Kx93vTb41LmWd85Rh"


def doors_in(text: str) -> frozenset[str]:
    """Return the doors whose secret is in a text."""
    return frozenset(door for door in DOORS if secret(door) in text)


class Leaky(RoleHandler):
    """Fails with a secret in its message."""

    role = "leaky"

    async def load_input(self, input_ref: Any, input_inline: Any) -> Any:
        """Fail."""
        raise ValueError(f"cannot sign in with {secret('handler_error')}")


async def measured(run: Any) -> AsyncIterator[Result]:
    """Yield a batch with a secret in its metrics."""
    yield Result({"token": secret("external_metrics")}, "b0")


async def broken(run: Any) -> AsyncIterator[Result]:
    """Fail with a secret in the error."""
    yield Result({"n": 1}, "b0")
    raise ValueError(f"rejected {secret('external_error')}")


async def sign_in(task_id: str, key: str) -> dict[str, Any]:
    """Return a secret as the result of a function."""
    return {"session": secret("result")}


def function(node_id: str, name: str, **args: Any) -> dict[str, Any]:
    """Return a node that calls a coordinator function."""
    return {"node_id": node_id, "type": "coordinator_fn", "io": {"fn": name, "fn_args": args}}


def leaking_task(external: ExternalTasks) -> dict[str, Any]:
    """Return a task whose data has a secret at each door."""
    tolerated: dict[str, Any] = {"retry_policy": {"max": 0}, "allow_failure": True}
    nodes = [
        function("keep", "vars.set", kv={"session": secret("vars")}),
        function("login", "sign_in", key=secret("literal")),
        node("leaky", "leaky", inline={"key": secret("io")}, **tolerated),
        node("measured", external.role, inline={"key": secret("io")}),
        node("broken", external.other_role, **tolerated),
        node("last", external.role, "keep", when="params.pin > 5 || vars.session > 5", **tolerated),
    ]
    return {"params": {"login": secret("params"), "pin": secret("condition")}, "graph": {"nodes": nodes}}


class Processes:
    """Runs commands with secrets in their settings, and keeps what they print."""

    def __init__(self, external: ExternalTasks) -> None:
        self._environment = {
            **external.environment,
            "MONGO_URL": _url(external, f"authMechanismProperties=AWS_SESSION_TOKEN:{secret('mongo_url')}"),
            "TEMPORAL_API_KEY": secret("api_key"),
            "TEMPORAL_TLS": "false",
            "KAFKA_SASL_PASSWORD": secret("kafka_password"),
            "SOME_ACCESS_KEY": secret("environment"),
        }
        self.stderr = ""

    async def call(self, *arguments: str, given: str = "", code: int = 0, **environment: str) -> str:
        """Run a command, and return what it prints to stdout."""
        env = {**self._environment, **environment}
        run = partial(fork_server().run, arguments, ROOT, env, EVENT_TIMEOUT_SEC, stdin=given)
        exit_code, out, err = await asyncio.to_thread(run)
        self.stderr += err
        assert exit_code == code, (arguments, out, err)
        return out


async def _worker_events(external: ExternalTasks) -> str:
    """Return the log of attempts once it has both errors. Workers write it in the background."""

    async def look() -> str | None:
        found = dumps([row async for row in external.db.worker_events.find()])
        return found if doors_in(found) >= ERRORS else None

    return await eventually(look)


async def _attempt_logs(external: ExternalTasks) -> str:
    """Return the lines that are kept, once the traceback of the handler is among them."""

    async def look() -> str | None:
        found = dumps([row async for row in external.db.attempt_logs.find()])
        return found if doors_in(found) else None

    return await eventually(look)


def _url(external: ExternalTasks, options: str) -> str:
    return with_options(external.environment["MONGO_URL"], options)


async def test_no_sink_contains_a_secret_that_is_not_documented(
    external: ExternalTasks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "tests.integration.encryption:CONVERTER")
    external.environment[VARIABLE] = "tests.integration.encryption:CONVERTER"
    caplog.set_level(logging.INFO, logger="flowkit")
    processes, metrics = Processes(external), start_metrics("test", "flowkit")
    await external.engine(sign_in=sign_in)
    await external.until_served()
    await external.worker({"leaky": Leaky()})
    await external.external(measured, broken, worker_version=secret("announcement"))
    await processes.call(
        "run", "-", "--task-id", TASK_ID, "--watch", given=json.dumps(leaking_task(external))
    )
    document = await external.document(TASK_ID)
    errors = {each["node_id"]: each.get("last_error") for each in document["graph"]["nodes"]}
    assert doors_in(dumps(errors)) == ERRORS, "the error of the condition hides the values that it has read"
    assert "(hidden)" in dumps(errors["last"])
    printed = {
        "json": await _printed(processes, external),
        "doctor": await processes.call("doctor", "--json"),
        "history": await _history(external),
        "query": await _query(external),
        "document": dumps(document),
        "worker_events": await _worker_events(external),
        "attempt_logs": await _attempt_logs(external),
        "logs": await processes.call("logs", "--task", TASK_ID),
        "metrics": metrics.render().decode(),
        "kafka": await _records(external),
        "stderr": processes.stderr + _logged(caplog),
    }
    assert {sink: doors_in(text) - ALLOWED[sink] for sink, text in printed.items()} == dict.fromkeys(
        ALLOWED, NOWHERE
    )
    metrics.stop()
    assert "flowkit_log_lines_total" in printed["metrics"]
    read = ("stderr", "json", "document", "kafka", "logs")
    assert {sink: doors_in(printed[sink]) for sink in read} == {sink: ALLOWED[sink] for sink in read}


async def _printed(processes: Processes, external: ExternalTasks) -> str:
    """Return what commands print to stdout, successful ones and those that cannot use their settings."""
    wrong = _url(external, "").replace("mongodb://", f"mongodb://me:pa/{secret('mongo_url')}@")
    printed = await asyncio.gather(
        processes.call("status", TASK_ID, "--json"),
        processes.call("list", "--json"),
        processes.call("list", "--json", "--verbose", code=2, MONGO_URL=wrong),
        processes.call("bridge", external.role, code=2, KAFKA_BOOTSTRAP_SERVERS=external.names.bootstrap),
    )
    assert '"status": "finished"' in printed[0]
    return "".join(printed)


async def _history(external: ExternalTasks) -> str:
    handle = (await external.client()).get_workflow_handle(TASK_ID)
    return "".join([_text(event.SerializeToString()) async for event in handle.fetch_history_events()])


async def _query(external: ExternalTasks) -> str:
    """Return the response to the query, as Temporal transmits it."""
    client = await external.client()
    request = QueryWorkflowRequest(
        namespace=client.namespace,
        execution=WorkflowExecution(workflow_id=TASK_ID),
        query=WorkflowQuery(query_type="status"),
    )
    response = await client.workflow_service.query_workflow(request)
    assert response.query_result.payloads[0].metadata["encoding"] == b"binary/hidden"
    return _text(response.SerializeToString())


async def _records(external: ExternalTasks) -> str:
    """Return all records of the test's topics."""
    roles = (external.role, external.other_role)
    topics = {name.format(type=role) for name in external.topics.values() for role in roles}
    return json.dumps([await messages(external, topic) for topic in sorted(topics)])


def _logged(caplog: pytest.LogCaptureFixture) -> str:
    """Return what FlowKit has logged, without the external worker, which is not part of it."""
    formatter = logging.Formatter()
    own = [each for each in caplog.records if not each.name.startswith("flowkit.testing")]
    return "\n".join(formatter.format(each) for each in own)


def _text(data: bytes | None) -> str:
    return (data or b"").decode("utf-8", "replace")
