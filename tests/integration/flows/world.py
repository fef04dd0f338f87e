"""A gateway with its job handler and a supervisor, in the process of the test."""

from __future__ import annotations

import io
import os
import random
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, ClassVar, Self

import aiohttp

from flowkit.gateway.client import CallFailed, GatewayClient
from flowkit.gateway.http_client import AllowedNetworks
from flowkit.gateway.process import GatewayProcess, GatewaySettings
from flowkit.gateway.secret_box import SecretBox
from flowkit.testing.supervisor import Supervisor
from tests.integration.harness import eventually
from tests.server.openrpc import validate_result

if TYPE_CHECKING:
    from types import TracebackType

    from tests.integration.harness import Harness

Fields = dict[str, Any]
CALLER, NEIGHBOR, FLOW, RUNNER = 11, 12, 40, 71


class CheckedClient(GatewayClient):
    """A client that validates each result against the OpenRPC document."""

    _document: Fields | None = None

    async def call(self, method: str, params: Any = None) -> Any:
        """Return the result of a method."""
        if self._document is None:
            self._document = await super().call("rpc.discover")
        result = await super().call(method, params)
        validate_result(self._document, method, result)
        return result


class FlowWorld:
    """A gateway that listens, a worker of the role `job` and a supervisor. The engine is that of the harness."""

    SECRET: ClassVar[str] = "a-secret-that-nobody-else-sees"

    def __init__(
        self,
        harness: Harness,
        *,
        context: int | None = None,
        caller: int = CALLER,
        secret: str = "SUPERVISOR_SECRET",
        deployment: FlowWorld | None = None,
    ) -> None:
        """`secret` is the variable with the secret of the runner.

        With `deployment`, its gateway serves this tenant, too.
        """
        self.harness = harness
        self.context = random.getrandbits(32) if context is None else context
        """Unless it is given, a context that no other test uses, because the tests share a Temporal server."""
        self.caller = caller
        self.own = {"context_id": self.context, "id": FLOW}
        self.supervisor = Supervisor(secrets=[os.environ[secret]])
        self.secrets = SecretBox()
        self.gateway: GatewayProcess | None = None
        self._secret = f"env:{secret}"
        self._deployment = deployment
        self._stack = AsyncExitStack()
        self._client: CheckedClient | None = None

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.supervisor)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        if self.gateway is not None:
            await self.gateway.stop()

    async def start(self, *, engine: bool = True, runs_jobs: bool = True) -> None:
        """Start the engine and the gateway."""
        await self.harness.name_deployment()
        if engine:
            await self.harness.engine()
        settings = GatewaySettings(
            queue=self.harness.queue,
            addresses=[("127.0.0.1", 0), ("127.0.0.1", 0)],
            runs_jobs=runs_jobs,
            supervisor_networks=AllowedNetworks.parse("loopback"),
        )
        client = await self.harness.client()
        self.gateway = GatewayProcess(
            db=self.harness.db, client=client, settings=settings, secrets=self.secrets
        )
        await self.gateway.start()

    def wire_id(self, job: int, more: str = "") -> str:
        """Return the id of a job at its supervisor."""
        return f"{self.harness.deployment[:8]}:{self.context}:{self.caller}:{job}{more}"

    def run_id(self, number: str = "1") -> str:
        """Return the id of a run of the flow."""
        return f"flow:{self.harness.deployment[:8]}:{self.context}:{FLOW}/{number}"

    @property
    def url(self) -> str:
        """The address of the gateway."""
        gateway = (self._deployment or self).gateway
        assert gateway is not None
        return f"http://127.0.0.1:{gateway.ports[0]}/"

    async def authenticate(self, token: str) -> None:
        """Make further calls with a token, as those of a tenant."""
        self._client = await self.client(token)

    async def client(self, token: str | None = None, url: str | None = None) -> CheckedClient:
        """Return a client of the gateway."""
        made = CheckedClient(url or self.url, token=token)
        return await self._stack.enter_async_context(made)

    async def call(self, method: str, **params: Any) -> Any:
        """Return the result of a method, as the operator."""
        if self._client is None:
            self._client = await self.client()
        return await self._client.call(method, params)

    async def error(self, method: str, **params: Any) -> CallFailed:
        """Return the error of a call."""
        try:
            found = await self.call(method, **params)
        except CallFailed as error:
            return error
        raise AssertionError(f"{method} returned {found}")

    async def status_of(self, body: str, **headers: str) -> int:
        """Return the status of a request."""
        given = {"Content-Type": "application/json", **headers}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url, data=io.BytesIO(body.encode()), headers=given) as response,
        ):
            return response.status

    async def create(self, jobs: dict[int, Fields], **flow: Any) -> None:
        """Create the context, the runner, these jobs and a flow of them. `depends` and others belong to the node."""
        everyone = {"admins": [self.caller], "executors": [self.caller], "readers": []}
        await self.call("actor.create", actor={"id": self.caller})
        await self.call("context.create", context={"id": self.context, **everyone})
        runner = {"id": RUNNER, "address": self.supervisor.url, "secret": self._secret}
        await self.call("runner.create", context_id=self.context, runner=runner)
        nodes = []
        for id, given in jobs.items():
            node: Fields = {
                name: given[name] for name in ("depends", "prerequisites", "supervisor_url") if name in given
            }
            nodes.append({"id": id, **node})
            await self.create_job(id, **{name: value for name, value in given.items() if name not in node})
        whose = {"caller_id": self.caller, "context_id": self.context}
        owner = {"id": FLOW, **whose, "jobs": [*jobs], "nodes": nodes}
        await self.call("flow.create", context_id=self.context, flow={**owner, **flow})

    async def create_job(self, id: int, **given: Any) -> None:
        """Create a job for the executor `echo`."""
        job = {
            "id": id,
            "caller_id": self.caller,
            "context_id": self.context,
            "executor": "echo",
            "script": f"result {id}",
        }
        await self.call("job.create", context_id=self.context, job={**job, **given})

    async def until(self, status: str) -> Fields:
        """Wait until the flow has a status, and return its state."""

        async def look() -> Fields | None:
            found: Fields = await self.call("flow.status", **self.own)
            return found if found["status"] == status else None

        return await eventually(look)

    async def until_node(self, id: int, status: str) -> None:
        """Wait until a node has a status."""

        async def look() -> bool:
            state = await self.call("flow.status", **self.own)
            return bool(state["nodes"][str(id)]["node_status"] == status)

        await eventually(look)

    async def statuses(self) -> dict[str, str]:
        """Return the statuses of the nodes."""
        state = await self.call("flow.status", **self.own)
        return {id: node["node_status"] for id, node in state["nodes"].items()}
