"""Compare a task to which actions were sent with the ends that the model allows, and with what the actions
have decided.

Each node is compared with the ends of the nodes above it as they are, so that the order of events does not
matter. What is stored must follow from what its sources hold in the end.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.integration.chaos.conditions import FALSE
from tests.integration.chaos.ledger import ledger_of
from tests.integration.chaos.model import (
    FAILED,
    FINISHED,
    SKIPPED,
    NodeEnd,
    Row,
    TaskEnd,
    end_of_run,
    is_handled,
    node_end,
)
from tests.integration.chaos.plans import EXTERNAL_FINAL
from tests.integration.chaos.routes import CONDITION, ROUTING, UPSTREAM_FAILED, routers_of
from tests.integration.chaos.verify import CANCELLED, FINAL_UID, USER, Comparison

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.integration.chaos.ledger import Decided
    from tests.integration.chaos.operators import Request
    from tests.integration.chaos.plans import NodePlan, TaskPlan
    from tests.integration.chaos.verify import Fields, Stored

_BY_TASK = ("task_failed", "task_cancelled")


class OperatedComparison(Comparison):
    """The comparison of one task with the actions on it."""

    def __init__(self, plan: TaskPlan, found: Stored, requests: Sequence[Request]) -> None:
        size = len(found.document.get("graph", {}).get("nodes", ()))
        self.ledger = ledger_of(plan, requests, found.document)
        self._grown = size == len(plan.nodes)
        self._whole = plan
        super().__init__(plan.cut(size) if plan.first == size else plan, found)

    def _predicted(self) -> TaskEnd:
        """Return how the task should have ended, given how its nodes have ended."""
        nodes, ends = self.plan.nodes, dict[str, NodeEnd]()
        for node in nodes:
            if node.node_id in self.entries:
                ends[node.node_id] = self._chosen(node, ends)
        failed = [
            node
            for node in (nodes[place] for place in self.plan.order)
            if node.node_id in ends and ends[node.node_id].status == FAILED
        ]
        unhandled = [node for node in failed if not is_handled(node, nodes, ends)]
        return TaskEnd(
            status=FAILED if unhandled else FINISHED,
            nodes=ends,
            handled_failures=tuple(node.node_id for node in failed if node not in unhandled),
            stats={},
            aggregates={},
            stops=bool(unhandled) and not self.plan.continues,
        )

    def _chosen(self, node: NodePlan, ends: Mapping[str, NodeEnd]) -> NodeEnd:
        """Return that of the allowed ends of a node which it shows; the first one if it shows none.

        Which of several reasons a skipped node has depends on the order of events. It decides whether gates tolerate
        the node.
        """
        entry = self.entries[node.node_id]
        if entry["status"] == CANCELLED or entry.get("skip_reason") in _BY_TASK:
            # What it has stored is a part of what it would have stored. So is that of an inline attempt
            # that was lost with
            # its engine, and of which the task does not know.
            reasons = frozenset([UPSTREAM_FAILED])
            return replace(end_of_run(node, ends), status=CANCELLED, reasons=reasons)
        allowed = self._allowed(node, ends)
        shown = (each for each in allowed if self._shows(each, entry))
        end, reason = next(shown, allowed[0]), entry.get("skip_reason")
        return (
            replace(end, reasons=frozenset([reason]))
            if end.status == SKIPPED and reason in end.reasons
            else end
        )

    def _shows(self, end: NodeEnd, entry: Fields) -> bool:
        code = str(entry.get("last_error")).partition(":")[0]
        if end.status != entry["status"]:
            return False
        return end.code == code if end.status == FAILED else self._explains(end, entry.get("skip_reason"))

    def _allowed(self, node: NodePlan, ends: Mapping[str, NodeEnd]) -> list[NodeEnd]:
        decided = self.ledger.decided.get(node.node_id)
        by_action = [] if decided is None else [decided_end(node, decided)]
        if by_action and node.node_id not in self.ledger.unsure:
            return by_action
        return [*by_action, *natural_ends(node, ends, routers_of(node, self.plan.nodes))]

    def _problems(self) -> Iterator[str]:
        yield from self.ledger.problems
        if self._whole.first and self._grown != self.ledger.grown:
            yield f"its graph has grown: {self._grown}, and the audit says {self.ledger.grown}"
        yield from super()._problems()
        scopes = {each["scope"] for each in self.found.document["coordinator"].get("paused") or ()}
        if scopes != self.ledger.paused:
            yield f"its paused scopes are {scopes} and should be {self.ledger.paused}"

    def _node(self, node: NodePlan, end: NodeEnd, entry: Fields) -> Iterator[str]:
        decided = self.ledger.decided.get(node.node_id)
        if decided is None or not self._shows(decided_end(node, decided), entry):
            yield from self._undecided(node, end, entry)
            return
        yield from self._status(end, entry)
        if decided.request.tag not in str(entry.get("last_error")) and end.status == FAILED:
            yield f"its error {entry.get('last_error')!r} does not name {decided.request.tag}"
        yield from self._results(node, end, entry, decided)

    def _undecided(self, node: NodePlan, end: NodeEnd, entry: Fields) -> Iterator[str]:
        name = node.node_id
        if name in self.ledger.decided and name not in self.ledger.unsure and self.status != CANCELLED:
            decided = self.ledger.decided[name]
            yield f"{decided.request.name} {decided.request.tag} decides about it, and it is {entry['status']}"
        ran = entry["status"] in {FINISHED, FAILED} and end.status != SKIPPED
        if ran and not self.ledger.satisfied.issuperset(node.prerequisites):
            yield f"it ran without {node.prerequisites}; satisfied are {self.ledger.satisfied}"
        yield from super()._node(node, end, entry)
        if not (node.call or node.kind):
            yield from self._marks(node)

    def _batches(self, node: NodePlan, end: NodeEnd, entry: Fields) -> Iterator[str]:
        """Yield differences of the batches.

        A node that was to run some again, and is skipped meanwhile, keeps the others.
        """
        if not (entry["status"] == SKIPPED and node.node_id in self.ledger.kept):
            yield from super()._batches(node, end, entry)

    def _late_sources(self, node: NodePlan) -> set[str]:
        external = {each.node_id for each in self.plan.nodes if each.external}
        return external & {*node.sources} & self.ledger.interrupted

    def _marks(self, node: NodePlan) -> Iterator[str]:
        mark = self.ledger.marks.get(node.node_id, "")
        rows = [row for row in self._artifacts(node) if row["status"] == "partial"]
        kept = self.ledger.kept.get(node.node_id, set())
        if wrong := {row["meta"].get("mark") for row in rows if "mark" in row["meta"]} - {mark, *kept}:
            yield f"its batches were made of the input {wrong} and not of {mark!r}"

    def _results(self, node: NodePlan, end: NodeEnd, entry: Fields, decided: Decided) -> Iterator[str]:
        """Yield where a node that an action has ended does not hold exactly the results of the action."""
        given = decided.request.given
        metrics = [row for row in self.found.metrics if row["node_id"] == node.node_id]
        partials = [row for row in self._artifacts(node) if row["status"] == "partial"]
        complete = [row["meta"] for row in self._artifacts(node) if row["status"] == "complete"]
        markers = [meta for meta in complete if meta != {"ended": entry["status"]}]
        if node.external and node.node_id in self.ledger.interrupted and markers == [EXTERNAL_FINAL]:
            # The worker has ended before it saw the signal, and written its own final metrics into the marker (H11).
            markers = [given["metrics"]] if decided.request.name == "complete_node" else []
        stored = {row["batch_uid"]: row["metrics"] for row in metrics if row["batch_uid"] != FINAL_UID}
        wanted = {each["batch_uid"]: each["metrics"] for each in given.get("batches", ())}
        uids = Counter(row["batch_uid"] for row in partials)
        if stored != wanted or uids != Counter(dict.fromkeys(wanted, 1)):
            yield f"it holds {stored} and {dict(uids)}, and {decided.request.tag} has given {wanted}"
        finals = [row["metrics"] for row in metrics if row["batch_uid"] == FINAL_UID]
        if decided.request.name == "complete_node" and (finals, markers) != (
            [given["metrics"]],
            [given["metrics"]],
        ):
            yield f"its results are {finals} and {markers}, and {decided.request.tag} has given {given['metrics']}"
        if end.status != FINISHED and (finals or markers):
            yield f"it has results {finals} and {markers}"

    def _explains(self, end: NodeEnd, reason: str | None) -> bool:
        return reason in end.reasons if end.status == SKIPPED else reason is None

    def _skipped(self, node: NodePlan) -> range:
        fewest = len(self.ledger.skipped.get(node.node_id, set()) & {*node.aside})
        return range(fewest, 1 + (len(node.aside) if node.node_id in self.ledger.may_skip else fewest))

    def _variables(self) -> Iterator[str]:
        """Yield variables that a function has not set which finished without a decision."""
        marks = self.found.document["coordinator"].get("vars", {}).get("marks", {})
        for node in self.plan.nodes:
            ended = self.entries[node.node_id]["status"] == FINISHED
            sets = node.call is not None and node.call.fn == "vars.set"
            if sets and ended and node.node_id not in self.ledger.decided and marks.get(node.key) != node.key:
                yield f"node {node.node_id!r} has not set its variable: {marks}"


def decided_end(node: NodePlan, decided: Decided) -> NodeEnd:
    """Return the end of a node as an action has decided it."""
    if decided.status == SKIPPED:
        return NodeEnd(status=SKIPPED, reasons=frozenset([USER]))
    passed_on = frozenset([ROUTING if node.on_failure else UPSTREAM_FAILED])
    if decided.status == FAILED:
        code = "rejected" if decided.request.name == "decide" else "failed_by_user"
        return NodeEnd(status=FAILED, code=code, reasons=passed_on)
    rows = {
        each["batch_uid"]: Row(items=tuple(each["metrics"]["items"]), origin=node.node_id)
        for each in decided.request.given.get("batches", ())
    }
    return NodeEnd(status=FINISHED, rows=rows, reasons=passed_on)


def natural_ends(node: NodePlan, ends: Mapping[str, NodeEnd], routers: Sequence[NodePlan]) -> list[NodeEnd]:
    """Return how a node may end about which no action has decided, given the ends of the nodes above it.

    A node may have started, and stay as it is, although its gate would be closed now: by a batch of a
    parent, or because it needs only some of its parents. A batch may also have decided about an edge whose
    condition is false.
    """
    end = node_end(node, ends, routers)
    passed_on = frozenset([ROUTING if node.on_failure else UPSTREAM_FAILED])
    ran = replace(end_of_run(node, ends), reasons=passed_on)
    started_before = node.first_batch or node.streams or node.fan_in not in {"all", "all_done"}
    if end.status != SKIPPED or not started_before:
        return [end]
    by_condition = [NodeEnd(status=SKIPPED, reasons=frozenset([CONDITION]))]
    if node.when == FALSE:
        return [end, *by_condition]
    if node.first_batch or node.streams:
        decides = FALSE in dict(node.edge_when).values()
        return [
            end,
            replace(ran, status=FAILED, code=UPSTREAM_FAILED),
            ran,
            *(by_condition if decides else []),
        ]
    return [end, ran]
