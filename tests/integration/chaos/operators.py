"""Operators send random actions to tasks, by bare updates and by the client, some of them again with the
same update id."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any

from pymongo.errors import PyMongoError
from temporalio.client import WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from flowkit import reason_codes
from flowkit.errors import ActionRejected, FlowKitError
from tests.integration.chaos.cluster import wait_before_retry
from tests.integration.chaos.plans import APPROVAL

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from temporalio.client import WorkflowHandle

    from tests.integration.chaos.plans import NodePlan, TaskPlan
    from tests.integration.harness import Harness

ANSWER_TIMEOUT = timedelta(seconds=10)
RERUN = "rerun"
ACTIONS_OF_A_RUN = (4, 18)
"""Number of random actions that are sent to a run of a task. Then only what lets it end."""
_PAUSE_SEC, _LAST_PAUSE_SEC = (0.05, 0.7), 2.0
"""Time between two random actions, and between those that let the task end."""
_WRONG_SHARE = 0.06
"""Share of the actions that name a batch, a revision or a state that does not exist."""
_REPEATED_SHARE = 0.3
_STATUSES = {"graph.nodes.node_id": 1, "graph.nodes.status": 1}
WEIGHTS = {
    "pause": 2,
    "resume": 3,
    "retry_node": 5,
    "skip_node": 2,
    "complete_node": 3,
    "fail_node": 2,
    "retry_batches": 6,
    "skip_batches": 5,
    "decide": 4,
    "satisfy": 3,
    "change_graph": 3,
}
_FITTING_SHARE = 0.75
_OPEN, _ENDED = ("queued", "running", "deferred"), ("finished", "failed", "skipped")
_ANY = (*_OPEN, *_ENDED)
_FITTING = {
    "pause": _OPEN,
    "retry_node": ("deferred", "running", *_ENDED),
    "retry_batches": ("finished", "failed", "deferred"),
    "skip_batches": ("finished", "failed", "deferred"),
    "decide": ("deferred",),
    "satisfy": ("queued",),
    "change_graph": ("queued",),
}
"""Statuses of nodes for which an action makes sense; all for the other actions."""


@dataclass(kw_only=True)
class Request:
    """One action that was sent to a task, once or more often, and what became of it."""

    tag: str
    """The `reason` of the action, which no other request has."""
    name: str
    given: dict[str, Any]
    wrong: bool = False
    """Whether the task must refuse it: it names a batch, a revision or a state that does not exist."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Errors that do not say whether the task has applied the action."""


def draw_request(chance: random.Random, plan: TaskPlan, tag: str, statuses: Mapping[str, str]) -> Request:
    """Draw an action on a task. Most fit the statuses of the nodes as they were a moment ago."""
    fits = chance.random() < _FITTING_SHARE
    pairs = [
        (name, node)
        for name in WEIGHTS
        for node in _nodes_for(name, plan)
        if not fits or statuses.get(node.node_id) in _FITTING.get(name, _ANY)
    ] or [("pause", plan.nodes[0])]
    known = Counter(name for name, _ in pairs)
    [(name, node)] = chance.choices(pairs, [WEIGHTS[name] / known[name] for name, _ in pairs])
    given = _fields_of(chance, name, node, plan, tag)
    if name not in {"resume", "decide", "satisfy", "change_graph"}:
        given["interrupt"] = chance.random() < 0.5
    wrong = chance.random() < _WRONG_SHARE
    if wrong:
        given |= _wrong_field(chance, name)
    return Request(tag=tag, name=name, given={**given, "reason": tag, "by": "chaos"}, wrong=wrong)


def _nodes_for(name: str, plan: TaskPlan) -> Sequence[NodePlan]:
    """Return the nodes that an action can name."""
    nodes = plan.nodes
    if name == "decide":
        return [node for node in nodes if node.kind == APPROVAL]
    if name == "satisfy":
        return [node for node in nodes if node.prerequisites]
    if name in {"retry_batches", "skip_batches"}:
        return [node for node in nodes if node.aside]
    if name == "change_graph":
        return [node for node in nodes if not (node.call or node.kind)]
    return nodes


