"""The stored input of a node, for `flowkit debug --show-input`: of any kind of node, without its code."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flowkit.activities.batches.inputs import InputSettings
from flowkit.activities.handlers import RoleHandler
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.tasks.store import TaskStore
from flowkit.attempt.storage import resolve
from flowkit.cli.debug.executors import StoredInput
from flowkit.cli.debug.nodes import explain_missing
from flowkit.cli.tasks.variables import plain

if TYPE_CHECKING:
    from flowkit.adapters.mongo import Database
    from flowkit.cli.debug.nodes import StoredNode
    from flowkit.models import AttemptInput

_MOST = 20
"""How many batches are shown, unless one is named."""


async def read_input(db: Database, stored: StoredNode, uid: str | None) -> dict[str, Any]:
    """Return the input of a node as JSON, with its first batches or the batch `uid`. It contains secrets.

    `batches` is None if the node's own code yields them. Raise ConfigError if there is no such batch.
    """
    tasks = TaskStore(db)
    attempt, _ = await resolve(tasks, stored.attempt)
    batches, more, seen = await _read_batches(db, tasks, attempt, uid)
    if uid is not None and batches == []:
        raise await explain_missing(db, stored, uid, seen)
    document: dict[str, Any] = plain(
        {
            "task_id": attempt.task_id,
            "node_id": attempt.node_id,
            "role": attempt.role,
            "attempt": attempt.epoch,
            "generation": attempt.generation,
            **({"fn": attempt.io.fn, "fn_args": attempt.io.fn_args} if stored.node.is_function else {}),
            "input_inline": attempt.io.inline_with(attempt.failed_nodes),
            "input_ref": attempt.io.input_ref,
            "failed_nodes": attempt.failed_nodes,
            "sources": [asdict(each) for each in stored.sources],
            "batches": batches,
            "more_batches": more,
        }
    )
    return document


async def _read_batches(
    db: Database, tasks: TaskStore, attempt: AttemptInput, uid: str | None
) -> tuple[list[dict[str, Any]] | None, bool, list[str]]:
    """Return the first batches, or only one, whether more follow, and the uids of those that were looked at.

    The batches are None if the node's code yields them.
    """
    inline = attempt.io.input_inline or {}
    if not attempt.maps and not str(inline.get("input_adapter", "")).startswith("pull."):
        return None, False, []
    unused: Any = None
    source = StoredInput(
        attempt=attempt,
        handler=RoleHandler(),
        ctx=unused,
        threads=unused,
        artifacts=ArtifactStore(db),
        tasks=tasks,
        settings=InputSettings(),
        ahead=None,
        wanted=uid,
    )
    found: list[dict[str, Any]] = []
    async with aclosing(source.batches(None)) as batches:
        async for batch in batches:
            if uid not in (None, batch.batch_uid):
                source.seen.append(str(batch.batch_uid))
                continue
            if len(found) == _MOST:
                return found, True, source.seen
            found.append({"batch_uid": batch.batch_uid, "payload": batch.payload})
            if uid is not None:
                break
    return found, False, source.seen
