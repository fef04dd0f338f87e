"""Sample runs of the demo: documents created by hand and with the code of the demo's handlers."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from code_index.chaos import Incident
from code_index.documents import LOST, Claim, Documents, ShardAttempt, StoredBatch
from code_index.facts import facts_of_source
from code_index.flow import ANALYZE, ENRICH, GROUP, INDEX
from code_index.packages import as_dicts, grouped, ranked, total
from code_index.page.data import DemoRun
from code_index.result import verified_result

if TYPE_CHECKING:
    from collections.abc import Mapping

START = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)
TASK = "code-index-0a1b2c3d"
NODES = {INDEX: "indexer", ENRICH: "enricher", GROUP: "grouper", ANALYZE: "analyzer"}

FUNCTION = b"def go(x):\n    if x:\n        return 1\n"
TREE = {
    "setup.py": FUNCTION,
    "shop/a.py": FUNCTION * 3,
    "shop/web/b.py": FUNCTION,
    "shop/web/c.py": b"def (:\n",
}


def at(seconds: float) -> datetime:
    """Return a time of the run."""
    return START + timedelta(seconds=seconds)


def event(node: str, epoch: int, kind: str, seconds: float, worker: str, reason: str = "") -> dict[str, Any]:
    """Return a row of `worker_events`."""
    return {
        "node_id": node,
        "attempt_epoch": epoch,
        "ts_ms": int(at(seconds).timestamp() * 1000),
        "payload": {"kind": kind, "worker_id": worker, "reason_code": reason},
    }


def node_document(node: str, epoch: int, started: float, ended: float, worker: str) -> dict[str, Any]:
    """Return a finished node, as in the task document."""
    return {
        "node_id": node,
        "type": NODES[node],
        "status": "finished",
        "attempt_epoch": epoch,
        "started_at": at(started),
        "finished_at": at(ended),
        "lease": {"worker_id": worker},
    }


def stored(node: str, number: int, epoch: int, seconds: float, worker: str) -> StoredBatch:
    """Return a batch of one file."""
    uid = f"files-{number:04}"
    return StoredBatch(node=node, uid=uid, epoch=epoch, worker=worker, files=1, stored_at=at(seconds))


def shard_attempt(
    shard: int, epoch: int, started: float, ended: float | None, worker: str, status: str = "finished"
) -> ShardAttempt:
    """Return an attempt of a shard of enrich."""
    return ShardAttempt(
        node=ENRICH,
        shard=shard,
        epoch=epoch,
        worker=worker,
        status=status,
        started_at=at(started),
        ended_at=None if ended is None else at(ended),
    )


def claim(uid: str, epoch: int, worker: str, fence: int = 1) -> Claim:
    """Return the claim of a batch by a shard of enrich."""
    return Claim(node=ENRICH, uid=uid, epoch=epoch, worker=worker, claimed_at=at(7.5), fence=fence)


KILLED = shard_attempt(1, 1, 0.5, None, "worker-1", LOST)
SUCCESSOR = shard_attempt(1, 4, 7.5, 8.9, "worker-2")
SHARDS = [KILLED, shard_attempt(2, 2, 0.7, 3.0, "worker-2"), SUCCESSOR]
"""Attempt 3, of a third shard, was not started, and attempt 5 ended the node."""


def _batches(of: int) -> list[StoredBatch]:
    """Return all batches; three attempts of enrich stored half of its batches, the others but one, and the last one."""
    half = of // 2
    numbers = range(1, of + 1)
    return [
        *(stored(INDEX, number, 1, 0.2, "worker-1") for number in numbers),
        *(stored(ENRICH, number, 1, 1 + number / 10, "worker-1") for number in numbers if number <= half),
        *(stored(ENRICH, number, 2, 1 + number / 10, "worker-2") for number in numbers if half < number < of),
        *(stored(ENRICH, number, 4, 8 + number / 10, "worker-2") for number in numbers if number == of),
        *(stored(GROUP, number, 1, 9.1, "worker-2") for number in numbers),
        *(stored(ANALYZE, number, 1, 9.5, "worker-2") for number in numbers),
    ]


def documents(tree: Mapping[str, bytes] = TREE, source: str = "/src") -> Documents:
    """Return the documents of a run in which worker-1 was killed in enrich, with one file per batch."""
    facts = [facts_of_source(path, data) for path, data in tree.items()]
    packages = grouped(facts)
    analysis = {
        "total": asdict(total(packages)),
        "packages": len(packages),
        "ranking": as_dicts(ranked(packages, 15)),
    }
    nodes = [
        node_document(INDEX, 1, 0.1, 0.3, "worker-1"),
        node_document(ENRICH, 5, 8.95, 9.0, "worker-2"),
        node_document(GROUP, 1, 9.05, 9.2, "worker-2"),
        node_document(ANALYZE, 1, 9.3, 9.6, "worker-2"),
    ]
    for before, node in pairwise(nodes):
        node["depends_on"] = [before["node_id"]]
    batches = _batches(len(tree))
    return Documents(
        task={
            "id": TASK,
            "status": "finished",
            "started_at": START.isoformat(),
            "finished_at": at(10),
            "params": {"source": source},
            "graph": {"nodes": nodes},
        },
        batches=batches,
        markers={INDEX: {"files": len(tree)}, ENRICH: {}, GROUP: {}, ANALYZE: analysis},
        paths_found=list(tree),
        paths_analyzed=list(tree),
        problems=[(fact.path, fact.problem) for fact in facts if fact.problem],
        packages=packages,
        metrics=dict.fromkeys(NODES, len(tree)),
        failed_metrics={},
        shards=SHARDS,
        claims=[
            claim(batch.uid, batch.epoch, batch.worker, fence=2 if batch.epoch == SUCCESSOR.epoch else 1)
            for batch in batches
            if batch.node == ENRICH
        ],
        events=[event(ENRICH, 1, "TASK_ACCEPTED", 0.5, "worker-1")],
    )


INCIDENT = Incident(lost=KILLED, batches=2, total=4, killed_at=at(2), replacement="worker-3")


def run(
    tree: Mapping[str, bytes] = TREE, source: str = "/src", incident: Incident | None = INCIDENT
) -> DemoRun:
    """Return a finished run over `tree`."""
    left = documents(tree, source)
    return DemoRun(
        documents=left,
        result=verified_result(left),
        incident=incident,
        web_ui=f"http://127.0.0.1:8233/namespaces/default/workflows/{TASK}",
        environment={"Machine": "2 processors"},
    )
