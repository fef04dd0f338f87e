"""A client that sends random calls about one flow, polls its state, and follows its events."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

from flowkit.gateway.client import CallFailed, GatewayUnavailable
from tests.integration.flow_model.effects import PERMISSION_DENIED
from tests.integration.flow_model.records import (
    ENDS,
    ERROR,
    STARTED,
    STORAGE_ERROR,
    Call,
    Event,
    Result,
    View,
    run_key,
)
from tests.integration.flow_model.supervisors import MYCELIUM_DIGIT, POLL_SEC, SHORT_SEC, SYNC_SEC
from tests.integration.harness import eventually, wait_seconds

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from flowkit.gateway.client import GatewayClient
    from tests.integration.flow_model.records import Fields, History, RunKey

END_SEC: Final = 90.0
"""Seconds after which a run counts as stuck."""
_POLL_SEC: Final = 0.15
_AGAIN_SEC: Final = 0.2
_MOST_JOBS: Final = 4
PREREQUISITES: Final = ("go", "budget")
_REPEATABLE: Final = frozenset({"job.create", "flow.create", "flow.add_nodes", "node.satisfy", "flow.cancel"})
"""Methods of which an identical call, sent again, is a success."""


class FlowClient:
    """A client of one flow. It makes one call after the other, and writes everything down.

    `gateways` have its token, and it uses them in turn; those of `strangers` have the token of another tenant.
    """

    def __init__(
        self,
        chance: random.Random,
        history: History,
        gateways: Sequence[GatewayClient],
        strangers: Sequence[GatewayClient],
        urls: Sequence[str],
    ) -> None:
        """`urls` are what `supervisor_url` may say.

        The last one leads over Mycelium, unless the history is a calm one.
        """
        self.history = history
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self._chance = chance
        self._gateways = itertools.cycle(gateways)
        self._strangers = strangers
        self._urls = urls
        self._own = {"context_id": history.place.context, "id": history.place.flow}
        self._jobs: dict[int, Fields] = {}
        """The jobs as they were last stored."""
        self._nodes: dict[int, Fields] = {}
        self._numbers = itertools.count(1)
        self._read: set[RunKey] = set()
        """The runs whose results were read."""
        self._background: list[asyncio.Task[None]] = []

    # --- the life of the flow

    async def play(self, until: float) -> None:
        """Do random things until this moment, then let the flow end, and read the rest."""
        await self._define()
        self._background = [asyncio.create_task(self._poll()), asyncio.create_task(self._follow())]
        try:
            await self._start()
            while time.monotonic() < until:
                await self._act()
                self._raise_errors()
            await self._finish()
        finally:
            for each in self._background:
                each.cancel()
            await asyncio.wait(self._background)

    def _raise_errors(self) -> None:
        for each in self._background:
            if each.done():
                each.result()

    async def _act(self) -> None:
        actions = self._while_open() if self._is_open() else self._while_ended()
        [action] = self._chance.choices([*actions], [*actions.values()])
        await action()
        await wait_seconds(self._chance.choice([0.0, 0.1, 0.3]))

    def _while_open(self) -> dict[Callable[[], Awaitable[object]], int]:
        return {
            self._wait: 8,
            self._satisfy: 5,
            self._cancel: 1,
            self._add_node: 2,
            self._start: 1,
            self._replace_job: 1,
            self._replace_flow: 1,
            self._retry: 1,
            self._call_as_a_stranger: 1,
        }

    def _while_ended(self) -> dict[Callable[[], Awaitable[object]], int]:
        return {
            self._start: 6,
            self._start_twice: 2,
            self._retry: 4,
            self._replace_job: 3,
            self._replace_flow: 1,
            self._add_node: 1,
            self._satisfy: 1,
            self._cancel: 1,
            self._call_as_a_stranger: 1,
        }

    # --- what the client knows

    @property
    def state(self) -> Fields | None:
        """The latest state that was polled."""
        return self.history.views[-1].state if self.history.views else None

    def _is_open(self) -> bool:
        return self.state is not None and self.state["status"] == STARTED

    @property
    def is_caught_up(self) -> bool:
        """Whether the events of all ended runs have arrived, so that these can be deleted."""
        if self.state is None or self.state["run_id"] is None or self.state["status"] not in ENDS:
            return self.state is not None
        return self._has_ended(self.state["run_id"])

    def _has_ended(self, run_id: str) -> bool:
        """Return whether the event of the end of a run has arrived."""
        return any(
            each.fields["run_id"] == run_id and each.fields["node"] is None and each.fields["to"] in ENDS
            for each in reversed(self.history.events)
        )

    # --- calls

    async def _call(self, method: str, **params: Any) -> Call:
        """Make a call, again until the answer is certain; then perhaps once more.

        Return the call with the first certain answer.
        """
        made = await self._once(method, params)
        while made.is_uncertain:
            await wait_seconds(_AGAIN_SEC)
            made = await self._once(method, params)
        if made.accepted and method in _REPEATABLE and self._chance.random() < 0.3:
            await self._once(method, params, repeats=True)
        return made

    async def _once(self, method: str, params: Fields, *, repeats: bool = False) -> Call:
        sent = time.monotonic()
        answer: Fields = {}
        try:
            answer["result"] = await next(self._gateways).call(method, params)
        except GatewayUnavailable:
            self.counts["lost answer"] += 1
        except CallFailed as error:
            answer = {"code": error.rpc_code, "text": str(error)}
        call = Call(
            method=method, params=params, sent=sent, answered=time.monotonic(), repeats=repeats, **answer
        )
        self.history.calls.append(call)
        self.counts[f"{method} {'accepted' if call.accepted else call.code}"] += 1
        return call

    async def _ask(self, method: str, **params: Any) -> Any:
        """Return the result of a method that changes nothing; None if the gateway or a server does not respond."""
        try:
            return await next(self._gateways).call(method, params)
        except GatewayUnavailable:
            return None
        except CallFailed as error:
            if error.rpc_code != STORAGE_ERROR:
                self.problems.append(f"{method} {params}: {error}")
            return None

    async def _start(self) -> None:
        await self._call("flow.start", **self._own)

    async def _start_twice(self) -> None:
        await asyncio.gather(self._start(), self._start())

    async def _retry(self) -> None:
        """Retry an ended run: what did not complete, or one job."""
        nodes = [self._chance.choice([*self._nodes])] if self._chance.random() < 0.4 else []
        if not nodes and (self.state is None or self.state["status"] != ERROR):
            return
        await self._call("flow.retry", **self._own, nodes=nodes)

    async def _cancel(self) -> None:
        await self._call("flow.cancel", **self._own, reason="not needed")

    async def _satisfy(self) -> None:
        wanted = [name for node in self._nodes.values() for name in node["prerequisites"]]
        if wanted:
            await self._call("node.satisfy", **self._own, prerequisite=self._chance.choice(wanted))

    async def _replace_job(self) -> None:
        await self._store_job(self._chance.choice([*self._jobs]))

    async def _replace_flow(self) -> None:
        """Replace the flow by another graph of the same jobs."""
        await self._store_flow(
            {id: self._random_node(id, [*self._jobs][:place]) for place, id in enumerate(self._jobs)}
        )

    async def _add_node(self) -> None:
        if len(self._nodes) > _MOST_JOBS:
            return
        id = self._new_job()
        await self._store_job(id)
        node = self._random_node(id, [*self._nodes])
        if (await self._call("flow.add_nodes", **self._own, nodes=[node])).accepted:
            self._nodes[id] = node

    async def _wait(self) -> None:
        await wait_seconds(self._chance.uniform(0.2, 1.0))

    async def _call_as_a_stranger(self) -> None:
        """Call a method with the token of another tenant, who must not even learn whether the flow exists."""
        if not self._strangers:
            return
        job = self._own | {"id": next(iter(self._jobs))}
        params: dict[str, Fields] = {
            "flow.status": self._own,
            "flow.start": self._own,
            "flow.cancel": self._own,
            "flow.retry": self._own,
            "flow.list": {"context_id": self._own["context_id"]},
            "message.list": {"context_id": self._own["context_id"]},
            "job.result": job,
            "node.satisfy": self._own | {"prerequisite": "go"},
        }
        method = self._chance.choice([*params])
        try:
            found: object = await self._chance.choice(self._strangers).call(method, params[method])
        except GatewayUnavailable:
            return
        except CallFailed as error:
            if error.rpc_code in (PERMISSION_DENIED, STORAGE_ERROR):
                return
            found = error
        self.problems.append(f"{method} by another tenant: {found}")

    # --- definitions

    async def _define(self) -> None:
        for _ in range(self._chance.randint(2, _MOST_JOBS)):
            await self._store_job(self._new_job())
        await self._store_flow(
            {id: self._random_node(id, [*self._jobs][:place]) for place, id in enumerate(self._jobs)}
        )

    def _new_job(self) -> int:
        return self.history.place.flow * 100 + next(self._numbers)

    async def _store_job(self, id: int) -> None:
        chance, calm = self._chance, self.history.is_calm
        number = len(self.history.calls)
        scripts = [f"sleep:{chance.uniform(0.1, 1.0):.3f}", f"echo {number}"]
        timeouts = [SYNC_SEC, SYNC_SEC, POLL_SEC] + ([] if calm else [SHORT_SEC])
        job = {
            "id": id,
            "caller_id": self.history.place.caller,
            "context_id": self.history.place.context,
            "executor": "echo",
            "script": f"fail:{number}" if chance.random() < 0.1 else chance.choice(scripts),
            "timeout": SYNC_SEC if id % 10 == MYCELIUM_DIGIT and not calm else chance.choice(timeouts),
            "retries": chance.choice([0, 0, 1]),
            "env_vars": {"VERSION": str(number)},
        }
        if (await self._call("job.create", context_id=self._own["context_id"], job=job)).accepted:
            self._jobs[id] = job

    async def _store_flow(self, nodes: dict[int, Fields]) -> None:
        flow = {
            "id": self.history.place.flow,
            "caller_id": self.history.place.caller,
            "context_id": self.history.place.context,
            "nodes": [*nodes.values()],
            "on_failure": self._chance.choice(["finish_running", "continue"]),
            "env_vars": {"FLOW": str(len(self.history.calls))},
        }
        if (await self._call("flow.create", context_id=self._own["context_id"], flow=flow)).accepted:
            self._nodes = nodes

    def _random_node(self, id: int, parents: Sequence[int]) -> Fields:
        chance = self._chance
        by_mycelium = id % 10 == MYCELIUM_DIGIT and not self.history.is_calm
        return {
            "id": id,
            "depends": [each for each in parents if chance.random() < 0.4],
            "prerequisites": [name for name in PREREQUISITES if chance.random() < 0.15],
            "supervisor_url": self._urls[-1] if by_mycelium else chance.choice(self._urls[:-1]),
        }

    # --- reading

    async def _poll(self) -> None:
        while True:
            await self._look()
            await wait_seconds(_POLL_SEC)

    async def _look(self) -> None:
        """Poll the state. When a run has ended, read its results, unless another one has begun meanwhile."""
        view = await self._view()
        if view is None:
            return
        self.history.views.append(view)
        key = self._ended_run(view)
        if key is None or key in self._read:
            return
        found = [await self._result(key, int(id)) for id in view.state["nodes"]]
        again = await self._view()
        if again is not None and self._ended_run(again) == key and None not in found:
            self.history.results += [each for each in found if each is not None]
            self._read.add(key)

    async def _view(self) -> View | None:
        sent = time.monotonic()
        state = await self._ask("flow.status", **self._own)
        return None if state is None else View(sent=sent, answered=time.monotonic(), state=state)

    def _ended_run(self, view: View) -> RunKey | None:
        if view.state["run_id"] is None or view.state["status"] not in ENDS:
            return None
        return run_key(self.history.place, view.state["run_id"])

    async def _result(self, run: RunKey, job: int) -> Result | None:
        fields = await self._ask("job.result", **self._own | {"id": job, "flow_id": self._own["id"]})
        return None if fields is None else Result(run=run, answered=time.monotonic(), fields=fields)

    async def _follow(self) -> None:
        """Collect the events over connections that break, or that the client drops."""
        while True:
            most = self._chance.choice([3, 10, 1000])
            try:
                await self._follow_once(most)
            except GatewayUnavailable:
                self.counts["lost connection"] += 1
            except CallFailed as error:
                if error.rpc_code != STORAGE_ERROR:
                    self.problems.append(f"flow.subscribe: {error}")
            await wait_seconds(_AGAIN_SEC)

    async def _follow_once(self, most: int) -> None:
        events = self.history.events
        after = events[-1].fields["seq"] if events else 0
        async with self._subscription(after) as arriving:
            async for fields in arriving:
                events.append(Event(at=time.monotonic(), fields=fields))
                most -= 1
                if not most:
                    return

    def _subscription(self, after: int) -> AbstractAsyncContextManager[Any]:
        place = self.history.place
        return aclosing(next(self._gateways).events(place.context, place.flow, after))

    # --- the end

    async def _finish(self) -> None:
        """Satisfy everything, wait for the end of the run and its last event, and read the dispatches."""
        for name in PREREQUISITES:
            await self._call("node.satisfy", **self._own, prerequisite=name)
        begun = time.monotonic()

        async def is_over() -> bool:
            self._raise_errors()
            state = self.history.views[-1]
            if state.sent < begun or self._is_open():
                return False
            run = state.state["run_id"]
            return run is None or (self._has_ended(run) and run_key(self.history.place, run) in self._read)

        try:
            await eventually(is_over, END_SEC)
        except AssertionError:
            self.problems.append(f"the run does not end: {self.state}")
        await self._read_dispatches()

    async def _read_dispatches(self) -> None:
        async def look() -> Fields | None:
            given = {"context_id": self._own["context_id"], "flow_id": self._own["id"], "limit": 500}
            found: Fields | None = await self._ask("message.list", **given)
            return found

        self.history.dispatches = (await eventually(look, END_SEC))["messages"]
