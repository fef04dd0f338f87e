"""The parts of random tasks: batches, failures, nodes and graphs as plain data, and how a node is drawn."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tests.integration.chaos.conditions import entries, when

if TYPE_CHECKING:
    from collections.abc import Sequence

INLINE_ROLE = "stamper"
"""A role whose attempts the engines run themselves, unless a node of it pulls or is slow."""
ROLES = ("reader", "builder", "writer", INLINE_ROLE)
"""Roles without types."""
LISTER, FEEDER, PRINTER = "lister", "feeder", "printer"
"""Typed sources: a class, a function, and a function that the engines run themselves."""
COUNTER, CRUNCHER, MEASURER, COLLECTOR = "counter", "cruncher", "measurer", "collector"
"""Typed roles for batches: a class, a class whose batches separate processes run, a function of lists, and a function
of all batches, which stores them as they are.
"""
INLINE_ROLES = (INLINE_ROLE, PRINTER)
SOURCE_ROLES = (LISTER, FEEDER, PRINTER)
TYPED_ROLES = (*SOURCE_ROLES, COUNTER, CRUNCHER, MEASURER, COLLECTOR)
TYPED_SHARE = 0.6
"""Share of the native and inline nodes that typed handlers run."""
EXTERNAL_ROLES = ("indexer", "enricher")
TOUCH = "touch"
"""Name of the user function."""

FINAL = -1
"""Place of a failure in `finalize`, after all batches."""

EXTERNAL_FINAL = {"done": 1}
"""Final metrics of nodes that external workers run: these workers cannot read what the node has stored."""

EXIT, PANIC = "exit", "panic"
"""What a handler raises that is no Exception: `sys.exit`, and the BaseException of a native extension."""
BLOCK, FORK, DIE = "block", "fork", "die"
"""What a handler does to its process: it blocks the event loop, forks a child, or ends the process (`os._exit`)."""
BLOCKED_SEC = 2.2
MISCHIEF_SHARE = 0.08
RAISED = ("", EXIT, PANIC)
"""What handlers and functions raise: EXIT, PANIC, or an Exception."""
HOLD_SEC = 5.0
"""How long a failure is held."""
JSON, READ, BUILT = "json", "read", "built"
APPROVAL, DELAY = "approval", "delay"
"""Types of nodes that no worker runs."""

MOST_NODES = 9
MOST_BATCHES = 6
MOST_PULLED = 24
LONGEST_NODE_SEC = 2.0
SLOW_INLINE_SEC = (2.2, 3.0)
"""Duration of an inline node that takes too long, so that an ordinary attempt follows."""
PULL = "pull.from_artifacts"
RECHUNK = "pull.from_artifacts.rechunk:size"
CHUNK = 2
TAILS = ("", "", "", " é/%", "@1")
"""Endings of node ids, some of which need quoting in the uids of pulled batches."""
_UIDS = ("b{}", "b{}", "b{}", "b{} %", "b{}@x")
"""Formats of batch uids, equal in many nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """One batch that a node makes."""

    uid: str
    items: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFailure:
    """A failure of a node."""

    times: int | None
    """Number of first attempts that fail; None for all."""
    at: int
    """Index of the failing batch within the attempt, or FINAL."""
    raises: bool
    """Whether the handler raises, instead of returning an unsuccessful result."""
    permanent: bool = False
    kind: str = ""
    """What the handler raises in place of an Exception: EXIT or PANIC. Empty for an Exception."""

    @property
    def code(self) -> str:
        """The reason code that the node shows."""
        if self.raises:
            return "bad_input" if self.permanent else "unexpected_error"
        return "broken" if self.permanent else "flaky"

    def applies_to(self, attempt: int) -> bool:
        """Whether this attempt, counted from 1, fails."""
        return self.times is None or attempt <= self.times


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A coordinator function and its arguments."""

    fn: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """One node: its place in the graph and its behaviour."""

    node_id: str
    key: str
    """A short name without special characters."""
    role: str = ""
    parents: tuple[str, ...] = ()
    fan_in: str = "all"
    batches: tuple[BatchPlan, ...] = ()
    sources: tuple[str, ...] = ()
    names_sources: bool = True
    """Whether `from_nodes` names the sources; otherwise they are the parents."""
    chunk: int = 0
    """Items per chunk; 0 pulls batches unchanged."""
    call: Call | None = None
    failure: PlannedFailure | None = None
    allow_failure: bool = False
    pause: float = 0.0
    """Seconds that each batch and `finalize` take."""
    external: bool = False
    """Whether an external worker runs the node."""
    on_success: tuple[str, ...] = ()
    on_failure: tuple[str, ...] = ()
    when: str = ""
    """How the condition of the node turns out; empty if it has none."""
    edge_when: tuple[tuple[str, str], ...] = ()
    """Parents whose edges have conditions, and how these turn out."""
    first_batch: bool = False
    streams: tuple[str, ...] = ()
    """Parents whose edges are `async`."""
    parallel: int = 1
    """Number of shards of a node that pulls or is mapped."""
    mapped: bool = False
    """Whether the batches come from a list (`map`) in place of the handler."""
    aside: tuple[str, ...] = ()
    """Uids of the batches that always fail, and that the node sets aside."""
    mischief: str = ""
    """What the handler does to its process in the first attempt: BLOCK, FORK or DIE."""
    kind: str = ""
    """APPROVAL or DELAY, if no worker runs the node."""
    wait_sec: float = 0.0
    """How long a delay lasts, or an approval waits for a decision."""
    approves: bool = False
    """What an approval decides by itself when `wait_sec` have passed."""
    hold_sec: float = 0.0
    """How long a failure of the node is held; 0 if it is not."""
    prerequisites: tuple[str, ...] = ()

    @property
    def is_source(self) -> bool:
        """Whether a typed handler yields the results of the node, so that no batch of it can fail."""
        return self.role in SOURCE_ROLES

    @property
    def needs_all_sources(self) -> bool:
        """Whether the node reads all batches only if its sources have ended before: its `finalize` always fails."""
        failure = self.failure
        always = failure is not None and failure.times is None and failure.at == FINAL
        return self.external and bool(self.sources) and always

    def as_graph(self) -> dict[str, Any]:
        """Return the node as a user writes it."""
        always_fails = self.failure is not None and self.failure.times is None
        node: dict[str, Any] = {
            "node_id": self.node_id,
            "type": self.kind or ("coordinator_fn" if self.call else self.role),
            "depends_on": list(self.parents),
            "fan_in": self.fan_in,
            "allow_failure": self.allow_failure,
            **when(self.when),
            **self._waits(),
        }
        if not self.kind:
            node["retry_policy"] = {"max": 1 if always_fails else 3, "backoff_sec": 0.2}
        if self.on_success or self.on_failure:
            node["routing"] = {"on_success": list(self.on_success), "on_failure": list(self.on_failure)}
        if self.mapped:
            lists = json.dumps([batch.items for batch in self.batches])
            node["map"] = {"over": lists, "batch_size": 1, "parallel": self.parallel}
        elif self.parallel > 1:
            node["parallel"] = self.parallel
        if self.aside:
            node["on_batch_failure"] = {"attempts": 1, "then": "quarantine", "max": len(self.aside)}
        if self.kind:
            return node
        if self.call:
            return {**node, "io": {"fn": self.call.fn, "fn_args": self.call.args}}
        start = {"start_when": "first_batch"} if self.first_batch else {}
        return {**node, "io": {"input_inline": self._inline(), **start}}

    def _waits(self) -> dict[str, Any]:
        """Return the keys that let the node wait for a person, a time or a program."""
        keys: dict[str, Any] = {"prerequisites": list(self.prerequisites)} if self.prerequisites else {}
        if self.hold_sec:
            keys |= {"hold_on_failure": True, "hold_sec": self.hold_sec}
        if self.kind == DELAY:
            keys["io"] = {"input_inline": {"sec": self.wait_sec}}
        elif self.kind == APPROVAL:
            default = "approve" if self.approves else "reject"
            keys |= {"io": {"input_inline": {"default": default}}, "deadline_sec": self.wait_sec}
        return keys

    def _inline(self) -> dict[str, Any]:
        if not self.sources:
            return {"node": self.node_id}
        args: dict[str, Any] = {"poll_ms": 200, "backoff_max_ms": 1000}
        if self.names_sources:
            args["from_nodes"] = list(self.sources)
        if self.chunk:
            args |= {"size": self.chunk, "meta_list_key": "items"}
        return {"input_adapter": RECHUNK if self.chunk else PULL, "input_args": args}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """One task."""

    task_id: str
    nodes: tuple[NodePlan, ...]
    """In topological order."""
    order: tuple[int, ...]
    """Order of the nodes in the graph, as places in `nodes`."""
    continues: bool
    """Whether `on_node_failure` is `continue`."""
    cancel_after: float | None
    """Seconds after which the test cancels the task."""
    first: int = 0
    """Number of nodes with which the graph of the task begins; the others are added while it runs. 0 for all nodes."""
    operated: bool = False
    """Whether random actions are sent to the task, so that only these say how it ends (see `ledger`)."""
    on_failure: str = ""
    """The value of `on_node_failure` if the task does not continue; empty for the default."""
    written: str = JSON
    """How the graph is written: as JSON, as JSON that a Flow reads, or by the methods of a Flow."""

    def as_graph(self) -> dict[str, Any]:
        """Return the graph as a user writes it."""
        nodes = [self.nodes[place].as_graph() for place in self.order]
        extended = {"edges_ex": listed} if (listed := entries(self.nodes)) else {}
        on_failure = "continue" if self.continues else self.on_failure
        held = {"hold_sec": HOLD_SEC} if on_failure == "hold" else {}
        return {"nodes": nodes, **extended, **held, **({"on_node_failure": on_failure} if on_failure else {})}

    def cut(self, size: int) -> TaskPlan:
        """Return the task without the nodes after the first ones."""
        order = tuple(place for place in self.order if place < size)
        return replace(self, nodes=self.nodes[:size], order=order, first=0)

    def added(self) -> dict[str, Any]:
        """Return the nodes and edges that are added to the graph while the task runs."""
        before, after = self.cut(self.first).as_graph(), self.as_graph()
        edges = [each for each in after.get("edges_ex", ()) if each not in before.get("edges_ex", ())]
        return {"nodes": after["nodes"][self.first :], **({"edges_ex": edges} if edges else {})}


class Drawing:
    """Draws one node below the existing ones, for native workers or engines."""

    letter = "s"
    """First letter of the node ids."""
    fewest_nodes = 3
    most_nodes = MOST_NODES

    def __init__(
        self,
        chance: random.Random,
        node_id: str,
        key: str,
        above: Sequence[NodePlan],
        sizes: dict[str, int],
    ) -> None:
        self._chance = chance
        self._own: dict[str, Any] = {"node_id": node_id, "key": key}
        self._above = above
        self._sizes = sizes
        """Upper bound of the batches of each node that stores some."""

    def node(self) -> NodePlan:
        """Return a node that makes batches, pulls batches, or calls a function."""
        if self._mostly_inline and self._chance.random() < 0.4:
            return self._maker()
        drawn = self._chance.random()
        if self._above and drawn < 0.45 and (sources := self._sources()):
            return self._puller(sources)
        if self._above and drawn < 0.75:
            return self._function()
        return self._maker()

    @property
    def _mostly_inline(self) -> bool:
        """Whether the task is one of many inline nodes, which run inline while no ordinary node becomes ready."""
        return bool(self._above) and self._above[0].role in INLINE_ROLES

    def _sources(self) -> list[str]:
        sources: list[str] = []
        for name in self._chance.sample(sorted(self._sizes), min(3, len(self._sizes))):
            if sum(self._sizes[each] for each in (*sources, name)) <= MOST_PULLED:
                sources.append(name)
        return sources

    def _parents(self, least: int = 0) -> list[str]:
        names = [node.node_id for node in self._above]
        return self._chance.sample(names, min(len(names), self._chance.randint(least, 3)))

    def _fan_in(self, parents: Sequence[str]) -> str:
        if len(parents) < 2:
            return "all"
        count = f"count:{self._chance.randint(1, len(parents))}"
        return self._chance.choice(["all", "any", "all_done", count])

    def _maker(self) -> NodePlan:
        parents, uid = self._parents() if self._above else [], self._uid_format()
        place = int(self._own["key"][1:])
        count = self._chance.randint(0, MOST_BATCHES)
        batches = tuple(
            BatchPlan(
                uid=uid.format(number),
                items=tuple(1000 * place + 10 * number + i for i in range(self._chance.randint(0, 3))),
            )
            for number in range(count)
        )
        self._sizes[self._own["node_id"]] = count
        return self._with_aside(self._as_map(self._worker(parents, count, batches=batches)))

    def _as_map(self, plan: NodePlan) -> NodePlan:
        """Let some native nodes get their batches from a list. Their uids are numbers, so there is one in a task."""
        chance, failure = random.Random(f"{plan.node_id} map"), plan.failure
        ends_early = failure is not None and failure.times is None and failure.at != FINAL
        others = any(node.mapped for node in self._above)
        if plan.external or ends_early or others or chance.random() < 0.6:
            return plan
        batches = tuple(replace(batch, uid=f"{number:07}") for number, batch in enumerate(plan.batches))
        return replace(plan, mapped=True, batches=batches, parallel=chance.choice([1, 2, 4]))

    def _with_aside(self, plan: NodePlan) -> NodePlan:
        """Let some batches of some native nodes always fail."""
        chance, failure = random.Random(f"{plan.node_id} aside"), plan.failure
        if plan.external or (failure is not None and failure.at != FINAL) or chance.random() < 0.6:
            return plan
        uids = [batch.uid for batch in plan.batches]
        return replace(plan, aside=tuple(chance.sample(uids, min(len(uids), chance.randint(0, 2)))))

    def _uid_format(self) -> str:
        return self._chance.choice(_UIDS)

    def _puller(self, sources: list[str]) -> NodePlan:
        chunk = self._chance.choice([0, 0, 2])
        same = self._chance.random() < 0.6
        parents = sources if same else self._parents()
        count = sum(self._sizes.get(name, 0) for name in sources) * (2 if chunk else 1)
        self._sizes[self._own["node_id"]] = count
        named = not same or self._chance.random() < 0.5
        plan = self._worker(parents, count, sources=tuple(sources), names_sources=named, chunk=chunk)
        shards = random.Random(f"{plan.node_id} shards").choice([1, 1, 2, 3, 5])
        return plan if plan.external else replace(plan, parallel=shards)

    def _worker(self, parents: list[str], count: int, **fields: Any) -> NodePlan:
        executor = self._executor()
        plan = NodePlan(
            **self._own,
            **executor,
            parents=tuple(parents),
            fan_in=self._fan_in(parents),
            failure=self._failure(count, pulls="sources" in fields),
            allow_failure=self._chance.random() < 0.5,
            pause=self._seconds(executor["role"]) / (count + 1),
            **fields,
        )
        return self._with_mischief(plan)

    def _with_mischief(self, plan: NodePlan) -> NodePlan:
        """Let some handlers misbehave. The process of an inline node, or of an external one, does not die for it."""
        chance = random.Random(f"{plan.node_id} mischief")
        failure = plan.failure
        if failure is not None and failure.raises and not failure.permanent and not plan.external:
            return replace(plan, failure=replace(failure, kind=chance.choice(RAISED)))
        kinds = [BLOCK, FORK, *([] if plan.external or plan.role == INLINE_ROLE else [DIE])]
        return replace(plan, mischief=chance.choice(kinds)) if chance.random() < MISCHIEF_SHARE else plan

    def _executor(self) -> dict[str, Any]:
        """Return the fields that say who runs the node."""
        if self._mostly_inline and self._chance.random() < 0.8:
            return {"role": INLINE_ROLE}
        return {"role": self._chance.choice((*ROLES, INLINE_ROLE, INLINE_ROLE))}

    def _seconds(self, role: str) -> float:
        """Return how long all batches and `finalize` take together."""
        slow = role == INLINE_ROLE and self._chance.random() < 0.2
        if slow:
            return self._chance.uniform(*SLOW_INLINE_SEC)
        return self._chance.uniform(0.0, LONGEST_NODE_SEC / (2 if role == INLINE_ROLE else 1))

    def _failure(self, count: int, *, pulls: bool) -> PlannedFailure | None:
        drawn, chance = self._chance.random(), self._chance
        if drawn < 0.6:
            return None
        always_fails = drawn > 0.85
        somewhere = 0 if pulls else chance.randrange(count) if count else FINAL
        # The order in which a pulling node gets its batches depends on timing. To leave a predictable set of stored
        # batches, it fails permanently only after all of them.
        at = FINAL if pulls and always_fails else chance.choice([somewhere, FINAL])
        return PlannedFailure(
            times=None if always_fails else chance.randint(1, 2),
            at=at,
            raises=at == FINAL or chance.random() < 0.5,
            permanent=always_fails and chance.random() < 0.5,
        )

    def _function(self) -> NodePlan:
        parents, key = self._parents(least=1), self._own["key"]
        summed = [name for name in parents if not self._is_summed(name)]
        drawn = self._chance.choice([*["incr"] * 6, "set", "merge", "sum", "books", "touch", "bad"])
        fan_in, call, failure = self._fan_in(parents), Call(fn="noop"), None
        if drawn == "incr":
            name = self._chance.choice(["count.n", "count.n", f"own.{key}"])
            call = Call(fn="vars.incr", args={"key": name, "by": self._chance.randint(1, 5)})
        elif drawn == "set":
            call = Call(fn="vars.set", args={"kv": {f"marks.{key}": key, f"flags.{key}": {"on": True}}})
        elif drawn == "merge":
            call = Call(fn="vars.merge", args={"data": {"marks": {key: key}, "tree": {key: {"deep": 1}}}})
        elif drawn == "sum" and summed:
            fan_in, mode = "all", self._chance.choice(["sum", "mean"])
            call = Call(fn="metrics.aggregate", args={"node_id": summed[0], "mode": mode})
        elif drawn == "books":
            fan_in, call = "all", Call(fn="merge.generic", args={"from_nodes": parents, "target": {}})
        elif drawn == "touch":
            call, failure = self._touch(key)
        elif drawn == "bad":
            call = Call(fn="vars.incr", args={"key": "count.$n"})
        return NodePlan(
            **self._own,
            parents=tuple(parents),
            fan_in=fan_in,
            call=call,
            failure=failure,
            allow_failure=self._chance.random() < 0.5,
        )

    def _is_summed(self, name: str) -> bool:
        calls = [node.call for node in self._above if node.call and node.call.fn == "metrics.aggregate"]
        return any(call.args["node_id"] == name for call in calls)

    def _touch(self, key: str) -> tuple[Call, PlannedFailure | None]:
        times = self._chance.choice([0, 0, 1, 2, None])
        permanent = times is None and self._chance.random() < 0.5
        args = {"mark": key, "times": times, "permanent": permanent, "pause": self._chance.uniform(0.0, 0.5)}
        args["kind"] = random.Random(f"{self._own['node_id']} mischief").choice(RAISED)
        failure = PlannedFailure(times=times, at=FINAL, raises=True, permanent=permanent)
        return Call(fn=TOUCH, args=args), None if times == 0 else failure


class MixedDrawing(Drawing):
    """Draws nodes of which many run on external workers.

    External workers do not change the uids of pulled batches, so uids are unique within a task. A node that pulls
    batches from several sources, of which some pull themselves, therefore splits them into chunks, whose
    uids are unique.
    """

    letter = "x"

    def _sources(self) -> list[str]:
        """Return sources. Some are coordinator functions, which have a complete marker but no batches."""
        sources = super()._sources()
        calls = [node.node_id for node in self._above if node.call]
        if calls and self._chance.random() < 0.3:
            chosen = self._chance.choice(calls)
            return [*sources[:2], chosen]
        return sources

    def _uid_format(self) -> str:
        return f"{self._own['key']}-{super()._uid_format()}"

    def _puller(self, sources: list[str]) -> NodePlan:
        plan = _after_sources(super()._puller(sources))
        again = [node for node in self._above if node.node_id in sources and node.sources]
        if not plan.external or plan.chunk or len(sources) < 2 or not again:
            return plan
        self._sizes[plan.node_id] *= CHUNK
        return replace(plan, chunk=CHUNK)

    def _executor(self) -> dict[str, Any]:
        if self._chance.random() < (0.2 if self._mostly_inline else 0.5):
            return {"role": self._chance.choice(EXTERNAL_ROLES), "external": True}
        return super()._executor()


def _after_sources(plan: NodePlan) -> NodePlan:
    """Let an external node whose `finalize` always fails start after its sources, so that it has read all batches then.

    A worker may call `finalize` before it has read the last batches of a running source (H19). If that fails, the
    attempt has failed, and nothing reads the rest.
    """
    return replace(plan, parents=plan.sources, fan_in="all") if plan.needs_all_sources else plan


def as_typed(plan: NodePlan) -> NodePlan:
    """Return the node as one that a typed handler runs, in most cases in which there is one for it."""
    chance = random.Random(f"{plan.node_id} typed")
    if plan.role not in ROLES or chance.random() > TYPED_SHARE or (roles := _typed_roles(plan)) == ():
        return plan
    role = chance.choice(roles)
    failure = plan.failure
    if role in {CRUNCHER, COLLECTOR}:
        # A batch in a process does not count those before it, and a collector has only an end.
        at_end = None if failure is None or failure.at != FINAL else failure
        return replace(plan, role=role, failure=at_end, mischief="")
    if role in SOURCE_ROLES and failure is not None and failure.at != FINAL and not plan.batches:
        return plan
    return replace(plan, role=role)


def _typed_roles(plan: NodePlan) -> tuple[str, ...]:
    """Return the typed roles that can do the work of a node."""
    if plan.mapped or plan.chunk:
        return () if plan.role == INLINE_ROLE else (MEASURER,)
    if plan.sources:
        return (COUNTER, COUNTER, CRUNCHER, COLLECTOR)
    if plan.role == INLINE_ROLE:
        return () if plan.aside else (PRINTER,)
    return (COUNTER,) if plan.aside else (LISTER, FEEDER, COUNTER)
