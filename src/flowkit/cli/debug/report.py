"""What `flowkit debug` prints: the results of a run beside the stored ones, and what FlowKit has not written."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flowkit
from flowkit.cli.tasks.variables import plain
from flowkit.masks import Mask
from flowkit.models import NodeState, NodeStatus
from flowkit.text import format_duration, one_line
from flowkit.workflows.retry import Retry, decide

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from flowkit.adapters.tasks.queries import StoredBatch
    from flowkit.adapters.vars.changes import VarsChange
    from flowkit.cli.debug.executors import BatchRun, DebugOutcome
    from flowkit.cli.debug.nodes import StoredNode

Document = dict[str, Any]

_NOT_OF_USERS = tuple(
    f"{Path(str(package.__file__)).parent}{os.sep}" for package in (flowkit, asyncio, concurrent.futures)
)
"""How the paths of the code begin that calls the user's."""
_MISSING = object()


def mask_for(stored: StoredNode, variables: Mapping[str, Any]) -> Mask:
    """Return the mask for all that a run of a node can print."""
    io = stored.attempt.io
    return Mask(stored.params.decode(), io.input_inline, io.input_ref, io.fn_args, dict(variables))


def make_document(stored: StoredNode, outcome: DebugOutcome, batches: Mapping[str, StoredBatch]) -> Document:
    """Return the outcome of a run as JSON, with what is stored in `batches` and of the node. It contains secrets."""
    results = {run.uid for run in outcome.batches}
    written = outcome.written
    document: Document = plain(
        {
            "status": "ok" if outcome.failure is None else "failed",
            "seconds": round(outcome.seconds, 6),
            "batches": [_describe_batch(run, outcome, batches.get(run.uid)) for run in outcome.batches],
            "final": _describe_final(stored, outcome) if outcome.finalized else None,
            "returned": outcome.returned,
            "failure": _describe_failure(stored, outcome, batches) if outcome.failure else None,
            "not_written": {
                "artifacts": {
                    uid: fields["meta"] for uid, fields in written.artifacts.items() if uid not in results
                },
                "vars": [each for change in written.variables for each in _describe_change(change)],
                "stats": written.stats,
                "complete": written.complete if stored.node.is_function else None,
            },
            "kv": outcome.kv,
        }
    )
    return document


def _describe_batch(run: BatchRun, outcome: DebugOutcome, stored: StoredBatch | None) -> Document:
    fields = outcome.written.artifacts.get(run.uid, {})
    is_ok = fields.get("status") == "partial"
    now = {"metrics": fields.get("meta") or {}, "artifacts_ref": fields.get("artifacts_ref")}
    shown: Document = {
        "uid": run.uid,
        "status": "ok" if is_ok else "failed",
        "seconds": round(run.seconds, 6),
        **now,
    }
    if stored is None:
        return {**shown, "stored": None, "differences": []}
    then = {"metrics": stored.metrics, "artifacts_ref": stored.artifacts_ref}
    return {
        **shown,
        "stored": {"status": stored.status, "attempt": stored.attempt, "error": stored.error, **then},
        "differences": [*compare(now, then)] if is_ok and stored.status == "ok" else [],
    }


def _describe_final(stored: StoredNode, outcome: DebugOutcome) -> Document:
    final = outcome.final
    now = {"metrics": final.metrics, "artifacts_ref": final.artifacts_ref} if final else {"metrics": {}}
    if stored.result is None:
        return {**now, "stored": None, "differences": []}
    then = {"metrics": stored.result.metrics, "artifacts_ref": stored.result.artifacts_ref}
    return {**now, "stored": then, "differences": [*compare(now, then)]}


def compare(now: Mapping[str, Any], then: Mapping[str, Any]) -> Iterator[Document]:
    """Yield the leaves that differ: `path`, and the values `now` and `stored`. A missing value is None."""
    for key in sorted({*now, *then}):
        for path, *pair in _compare(key, now.get(key, _MISSING), then.get(key, _MISSING)):
            mine, theirs = (None if each is _MISSING else each for each in pair)
            if mine != theirs:
                yield {"path": path, "now": mine, "stored": theirs}