def _fields_of(chance: random.Random, name: str, node: NodePlan, plan: TaskPlan, tag: str) -> dict[str, Any]:
    """Return the fields of an action about a node."""
    own: dict[str, Any] = {"node_id": node.node_id}
    draws: dict[str, Callable[[], dict[str, Any]]] = {
        "pause": lambda: {"scopes": _scopes(chance, node)},
        "resume": dict,
        "satisfy": lambda: {"prerequisite": node.prerequisites[0]},
        "change_graph": lambda: _change(chance, node, plan, tag),
        "decide": lambda: {**own, "decision": chance.choice(["approve", "reject"]), "comment": tag},
        "complete_node": lambda: {
            **own,
            "metrics": {"tag": tag},
            "batches": _batches(chance, node, tag),
        },
        "retry_batches": lambda: {**own, **_some_batches(chance, node)},
        "skip_batches": lambda: {**own, **_some_batches(chance, node)},
        "retry_node": lambda: {**own, **_new_input(chance, node, tag)},
    }
    return draws[name]() if name in draws else own


def _scopes(chance: random.Random, node: NodePlan) -> list[str]:
    kinds = ["task", f"node:{node.node_id}", f"below:{node.node_id}", f"role:{node.role}"]
    return chance.sample(kinds, chance.randint(1, 2))


def _change(chance: random.Random, node: NodePlan, plan: TaskPlan, tag: str) -> dict[str, Any]:
    if plan.first and chance.random() < 0.5:
        return plan.added()
    return {"changes": {node.node_id: {"io": {"input_inline": {"mark": tag}}}}}


def _some_batches(chance: random.Random, node: NodePlan) -> dict[str, Any]:
    if chance.random() < 0.4:
        return {}
    return {"batch_uids": chance.sample(node.aside, chance.randint(1, len(node.aside)))}


def _new_input(chance: random.Random, node: NodePlan, tag: str) -> dict[str, Any]:
    has_input = not (node.call or node.kind) and chance.random() < 0.5
    return {"input_inline": {"mark": tag}} if has_input else {}


def _batches(chance: random.Random, node: NodePlan, tag: str) -> list[dict[str, Any]]:
    if node.call or node.kind:
        return []
    number = tag.rpartition("/")[2]
    return [
        {
            "batch_uid": f"{node.key}-by-{number}-{place}",
            "metrics": {"items": [int(number), place], "written_by": {"tag": tag}},
        }
        for place in range(chance.randint(0, 2))
    ]


def _wrong_field(chance: random.Random, name: str) -> dict[str, Any]:
    if name in {"retry_batches", "skip_batches"} and chance.random() < 0.7:
        return {"batch_uids": ["no such batch"]}
    return chance.choice([{"if_revision": 100_000}, {"if_state": "0" * 16}])


