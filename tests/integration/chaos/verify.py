"""Compare what MongoDB holds of a task with what the model predicts. Every difference is one sentence."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.integration.chaos.model import (
    BAD_CONDITION,
    FAILED,
    FINISHED,
    SKIPPED,
    NodeEnd,
    Row,
    TaskEnd,
    task_end,
    variables,
)
from tests.integration.chaos.plans import COLLECTOR, TOUCH
from tests.integration.chaos.routes import CONDITION, ROUTING, UPSTREAM_FAILED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.integration.chaos.plans import NodePlan, TaskPlan

CANCELLED = "cancelled"
USER = "user"
BY_PARENTS = {UPSTREAM_FAILED, ROUTING, CONDITION, USER}
"""Skip reasons that do not come from the end of the task."""
FINAL_UID = "__final__"
MOST_LOSSES = 5
Fields = dict[str, Any]


@dataclass(kw_only=True)
class Stored:
    """Everything that the database holds of one task."""

    document: Fields
    metrics: list[Fields]
    artifacts: list[Fields]
    claims: list[Fields]
    touches: dict[str, int] = field(default_factory=dict)
    """Number of calls of the user function, by mark."""


async def read_stored(db: Any, task_id: str) -> Stored:
    """Read everything that the database holds of a task, without rows that earlier generations have stored late."""
    rows: dict[str, list[Fields]] = {}
    for name in ("metrics_raw", "artifacts", "stream_progress"):
        rows[name] = [row async for row in db[name].find({"task_id": task_id})]
    touched = {"_id": {"$regex": f"^{task_id}/"}}
    document = await db.tasks.find_one({"id": task_id}) or {}
    entries = {each["node_id"]: each for each in document.get("graph", {}).get("nodes", ())}
    first = {node_id: each.get("first_epoch", 0) for node_id, each in entries.items()}
    return Stored(
        document=document,
        metrics=[row for row in rows["metrics_raw"] if row["attempt_epoch"] >= first.get(row["node_id"], 0)],
        artifacts=[row for row in rows["artifacts"] if row["attempt_epoch"] >= first.get(row["node_id"], 0)],
        claims=[
            row for row in rows["stream_progress"] if is_current(row, entries.get(row["consumer_node"], {}))
        ],
        touches={row["_id"].rpartition("/")[2]: row["calls"] async for row in db.touches.find(touched)},
    )


def is_current(claim: Fields, entry: Fields) -> bool:
    """Return whether a claim may be one of the present generation of the node with this entry.

    Claims of external workers have no epoch. An action ends an attempt at once if no worker has read its command. A
    worker that reads the command later claims batches until a signal stops it, perhaps after the reset has deleted the
    earlier claims. The next attempt of the node deletes these claims before its worker starts, so only a node that has
    not run since the reset may show them.
    """
    first = entry.get("first_epoch", 0)
    if "attempt_epoch" in claim:
        return bool(claim["attempt_epoch"] >= first)
    return not first or bool(entry["attempt_epoch"] > first)


class Comparison:
    """The comparison of one task with the model."""

    def __init__(self, plan: TaskPlan, found: Stored) -> None:
        self.plan = plan
        self.found = found
        self.status: str = found.document.get("status", "missing")
        nodes = found.document.get("graph", {}).get("nodes", [])
        self.entries: dict[str, Fields] = {entry["node_id"]: entry for entry in nodes}
        self.end: TaskEnd = self._predicted()
        self.stopped = self.end.stops or self.status == CANCELLED
        """Whether nodes may end differently from the model, because a cancel or a failure stopped the task."""

    def _predicted(self) -> TaskEnd:
        """Return how the task should have ended."""
        return task_end(self.plan)

    @property
    def worker_lost(self) -> list[str]:
        """The nodes that failed after more losses than their budget allows.

        The model does not cover their task then.
        """
        return [
            f"{self.plan.task_id}, {node_id}, epoch {entry['attempt_epoch']}: {entry['last_error']}"
            for node_id, entry in self.entries.items()
            if str(entry.get("last_error", "")).startswith("worker_lost")
            and entry["attempt_epoch"] > MOST_LOSSES
        ]

    @property
    def interrupted(self) -> int:
        """Number of attempts beyond those that the plan asks for."""
        epochs = {node_id: entry["attempt_epoch"] for node_id, entry in self.entries.items()}
        return sum(max(0, epochs.get(node.node_id, 0) - planned_attempts(node)) for node in self.plan.nodes)

    def problems(self) -> list[str]:
        """Return every difference."""
        if not self.found.document:
            return [f"{self.plan.task_id}: it has no document"]
        return [f"{self.plan.task_id}: {problem}" for problem in self._problems()]

    def _problems(self) -> Iterator[str]:
        yield from self._task()
        for node in self.plan.nodes:
            entry = self.entries[node.node_id]
            for problem in self._node(node, self._end_of(node, entry), entry):
                yield f"node {node.node_id!r}: {problem}"
        yield from self._variables()

    def _end_of(self, node: NodePlan, entry: Fields) -> NodeEnd:
        end = self.end.nodes[node.node_id]
        return end.otherwise if end.otherwise and entry["status"] in {FAILED, CANCELLED} else end

    def _task(self) -> Iterator[str]:
        document = self.found.document
        allowed = {self.end.status} | ({CANCELLED} if self.plan.cancel_after is not None else set())
        if self.status not in allowed:
            yield f"it is {self.status} and should be {self.end.status}: {document.get('reason')}"
        changes = [change["to"] for change in document["status_history"]]
        if changes[0] != "queued" or changes[-1] != self.status:
            yield f"its status history is {changes}"
        if document["finished_at"] is None or not document.get("closed_run_id"):
            yield "its document is open"
        if document["next_retry_at_ms"] is not None:
            yield "its document still shows a retry time"
        handled = tuple((document.get("result") or {}).get("handled_failures") or ())
        if self.status == FINISHED and handled != self.end.handled_failures:
            yield f"handled failures {handled} should be {self.end.handled_failures}"

    def _node(self, node: NodePlan, end: NodeEnd, entry: Fields) -> Iterator[str]:
        yield from self._status(end, entry)
        status = entry["status"]
        if node.call:
            yield from self._function(node, end, status)
        elif not node.kind:
            yield from self._batches(node, end, entry)
        markers = [row for row in self._artifacts(node) if row["status"] == "complete"]
        has_marker = not node.kind
        if (
            status == FINISHED
            and has_marker
            and [row["attempt_epoch"] for row in markers] != [entry["attempt_epoch"]]
        ):
            yield f"its complete markers are {markers}"
        if len(markers) > 1:
            yield f"it has {len(markers)} complete markers"

    def _status(self, end: NodeEnd, entry: Fields) -> Iterator[str]:
        status, reason, error = entry["status"], entry.get("skip_reason"), entry.get("last_error")
        reported = f"{status} ({reason or error})"
        if self.stopped and status in {CANCELLED, SKIPPED} and reason not in BY_PARENTS:
            stop = "task_cancelled" if self.status == CANCELLED else "task_failed"
            if reason not in {None, stop} or (status == SKIPPED) != (reason == stop):
                yield f"it is {reported} in a task that is {self.status}"
            return
        if status != end.status or not self._explains(end, reason):
            yield f"it is {reported} and should be {end.status} ({end.skip_reason or end.code})"
        elif status == FAILED and str(error).partition(":")[0] != end.code:
            yield f"it failed with {error!r} and not with {end.code}"
        elif status == FINISHED and error is not None:
            yield f"it finished but shows {error!r}"

    def _explains(self, end: NodeEnd, reason: str | None) -> bool:
        """Return whether a node of this end may show this reason of a skip."""
        return reason == end.skip_reason

    def _late_sources(self, node: NodePlan) -> set[str]:
        """Return the sources whose worker may have shown the node a batch after it had lost its lease."""
        return set()

    def _may_lack(self, node: NodePlan) -> bool:
        """Return whether batches may be missing because the node, or one that it pulls from, failed after a loss.

        An external worker that has lost its lease may continue and claim the batches, so that the next
        attempt finds none and fails at once, as planned. An attempt that succeeds is checked for such
        batches.
        """
        entry = self.entries[node.node_id]
        lost = node.external and node.sources and entry["status"] == FAILED and entry["attempt_epoch"] > 1
        return bool(lost) or any(
            self._may_lack(each) for each in self.plan.nodes if each.node_id in node.sources
        )

    def _artifacts(self, node: NodePlan) -> list[Fields]:
        return [row for row in self.found.artifacts if row["node_id"] == node.node_id]

    def _batches(self, node: NodePlan, end: NodeEnd, entry: Fields) -> Iterator[str]:
        metrics = [row for row in self.found.metrics if row["node_id"] == node.node_id]
        partials = [row for row in self._artifacts(node) if row["status"] == "partial"]
        good = [row for row in metrics if not row["failed"] and row["batch_uid"] != FINAL_UID]
        bad = [row["batch_uid"] for row in metrics if row["failed"]]
        lacks = self._may_lack(node)
        whole = entry["status"] == end.status != CANCELLED and not lacks
        late = self._late_sources(node)
        for name, rows in (("metrics", good), ("artifacts", partials)):
            uids = Counter(
                row["batch_uid"]
                for row in rows
                if row["batch_uid"] in end.rows
                or (row.get("meta") or row.get("metrics") or {}).get("origin") not in late
            )
            wanted = Counter(dict.fromkeys(end.rows, 1))
            if uids - wanted or (whole and wanted - uids):
                yield f"{name}: too many {dict(uids - wanted)}, missing {dict(wanted - uids)}"
        yield from self._failed_batches(node, end, entry, bad if whole else None)
        for row in good:
            yield from self._values(node, end, row, row["metrics"])
        for row in partials:
            yield from self._values(node, end, row, row["meta"])
        newest = max((row["attempt_epoch"] for row in [*metrics, *partials]), default=0)
        if newest > entry["attempt_epoch"]:
            yield f"a row of epoch {newest} is newer than the node's {entry['attempt_epoch']}"
        if not lacks:
            yield from self._final(node, end, entry, metrics)
        yield from self._claims(node, end, entry)

    def _failed_batches(
        self, node: NodePlan, end: NodeEnd, entry: Fields, bad: list[str] | None
    ) -> Iterator[str]:
        """Yield differences of the batches that have failed: `bad`, or None if some may be missing."""
        expected = [*end.aside, *([] if end.failed_uid is None else [end.failed_uid])]
        if bad is not None and sorted(bad) != sorted(expected):
            yield f"failed batches are {bad} and should be {expected}"
        shown, counts = (
            entry.get("failed_batches") or 0,
            {len(end.aside) - each for each in self._skipped(node)},
        )
        if entry["status"] == FINISHED and shown not in counts:
            yield f"it shows {shown} failed batches, and {counts} were set aside"

    def _skipped(self, node: NodePlan) -> range:
        """Return how many of the batches that a node has set aside may be skipped."""
        return range(1)

    def _values(self, node: NodePlan, end: NodeEnd, row: Fields, held: Fields) -> Iterator[str]:
        uid, writer = row["batch_uid"], held.get("written_by", {})
        if (expected := end.rows.get(uid)) is None:
            return
        if node.role == COLLECTOR:
            yield from self._collected(node, uid, expected, held)
            return
        if (held["items"], held["origin"]) != (list(expected.items), expected.origin):
            yield f"batch {uid!r} holds {held['items']} of {held['origin']}, not {expected}"
        if held["total"] != sum(expected.items) or held["n"] != 1:
            yield f"batch {uid!r} counts {held['total']} and {held['n']}"
        yield from self._read(node, uid, held)
        expected_writer = {
            "task": self.found.document["id"],
            "node": node.node_id,
            "epoch": row["attempt_epoch"],
        }
        if writer != expected_writer and not self._is_unconfirmed(node, row, writer):
            yield f"batch {uid!r} of epoch {row['attempt_epoch']} holds what was written by {writer}"

    def _collected(self, node: NodePlan, uid: str, expected: Row, held: Fields) -> Iterator[str]:
        """Yield a batch of a collector that is not the one of its source."""
        if held["items"] != list(expected.items):
            yield f"batch {uid!r} holds {held['items']}, not {expected}"
        yield from self._read(node, uid, {"read": held["written_by"] or None, "origin": expected.origin})

    def _read(self, node: NodePlan, uid: str, held: Fields) -> Iterator[str]:
        """Yield a batch that was made of a batch that its source does not hold any more."""
        read = held.get("read")
        if read is None or node.external or self.stopped:
            return
        source = held["origin"]
        rows = [
            row for row in self.found.artifacts if row["node_id"] == source and row["status"] == "partial"
        ]
        held_now = [row["meta"].get("written_by") for row in rows]
        gone = self.entries[source]["status"] == FINISHED and read not in held_now
        if gone and not self._is_made_again(node, source, read):
            yield f"batch {uid!r} was made of one that {source!r} does not hold: {read}"

    def _is_made_again(self, node: NodePlan, source: str, read: Fields) -> bool:
        """Return whether a later attempt of a source may have made the batches again of which a node has `read` some.

        It makes all of them again, with the same content, unless the source pulls or is mapped. Else it makes again
        only those between whose writes an earlier attempt ended, when it had stored the artifact without the metrics
        row: one of each shard.
        """
        entry = self.entries[source]
        if not (entry.get("first_epoch") or 0) < read.get("epoch", 0) <= (entry.get("attempt_epoch") or 0):
            return False
        [plan] = [each for each in self.plan.nodes if each.node_id == source]
        if node.chunk or plan.external or not (plan.sources or plan.mapped):
            return True
        held = [row["meta"] for row in self._artifacts(node) if row["status"] == "partial"]
        return [meta.get("read") or meta.get("written_by") for meta in held].count(read) <= plan.parallel

    def _is_unconfirmed(self, node: NodePlan, row: Fields, writer: Fields) -> bool:
        """Return whether the worker of a stopped external attempt has replaced a batch of an earlier one.

        The bridge confirms no events of an attempt that is cancelled, so the row keeps the epoch of the earlier one.
        """
        entry = self.entries[node.node_id]
        is_stopped = node.external and entry["status"] == CANCELLED
        return is_stopped and row["attempt_epoch"] < writer.get("epoch", 0) <= entry["attempt_epoch"]

    def _final(self, node: NodePlan, end: NodeEnd, entry: Fields, metrics: list[Fields]) -> Iterator[str]:
        finals = [row["metrics"] for row in metrics if row["batch_uid"] == FINAL_UID]
        drained = entry["status"] == FAILED and end.code == UPSTREAM_FAILED
        if entry["status"] == FINISHED or drained:
            if finals != [end.final]:
                yield f"its final metrics are {finals} and should be {end.final}"
            markers = [row["meta"] for row in self._artifacts(node) if row["status"] == "complete"]
            shows_failure = drained and markers == [{"ended": FAILED}]  # for the nodes that pull from it
            if markers != [end.final] and not shows_failure:
                yield f"its complete marker holds {markers} and should hold {end.final}"
        elif finals and entry["status"] != CANCELLED and not _is_kept(entry):
            yield f"it has final metrics {finals}"
        summed = self._finished_sum(node)
        if summed and entry.get("stats") != self.end.stats[node.node_id]:
            yield f"its stats are {entry.get('stats')} and should be {self.end.stats[node.node_id]}"

    def _finished_sum(self, node: NodePlan) -> bool:
        """Whether a `metrics.aggregate` of this node finished."""
        calls = [each for each in self.plan.nodes if each.call and each.call.fn == "metrics.aggregate"]
        sums = [each for each in calls if each.call and each.call.args["node_id"] == node.node_id]
        return any(self.entries[each.node_id]["status"] == FINISHED for each in sums)

    def _claims(self, node: NodePlan, end: NodeEnd, entry: Fields) -> Iterator[str]:
        """Yield claims that are too many, or missing. A retry of batches deletes claims, and makes only some again."""
        own = [row for row in self.found.claims if row["consumer_node"] == node.node_id]
        claims = Counter((row["from_node"], row["batch_uid"]) for row in own)
        wanted = Counter(dict.fromkeys(end.claims, 1))
        late = self._late_sources(node)
        claims = Counter({each: n for each, n in claims.items() if each in wanted or each[0] not in late})
        if claims - wanted or (
            entry["status"] == end.status != CANCELLED
            and wanted - claims
            and not (node.aside or self._may_lack(node))
        ):
            yield f"claims: too many {dict(claims - wanted)}, missing {dict(wanted - claims)}"

    def _function(self, node: NodePlan, end: NodeEnd, status: str) -> Iterator[str]:
        assert node.call is not None
        if node.call.fn == "merge.generic" and status == FINISHED:
            metas = [dict(row["meta"]) for row in self._artifacts(node)]
            for meta in metas:
                meta.pop("merged_at", None)
            if metas != [self.end.aggregates[node.node_id]]:
                yield f"its merge holds {metas} and should hold {self.end.aggregates[node.node_id]}"
        if node.call.fn == TOUCH and status in {FINISHED, FAILED} and end.code != BAD_CONDITION:
            least = 1 + ((node.failure.times or 0) if node.failure else 0)
            if self.found.touches.get(node.key, 0) < least:
                yield f"it was called {self.found.touches.get(node.key, 0)} times, {least} at least are right"

    def _variables(self) -> Iterator[str]:
        counted = [node for node in self.plan.nodes if node.call and self._counts(self.entries[node.node_id])]
        found, wanted = self.found.document["coordinator"].get("vars", {}), variables(counted)
        if found != wanted:
            yield f"its variables are {found} and should be {wanted}"

    def _counts(self, entry: Fields) -> bool:
        """Whether the effect of a function counts. A cancelled one may have had its effect before.

        So may one that was to run again, and was skipped: variables keep their values.
        """
        ended_early = entry["status"] in {CANCELLED, SKIPPED} and "applied_generation" in entry
        return entry["status"] == FINISHED or ended_early


def _is_kept(entry: Fields) -> bool:
    """Return whether a node was skipped after a reset, which may have kept its generation and so its final metrics."""
    return entry["status"] == SKIPPED and "reset_by" in entry


def planned_attempts(node: NodePlan) -> int:
    """Return the number of attempts that a node takes without faults."""
    if node.failure is None or node.failure.permanent:
        return 1
    return 2 if node.failure.times is None else 1 + node.failure.times
