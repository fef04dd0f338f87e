"""The demo on real servers and a small source tree."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pymongo
import pytest
from tests.fork_server import fork_server

from code_index.facts import facts_of
from code_index.packages import as_dicts, grouped

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.kafka_server import Broker

    from flowkit.local import Stack

ROOT = Path(__file__).parents[2]
FILES = {f"shop/part_{number}.py": f"def go_{number}(x):\n    return x or 0\n" for number in range(6)}
TIMEOUT_SEC = 400


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Create a source tree of six files."""
    for path, text in FILES.items():
        (tmp_path / "source" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / path).write_text(text)
    return tmp_path / "source"


@pytest.fixture
def db(stack: Stack) -> Iterator[Any]:
    """Open the demo's database."""
    with pymongo.MongoClient[dict[str, Any]](stack.mongo_url) as client:
        yield client["code_index"]


def demo(source: Path, *options: str) -> str:
    """Run the demo with two files per batch; returns what it prints."""
    folder = source.parent / "data"
    arguments = ["--source", str(source), "--folder", str(folder), "--batch-size", "2", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "examples"), str(ROOT / "src")])}
    code, printed, errors = fork_server().run(arguments, ROOT, environment, TIMEOUT_SEC, module="code_index")
    logs = "\n".join(log.read_text(errors="replace") for log in folder.rglob("*.log"))
    assert code == 0, printed + errors + logs
    return printed


def line(printed: str, beginning: str) -> str:
    """Return the only line with this beginning, with or without the time before it."""
    (found,) = re.findall(rf"^(?: *[\d.]+ s  )?({re.escape(beginning)}.*)$", printed, re.MULTILINE)
    return str(found)


class StoredBatches:
    """The batches that a run stored in MongoDB."""

    def __init__(self, db: Any, printed: str) -> None:
        task = line(printed, "task  ").split()[1]
        self.batches: list[Mapping[str, Any]] = [*db.artifacts.find({"task_id": task, "status": "partial"})]
        ended = db.artifacts.find_one({"task_id": task, "node_id": "analyze", "status": "complete"})
        self.ranking: list[Mapping[str, Any]] = ended["meta"]["ranking"]

    def uids(self, node: str) -> Counter[str]:
        """Return how often a node stored each batch."""
        return Counter(batch["batch_uid"] for batch in self.batches if batch["node_id"] == node)

    def writers(self, node: str) -> list[tuple[str, int, str]]:
        """Return batch, epoch and worker of each batch that a node stored."""
        own = [batch for batch in self.batches if batch["node_id"] == node]
        return sorted((batch["batch_uid"], batch["attempt_epoch"], batch["worker_id"]) for batch in own)

    @property
    def paths(self) -> list[str]:
        """Return every parsed file."""
        return sorted(fact["path"] for batch in self.batches for fact in batch["meta"].get("facts", ()))


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_SEC + 60)
def test_batch_of_a_killed_worker_is_taken_over_without_loss_or_repetition(db: Any, source: Path) -> None:
    printed = demo(source, "--chaos", "--workers", "1")
    ran = "worker-1, which ran shard 1 of enrich in attempt 1"
    assert f"SIGKILL to {ran}, after 1/3 batches" in printed
    assert "worker-2 starts in its place" in printed
    assert "chaos    worker-2 takes over batch files-0002" in printed
    assert line(printed, "killed").endswith(f"{ran} and had stored 1 batch")
    assert re.search(
        r"worker-2 took over what was claimed and not stored, [\d.]+ s after the kill: files-0002",
        line(printed, "resumed"),
    )

    stored = StoredBatches(db, printed)
    once = {"files-0001": 1, "files-0002": 1, "files-0003": 1}
    assert {node: stored.uids(node) for node in ("index", "enrich", "group", "analyze")} == dict.fromkeys(
        ("index", "enrich", "group", "analyze"), once
    )
    assert stored.paths == sorted(FILES)
    assert [(uid, worker) for uid, _, worker in stored.writers("enrich")] == [
        ("files-0001", "worker-1"),
        ("files-0002", "worker-2"),
        ("files-0003", "worker-2"),
    ]
    assert stored.ranking == as_dicts(grouped(facts_of(str(source), path) for path in FILES))
    report = (source.parent / "data" / "report.html").read_text()
    assert "worker-1 was killed with SIGKILL while it ran shard 1 of enrich in attempt 1" in report


@pytest.mark.server
@pytest.mark.slow(40)
@pytest.mark.timeout(2 * TIMEOUT_SEC + 60)
def test_run_with_an_external_worker_retries_failures_prints_the_result_and_writes_the_report(
    db: Any, source: Path, tmp_path: Path, kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", kafka.bootstrap_servers)
    report = tmp_path / "out" / "own.html"
    printed = demo(source, "--external", "--report", str(report))
    assert f"external role grouper runs on external-1, through Kafka at {kafka.bootstrap_servers}" in printed
    assert "files    6 found = 6 analyzed; 0 do not parse" in printed
    assert re.search(r"retries  [12] attempts? failed", printed)
    assert line(printed, "report").split() == ["report", str(report)]
    assert re.search("[12] × failed: flaky_disk", report.read_text())
    stored = StoredBatches(db, printed)
    assert {worker for _, _, worker in stored.writers("group")} == {"external-1"}
    assert stored.uids("group") == stored.uids("index")
    assert stored.paths == sorted(FILES)