class Operator:
    """Sends actions to one task, and keeps what became of each."""

    def __init__(
        self, plan: TaskPlan, chance: random.Random, handle: WorkflowHandle[Any, Any], harness: Harness
    ) -> None:
        self.requests: list[Request] = []
        self._numbers = count()
        self._plan = plan
        self._chance = chance
        self._handle = handle
        self._coordinator = harness.coordinator
        self._tasks = harness.db.tasks
        self._left = 0
        self.begin_run()

    def begin_run(self) -> None:
        """Send random actions to the task again, because it has started, or starts again."""
        self._left = self._chance.randint(*ACTIONS_OF_A_RUN)

    @property
    def pause(self) -> float:
        """Seconds until the next action."""
        return self._chance.uniform(*_PAUSE_SEC) if self._left else _LAST_PAUSE_SEC

    def new_tag(self) -> str:
        """Return a text that no other request contains."""
        return f"{self._plan.task_id}/{next(self._numbers)}"

    async def act(self) -> None:
        """Send one random action, or two at once; after the last of them, those that let the task end."""
        if self._left:
            self._left -= 1
            statuses = await self._statuses()
            drawn = [self._draw(statuses) for _ in range(self._chance.choice([1, 1, 2]))]
            await asyncio.gather(*map(self._send, drawn))
            return
        wanted = {each for node in self._plan.nodes for each in node.prerequisites}
        for name, given in (("resume", {}), *(("satisfy", {"prerequisite": each}) for each in wanted)):
            request = Request(tag=self.new_tag(), name=name, given=dict(given))
            request.given |= {"reason": request.tag, "by": "chaos"}
            self.requests.append(request)
            await self._send(request)

    def _draw(self, statuses: Mapping[str, str]) -> Request:
        request = draw_request(self._chance, self._plan, self.new_tag(), statuses)
        self.requests.append(request)
        return request

    async def _statuses(self) -> dict[str, str]:
        """Return the status of each node, as the document of the task shows it."""
        with suppress(PyMongoError):
            document = await self._tasks.find_one({"id": self._plan.task_id}, _STATUSES) or {}
            return {each["node_id"]: each["status"] for each in document.get("graph", {}).get("nodes", ())}
        return {}

    async def _send(self, request: Request) -> None:
        if self._chance.random() < 0.4:
            await self._send_by_client(request)
        elif self._chance.random() < _REPEATED_SHARE:
            await asyncio.gather(self._send_bare(request), self._send_bare(request))
            await self._send_bare(request)
        else:
            await self._send_bare(request)

    async def _send_by_client(self, request: Request) -> None:
        """Send a request once, because the client chooses the id of the update."""
        call: Callable[..., Awaitable[dict[str, Any]]] = getattr(self._coordinator, request.name)
        try:
            request.answers.append(await call(self._plan.task_id, **request.given))
        except ActionRejected as error:
            request.refusals.append(str(error))
        except (FlowKitError, PyMongoError, RPCError, OSError, TimeoutError) as error:
            request.unknown.append(repr(error))

    async def _send_bare(self, request: Request) -> None:
        """Send a request with the same id until it is answered, or the task has ended."""
        while True:
            with suppress(WorkflowUpdateRPCTimeoutOrCancelledError):
                try:
                    answer = await self._handle.execute_update(
                        request.name,
                        request.given,
                        id=request.tag,
                        result_type=dict,
                        rpc_timeout=ANSWER_TIMEOUT,
                    )
                    request.answers.append(answer)
                    return
                except WorkflowUpdateFailedError as error:
                    self._note_failure(request, error)
                    return
                except RPCError as error:
                    request.unknown.append(error.message)
                    if error.status is RPCStatusCode.NOT_FOUND:
                        return
            await wait_before_retry()

    def _note_failure(self, request: Request, error: WorkflowUpdateFailedError) -> None:
        cause = error.cause
        is_refused = isinstance(cause, ApplicationError) and cause.type == reason_codes.ACTION_REJECTED
        (request.refusals if is_refused else request.unknown).append(str(cause))

    async def rerun(self, nodes: list[str] | None, keeps: Sequence[str] = ()) -> bool:
        """Start the ended task again: these nodes, or what did not finish, or failed batches of the nodes in `keeps`.

        Return False if the task refuses it.
        """
        request = Request(tag=self.new_tag(), name=RERUN, given={"nodes": nodes, "keeps": [*keeps]})
        # What starts again depends only on the document, which does not change before.
        given: dict[str, Any] = {"failed_batches_of": keeps, "reason": request.tag, "by": "chaos"}
        try:
            planned = await self._coordinator.rerun(self._plan.task_id, nodes, dry_run=True, **given)
        except (FlowKitError, PyMongoError, RPCError):
            return False
        self.requests.append(request)
        request.answers.append({"affected": planned["affected"]})
        try:
            await self._coordinator.rerun(self._plan.task_id, nodes, if_state=planned["state"], **given)
        except ActionRejected as error:
            request.refusals.append(str(error))
            request.answers.clear()
            return False
        except (FlowKitError, PyMongoError, RPCError) as error:
            request.unknown.append(repr(error))
        self.begin_run()
        return True