def _compare(path: str, mine: Any, theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in sorted({*mine, *theirs}):
            yield from _compare(f"{path}.{key}", mine.get(key, _MISSING), theirs.get(key, _MISSING))
    elif plain(mine) != plain(theirs):
        yield path, mine, theirs


def _describe_failure(
    stored: StoredNode, outcome: DebugOutcome, batches: Mapping[str, StoredBatch]
) -> Document:
    failure = outcome.failure
    assert failure is not None
    run = outcome.batches[-1] if outcome.batches else None
    failed = run and outcome.written.artifacts.get(run.uid, {}).get("status") != "partial"
    then = stored_error(stored, batches.get(run.uid) if run and failed else None)
    return {
        "batch_uid": run.uid if run and failed else None,
        "code": failure.code,
        "message": failure.message,
        "traceback": list_frames(outcome.error) if outcome.error is not None else [],
        "decision": describe_decision(stored, outcome),
        "stored_error": then,
        "same_error": None if then is None else is_same_error(failure.code, failure.message, then),
    }


def stored_error(stored: StoredNode, batch: StoredBatch | None) -> str | None:
    """Return the stored error of a batch, or of the node: its reason code, with its message if that is stored."""
    if batch is not None and batch.error and ":" in batch.error:
        return batch.error
    is_latest = batch is None or batch.attempt == stored.attempt.epoch
    if is_latest and stored.last_error and (batch is None or batch.error == stored.reason_code):
        return stored.last_error
    return batch.error if batch is not None else None


def is_same_error(code: str, message: str, then: str) -> bool:
    """Return whether a stored error is the given one. The place in the code, and the worker, may differ."""
    stored_code, _, text = then.partition(":")
    if stored_code != code:
        return False
    return not text or not message or message.partition(", at ")[0].strip() in text


def describe_decision(stored: StoredNode, outcome: DebugOutcome) -> str:
    """Return what FlowKit would do after the failure."""
    failure, node = outcome.failure, stored.node
    assert failure is not None
    if node.quarantine is not None and outcome.batches and not outcome.finalized:
        tries = 1 if failure.permanent else node.quarantine.attempts
        return f"the node would set the batch aside after {tries} {'try' if tries == 1 else 'tries'}"
    state = NodeState(status=NodeStatus.RUNNING, epoch=stored.attempt.epoch)
    if isinstance(decide(node.retry_policy, failure, state, 0.0), Retry):
        most = node.retry_policy.max
        return f"would be retried, at most {most} {'time' if most == 1 else 'times'}"
    if failure.permanent:
        return "would not be retried: the error is permanent"
    if failure.code in node.retry_policy.permanent_on:
        return f"would not be retried: permanent_on of the node has {failure.code!r}"
    return "would not be retried: the node has no retries"


def list_frames(error: BaseException) -> list[str]:
    """Return the frames of the user's code in the traceback of an exception, outermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_OF_USERS)]
    return [line.rstrip("\n") for line in traceback.format_list(own)]


def _describe_change(change: VarsChange) -> Iterator[Document]:
    for path, value in change.sets.items():
        yield {"operation": change.operation, "path": path, "value": value}
    for path, amount in change.adds.items():
        yield {"operation": change.operation, "path": path, "value": amount}
    for path in change.removes:
        yield {"operation": change.operation, "path": path, "value": None}


def lines_of(document: Document) -> Iterator[str]:
    """Yield the lines for people of a document in which secrets are hidden."""
    for batch in document["batches"]:
        yield f"batch {batch['uid']} {batch['status']} in {format_duration(round(batch['seconds'], 3))}"
        yield from _result_lines(batch)
    if (final := document["final"]) is not None:
        yield "finalize"
        yield from _result_lines(final)
    if document["returned"] is not None:
        yield f"the function returned {_format(document['returned'])}"
    if document["failure"] is not None:
        yield from _failure_lines(document["failure"])
    yield from _unwritten_lines(document["not_written"])
    if document["kv"]:
        yield "ctx.kv at the end:"
        yield from (f"  {key}  {_format(value)}" for key, value in document["kv"].items())


def _result_lines(result: Document) -> Iterator[str]:
    for name, value in (result.get("metrics") or {}).items():
        yield f"  metrics.{name}  {_format(value)}"
    for name, value in (result.get("artifacts_ref") or {}).items():
        yield f"  artifacts_ref.{name}  {_format(value)}"
    yield f"  {_describe_comparison(result)}"
    for each in result["differences"]:
        yield f"    {each['path']}: now {_format(each['now'])}, stored {_format(each['stored'])}"


def _describe_comparison(result: Document) -> str:
    stored = result["stored"]
    if stored is None:
        return "nothing stored to compare with"
    by = f" by attempt {stored['attempt']}" if stored.get("attempt") else ""
    then = stored.get("status", "ok")
    if then != result.get("status", "ok"):
        return f"differs from the stored result: {then}{by}"
    if then == "failed":
        return f"also stored as failed{by}"
    return f"differs from the result stored{by}:" if result["differences"] else f"same as stored{by}"


def _failure_lines(failure: Document) -> Iterator[str]:
    for frame in failure["traceback"]:
        yield from frame.splitlines()
    of = f" of batch {failure['batch_uid']}" if failure["batch_uid"] is not None else ""
    yield f"error{of}: {failure['code']}: {one_line(failure['message'])}"
    yield f"  {failure['decision']}"
    if failure["stored_error"] is None:
        yield "  no error stored to compare with"
    elif failure["same_error"]:
        yield "  same error as stored"
    else:
        yield f"  differs from the stored error: {one_line(failure['stored_error'])}"


def _unwritten_lines(unwritten: Document) -> Iterator[str]:
    lines = [
        *(f"artifact {uid}  {_format(meta)}" for uid, meta in unwritten["artifacts"].items()),
        *(
            f"vars.{each['operation']} {each['path']}"
            + ("" if each["operation"] == "unset" else f"  {_format(each['value'])}")
            for each in unwritten["vars"]
        ),
        *(f"stats of {node_id}  {_format(stats)}" for node_id, stats in unwritten["stats"].items()),
        *([f"complete marker  {_format(unwritten['complete'])}"] if unwritten["complete"] else []),
    ]
    if lines:
        yield "not written:"
        yield from (f"  {line}" for line in lines)


def _format(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
