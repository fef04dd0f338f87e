"""What the accepted actions mean for the end of a task, from the requests and the audit in its document. Pure.

The audit must contain each accepted action once and nothing else. The actions are replayed in its order:
each decides about one node, and starts the nodes again that its answer names.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.integration.chaos.operators import RERUN

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.integration.chaos.operators import Request
    from tests.integration.chaos.plans import NodePlan, TaskPlan

Fields = dict[str, Any]
_ENDS = {"skip_node": "skipped", "complete_node": "finished", "fail_node": "failed"}
_KEPT_ACTIONS = 200
"""Number of actions that a document keeps."""


@dataclass(frozen=True, kw_only=True)
class Decided:
    """How an action ends a node."""

    status: str
    request: Request


@dataclass(kw_only=True)
class Ledger:
    """What the actions mean that a task has applied."""

    decided: dict[str, Decided] = field(default_factory=dict)
    """The nodes that have ended as an action says, and that nothing has started again since."""
    unsure: set[str] = field(default_factory=set)
    """Nodes that an action may have started again, or not, because its answer was lost."""
    marks: dict[str, str] = field(default_factory=dict)
    """The input of nodes that actions have changed."""
    kept: dict[str, set[str]] = field(default_factory=dict)
    """The nodes of which only some batches run again, with the earlier inputs of the others."""
    interrupted: set[str] = field(default_factory=set)
    """Nodes of which an action has stopped an attempt."""
    skipped: dict[str, set[str]] = field(default_factory=dict)
    """Batches that were set aside and are skipped, by node."""
    may_skip: set[str] = field(default_factory=set)
    """Nodes that had not finished when all their batches were skipped: only those count that they had set
    aside by then."""
    satisfied: set[str] = field(default_factory=set)
    paused: set[str] = field(default_factory=set)
    grown: bool = False
    """Whether an action has added the other nodes of the plan."""
    problems: list[str] = field(default_factory=list)
    """Differences between requests, answers and audit."""
    applied: Counter[str] = field(default_factory=Counter)


def ledger_of(plan: TaskPlan, requests: Sequence[Request], document: Mapping[str, Any]) -> Ledger:
    """Return what the applied actions mean, with all differences between requests and audit."""
    audit = (document.get("coordinator") or {}).get("actions") or []
    found = Ledger(problems=[*_problems(requests, document.get("coordinator") or {})])
    sent = {request.tag: request for request in requests}
    for entry in audit:
        if (request := sent.get(entry["reason"])) is not None:
            found.applied[request.name] += 1
            _replay(found, plan, request)
    return found


def _problems(requests: Sequence[Request], coordinator: Mapping[str, Any]) -> Iterator[str]:
    audit = coordinator.get("actions") or []
    last, numbers = coordinator.get("revision", 0), [entry["revision"] for entry in audit]
    if numbers != [*range(max(1, last - _KEPT_ACTIONS + 1), last + 1)]:
        yield f"revisions {numbers} of the audit do not lead to {last}"
    entries = {entry["reason"]: entry for entry in audit}
    if len(entries) != len(audit):
        again = [tag for tag, times in Counter(entry["reason"] for entry in audit).items() if times > 1]
        yield f"actions that were applied more than once: {again}"
    sent = {request.tag for request in requests}
    if strange := entries.keys() - sent:
        yield f"actions in the audit that nobody has sent: {sorted(strange)}"
    for request in requests:
        yield from _problems_of(request, entries.get(request.tag), last)


def _problems_of(request: Request, entry: Fields | None, last: int) -> Iterator[str]:
    what = f"{request.name} {request.tag} {request.given}"
    revisions = {answer["revision"] for answer in request.answers if "revision" in answer}
    if entry is None:
        forgotten = revisions and max(revisions) <= last - _KEPT_ACTIONS
        if request.answers and request.name != RERUN and not forgotten:
            yield f"{what} was accepted, and is not in the audit: {request.answers}"
        return
    if request.wrong:
        yield f"{what} must be refused, and was applied"
    if not request.answers and request.refusals:
        yield f"{what} was refused and applied: {request.refusals}"
    if entry["action"] != request.name or revisions - {entry["revision"]}:
        yield f"{what} was answered with {request.answers}, and the audit has {entry}"
    if "node_id" in request.given and not str(entry["what"]).startswith(request.given["node_id"]):
        yield f"{what} is in the audit as {entry}"
    expected = request.given.get("if_revision")
    if expected is not None and entry["revision"] != expected + 1:
        yield f"{what} was applied at another revision: {entry}"


def _replay(found: Ledger, plan: TaskPlan, request: Request) -> None:
    given, name = request.given, request.name
    affected = next((each["affected"] for each in request.answers if each["affected"]), None)
    if name in {"pause", "resume", "satisfy"}:
        _replay_scopes(found, request)
    elif name in {"change_graph", RERUN}:
        _replay_new_generations(found, request, affected or ())
    elif name == "skip_batches" and affected and affected[0]["to"] == "finished":
        _skip(found, plan, request, finished=True)
    elif name == "decide":
        status = "finished" if given["decision"] == "approve" else "failed"
        found.decided[given["node_id"]] = Decided(status=status, request=request)
        found.unsure.discard(given["node_id"])
    else:
        _replay_reset(found, plan, request, affected)


def _replay_new_generations(found: Ledger, request: Request, affected: Sequence[Fields]) -> None:
    """Replay a change of the graph, or a new run of the task."""
    given = request.given
    found.grown |= "nodes" in given and request.name != RERUN
    for node_id in given.get("changes", ()):
        if node_id in found.kept:
            found.kept[node_id].add(found.marks.get(node_id, ""))
        found.marks[node_id] = request.tag
    if request.name == RERUN:
        found.paused.clear()
    started = given.get("changes", [each["node_id"] for each in affected])
    for node_id in started:
        if node_id in given.get("keeps", ()):
            found.kept.setdefault(node_id, set())
        elif request.name == RERUN or node_id not in found.kept:
            _start_again(found, node_id)


def _replay_scopes(found: Ledger, request: Request) -> None:
    given = request.given
    if request.name == "pause":
        found.paused |= {*given["scopes"]}
    elif request.name == "resume":
        found.paused -= {*given.get("scopes", ())} or {*found.paused}
    else:
        if given["prerequisite"] in found.satisfied:
            found.problems.append(f"satisfy {request.tag} was applied to a satisfied prerequisite")
        found.satisfied.add(given["prerequisite"])


def _replay_reset(found: Ledger, plan: TaskPlan, request: Request, affected: Sequence[Fields] | None) -> None:
    """Replay an action that starts its node and others again, or ends it."""
    target, name = request.given["node_id"], request.name
    if affected is None:
        found.unsure |= below(plan.nodes, target)
    found.interrupted |= {target, *(each["node_id"] for each in affected or () if each["from"] == "running")}
    for each in affected or ():
        if each["node_id"] != target:
            _start_again(found, each["node_id"])
    if name in {"retry_batches", "skip_batches"}:
        _replay_batches(found, plan, request, known=affected is not None)
        return
    _start_again(found, target)
    if name in _ENDS:
        found.decided[target] = Decided(status=_ENDS[name], request=request)
    elif "input_inline" in request.given:
        found.marks[target] = request.tag


def _replay_batches(found: Ledger, plan: TaskPlan, request: Request, *, known: bool) -> None:
    target = request.given["node_id"]
    found.decided.pop(target, None)
    if request.name == "skip_batches":
        _skip(found, plan, request, finished=False)
        if not known:
            found.unsure.add(target)
    else:
        found.skipped.get(target, set()).difference_update(request.given.get("batch_uids", ()))
        found.kept.setdefault(target, set())


def _skip(found: Ledger, plan: TaskPlan, request: Request, *, finished: bool) -> None:
    node = next(each for each in plan.nodes if each.node_id == request.given["node_id"])
    chosen = request.given.get("batch_uids") or (node.aside if finished else ())
    found.skipped.setdefault(node.node_id, set()).update(chosen)
    if not chosen:
        found.may_skip.add(node.node_id)


def _start_again(found: Ledger, node_id: str) -> None:
    """Forget what actions have decided about a node, because it starts a new generation."""
    found.decided.pop(node_id, None)
    found.skipped.pop(node_id, None)
    found.may_skip.discard(node_id)
    found.kept.pop(node_id, None)
    found.unsure.discard(node_id)


def below(nodes: Sequence[NodePlan], node_id: str) -> set[str]:
    """Return the nodes that depend on a node, directly or through others."""
    found: set[str] = set()
    waiting = [node_id]
    while waiting:
        above = waiting.pop()
        routes = {
            target
            for node in nodes
            if node.node_id == above
            for target in (*node.on_success, *node.on_failure)
        }
        new = {node.node_id for node in nodes if above in (*node.parents, *node.sources)} | routes
        waiting += new - found
        found |= new
    return found
