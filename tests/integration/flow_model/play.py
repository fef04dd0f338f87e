"""Two deployments in one namespace whose flows have the same ids: one with two tenants and faults, and a calm one."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from flowkit.cli.options import DeploymentOptions
from flowkit.cli.retention.purging import PurgeOptions, purge_tasks
from flowkit.gateway.client import CallFailed, GatewayClient, GatewayUnavailable
from flowkit.gateway.http_client import AllowedNetworks
from flowkit.gateway.process import GatewayProcess, GatewaySettings
from flowkit.gateway.secret_box import SecretBox
from flowkit.models.tasks import TaskStatus
from flowkit.server.tokens import Right
from flowkit.testing.supervisor import MyceliumNode
from tests.integration.flow_model.client import FlowClient
from tests.integration.flow_model.cluster import Cluster, Part
from tests.integration.flow_model.limits import limit_problems
from tests.integration.flow_model.records import History, Place
from tests.integration.flow_model.supervisors import RecordingSupervisor
from tests.integration.flow_model.verify import problems_of, written
from tests.integration.harness import eventually, wait_seconds
from tests.tenants import create_tenants

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType

    from tests.integration.harness import Harness
    from tests.tenants import Tenants

FIRST, SECOND = 11, 12
"""The actors of the two tenants. The calm deployment has the first one, too."""
SECRETS: Final = {FIRST: ("FIRST_SECRET", "secret-of-one"), SECOND: ("SECOND_SECRET", "secret-of-two")}
"""The variable with the secret of the runners of an actor, and its value."""
FLOWS: Final = {FIRST: (40, 41), SECOND: (40,)}
HTTP_RUNNER, MYCELIUM_RUNNER = 71, 72
_SHOWN_SEC: Final = {True: 3.0, False: 20.0}
_OLD_SEC: Final = 2.0
"""Age of the ended runs that are deleted, so that every client has seen their last events."""


class Play:
    """One play. `harness` and `calm` are the harnesses of the deployments."""

    def __init__(self, harness: Harness, calm: Harness, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._harness, self._calm = harness, calm
        self._seed = seed
        self._chance = random.Random(f"{seed}-play")
        self._stack = AsyncExitStack()
        self._contexts = dict(zip(SECRETS, random.sample(range(2**32), 2), strict=True))
        """Contexts that no other test uses, because the tests share a Temporal server."""
        self._clients: list[FlowClient] = []
        self._supervisors: dict[int, RecordingSupervisor] = {}
        self._calm_gateway: GatewayProcess | None = None
        self._cluster: Cluster | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._set_up()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def run(self, seconds: float) -> None:
        """Play for this time and until all flows have ended. The problems are then in `problems`."""
        begun = time.monotonic()
        until = begun + seconds
        faults = asyncio.create_task(self._inject_faults(until))
        purging = asyncio.create_task(self._purge_sometimes())
        try:
            async with asyncio.TaskGroup() as group:
                for client in self._clients:
                    group.create_task(client.play(until))
        finally:
            purging.cancel()
            await asyncio.wait([purging, faults])
        faults.result()
        self.counts["seconds"] = round(time.monotonic() - begun)
        self._verify()

    # --- both deployments

    async def _set_up(self) -> None:
        node, far = await self._nodes()
        for actor, (name, secret) in SECRETS.items():
            self._harness.environment[name] = secret
            made = RecordingSupervisor(
                secrets=[secret],
                seed=self._seed,
                node=far if actor == FIRST else None,
                redirect_to="http://127.0.0.1:1/",
            )
            self._supervisors[actor] = await self._stack.enter_async_context(made)
        self._cluster = Cluster(self._harness, node.url)
        self._harness.settings["lease_ttl_sec"] = 2
        await self._harness.name_deployment()
        for part in Part:
            self._cluster.start(part, limit=2)
        tenants = await create_tenants(self._harness.db, first=FIRST, second=SECOND)
        gateways = {
            token: [await self._gateway(url, token) for url in self._cluster.urls]
            for token in (tenants.operator, tenants.first[Right.FLOWS], tenants.second[Right.FLOWS])
        }
        for actor in SECRETS:
            await self._register(gateways[tenants.operator][0], actor, self._supervisors[actor], far.key)
        self._add_clients(gateways, tenants)
        await self._set_up_calm()

    async def _nodes(self) -> tuple[MyceliumNode, MyceliumNode]:
        network: dict[str, MyceliumNode] = {}
        nodes = [await self._stack.enter_async_context(MyceliumNode(network)) for _ in range(2)]
        return nodes[0], nodes[1]

    def _add_clients(self, gateways: dict[str, list[GatewayClient]], tenants: Tenants) -> None:
        tokens = {FIRST: tenants.first[Right.FLOWS], SECOND: tenants.second[Right.FLOWS]}
        for actor, flows in FLOWS.items():
            own, other = tokens[actor], tokens[SECOND if actor == FIRST else FIRST]
            url = self._supervisors[actor].url
            urls = [
                f"runner:{HTTP_RUNNER}",
                "",
                url,
                f"{url}/",
                f"runner:{MYCELIUM_RUNNER if actor == FIRST else HTTP_RUNNER}",
            ]
            for flow in flows:
                history = self._history(self._harness, actor, flow, is_calm=False)
                self._add_client(history, gateways[own], gateways[other], urls)

    def _history(self, harness: Harness, actor: int, flow: int, *, is_calm: bool) -> History:
        place = Place(
            deployment=harness.deployment[:8], context=self._contexts[actor], caller=actor, flow=flow
        )
        return History(place=place, secret=SECRETS[actor][1], is_calm=is_calm, shown_sec=_SHOWN_SEC[is_calm])

    def _add_client(
        self,
        history: History,
        gateways: Sequence[GatewayClient],
        strangers: Sequence[GatewayClient],
        urls: Sequence[str],
    ) -> None:
        chance = random.Random(f"{self._seed}-{len(self._clients)}")
        self._clients.append(FlowClient(chance, history, gateways, strangers, urls))

    async def _gateway(self, url: str, token: str | None) -> GatewayClient:
        return await self._stack.enter_async_context(GatewayClient(url, token=token))

    async def _register(
        self, operator: GatewayClient, actor: int, supervisor: RecordingSupervisor, key: str
    ) -> None:
        """Create an actor, its context and its runners, as soon as the gateway responds."""
        context = {"id": self._contexts[actor], "admins": [actor]}
        secret = f"env:{SECRETS[actor][0]}"
        runner = {"id": HTTP_RUNNER, "address": supervisor.url, "secret": secret}
        far = {"id": MYCELIUM_RUNNER, "pubkey": key, "secret": secret, "executors": ["other"]}
        calls: list[tuple[str, dict[str, Any]]] = [
            ("actor.create", {"actor": {"id": actor}}),
            ("context.create", {"context": context}),
            ("runner.create", {"context_id": context["id"], "runner": runner}),
            ("runner.create", {"context_id": context["id"], "runner": far}),
        ]
        for method, params in calls:
            await eventually(partial(_responds, operator, method, params))

    async def _set_up_calm(self) -> None:
        """Start a gateway and an engine in this process, for flows of the same context."""
        actor, (_, secret) = FIRST, SECRETS[FIRST]
        supervisor = await self._stack.enter_async_context(RecordingSupervisor(secrets=[secret]))
        self._supervisors[-1] = supervisor
        await self._calm.name_deployment()
        await self._calm.engine()
        settings = GatewaySettings(
            queue=self._calm.queue,
            addresses=[("127.0.0.1", 0), ("127.0.0.1", 0)],
            supervisor_networks=AllowedNetworks.parse("loopback"),
        )
        client = await self._calm.client()
        gateway = GatewayProcess(db=self._calm.db, client=client, settings=settings, secrets=SecretBox())
        await gateway.start()
        self._stack.push_async_callback(gateway.stop)
        called = await self._gateway(f"http://127.0.0.1:{gateway.ports[0]}/", None)
        await self._register(called, actor, supervisor, "0" * 64)
        urls = [f"runner:{HTTP_RUNNER}", "", supervisor.url, ""]
        self._add_client(self._history(self._calm, actor, FLOWS[FIRST][0], is_calm=True), [called], [], urls)

    # --- faults, and what an operator does

    async def _inject_faults(self, until: float) -> None:
        """Kill processes, all at least once, and let supervisors be away."""
        assert self._cluster is not None
        first = self._chance.sample([*Part], len(Part))
        for part in itertools.chain(first, iter(lambda: self._chance.choice([*Part, None]), 0)):
            await wait_seconds(self._chance.uniform(0.5, 2.0))
            if time.monotonic() > until and all(f"killed {each}" in self.counts for each in first):
                return
            if part is None:
                await self._interrupt(self._chance.choice([*SECRETS]))
                continue
            longest = 6.0 if part is Part.ENGINE else 1.0
            away = self._chance.choice([0.0, self._chance.uniform(0.0, longest)])
            await self._cluster.kill(part, away, self._chance.choice([None, 1, 1, 2]))
            self.counts[f"killed {part}"] += 1

    async def _interrupt(self, actor: int) -> None:
        """Let a supervisor break all connections, and listen again later."""
        await self._supervisors[actor].close()
        await wait_seconds(self._chance.uniform(0.0, 1.5))
        await self._supervisors[actor].listen()
        self.counts["interrupted supervisor"] += 1

    async def _purge_sometimes(self) -> None:
        """Delete the ended runs of both deployments now and then, when all clients have seen how these have ended."""
        while True:
            await wait_seconds(self._chance.uniform(2.0, 4.0))
            for harness, calm in ((self._harness, False), (self._calm, True)):
                clients = [each for each in self._clients if each.history.is_calm is calm]
                if all(each.is_caught_up for each in clients):
                    await self._purge(harness, clients)

    async def _purge(self, harness: Harness, clients: Sequence[FlowClient]) -> None:
        where = DeploymentOptions(mongo_url=harness.environment["MONGO_URL"], database=harness.database)
        statuses = tuple(status.value for status in TaskStatus if status.closed)
        options = PurgeOptions(older_than_sec=_OLD_SEC, statuses=statuses, dry_run=False)
        begun = time.monotonic()
        purged = await purge_tasks(where, options, quiet=True)
        if purged.rows["tasks"]:
            self.counts["purged runs"] += purged.rows["tasks"]
            for each in clients:
                each.history.purges.append((begun, time.monotonic()))

    # --- the end

    def write(self, folder: Path) -> None:
        """Write the histories into a folder."""
        for number, client in enumerate(self._clients):
            (folder / f"flow-{number}.txt").write_text(written(client.history), encoding="utf-8")

    def _verify(self) -> None:
        for client in self._clients:
            self.counts.update(client.counts)
            self._share_out(client.history)
            self.problems += [f"{client.history.place}: {each}" for each in client.problems]
            self.problems += problems_of(client.history)
        self.problems += self._foreign_deliveries()
        assert self._cluster is not None
        killed = [client.history for client in self._clients if not client.history.is_calm]
        self.problems += limit_problems(killed, self._cluster.eras)

    def _share_out(self, history: History) -> None:
        """Give a history what its supervisor has received and run of its flow."""
        supervisor = self._supervisors[-1 if history.is_calm else history.place.caller]
        own = re.compile(rf".*:{history.place.flow}\d\d([@/].*)?")
        history.deliveries = [each for each in supervisor.deliveries if own.fullmatch(each.id)]
        history.executions = [each for each in supervisor.journal if own.fullmatch(each.id)]

    def _foreign_deliveries(self) -> list[str]:
        shared = {id(each) for client in self._clients for each in client.history.deliveries}
        return [
            f"a supervisor has received {each.id}, a job of no flow of its tenant"
            for supervisor in self._supervisors.values()
            for each in supervisor.deliveries
            if id(each) not in shared
        ]


async def _responds(gateway: GatewayClient, method: str, params: dict[str, Any]) -> bool:
    try:
        await gateway.call(method, params)
    except (GatewayUnavailable, CallFailed):
        return False
    return True
