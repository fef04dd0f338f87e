"""What a node waits for: the kind, by which programs decide, and the sentence, which people read."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

from pydantic import dataclasses as wire

from flowkit.text import names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


class WaitKind(StrEnum):
    """What has to happen before a node continues."""

    DECISION = "decision"
    """A person decides: about a failure that is held, or about an approval."""
    EVENT = "event"
    """Somebody outside the task satisfies prerequisites of the node."""
    RESUME = "resume"
    """An operator resumes what is paused."""
    SLOT = "slot"
    """A concurrency limit has a free slot."""
    SOURCES = "sources"
    """A node runs from which it pulls."""
    WORKER = "worker"
    """A worker takes the attempt."""
    ATTEMPT = "attempt"
    """The worker of the attempt continues, such as when a reader has claimed batches."""
    UNKNOWN = "unknown"
    """Only the sentence is known."""


OUTSIDE = (WaitKind.DECISION, WaitKind.EVENT)
"""What only somebody outside the task can bring about. Task documents have these kinds, with their begins."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class NodeWait:
    """What a node waits for."""

    kind: WaitKind
    text: str
    """The end of the sentence `node a waits for …`."""
    since: float | None = None
    """When the wait began, in seconds since the Unix epoch; None if that is unknown."""

    def began(self, since: float | None) -> NodeWait:
        """Return the wait with its begin."""
        return replace(self, since=since)


def for_decision(about: str) -> NodeWait:
    """Return the wait for a person who decides about a failure, such as `failed with bad_input`, or an approval."""
    return NodeWait(kind=WaitKind.DECISION, text=f"a decision: {about}")


def for_prerequisites(missing: Sequence[str]) -> NodeWait:
    """Return the wait for prerequisites that are not satisfied; there is at least one."""
    plural = "" if len(missing) == 1 else "s"
    return NodeWait(kind=WaitKind.EVENT, text=f"the prerequisite{plural} {names(missing)}")


def for_resume(scope: str = "") -> NodeWait:
    """Return the wait for the end of a pause."""
    return NodeWait(kind=WaitKind.RESUME, text=f"resume of {scope}" if scope else "resume")


def for_slot(role: str, reason: str) -> NodeWait:
    """Return the wait for a slot. `reason` says which limit is reached, such as `2 of 2`."""
    return NodeWait(kind=WaitKind.SLOT, text=f"a slot of role {role} ({reason})")


def for_sources(node_ids: Sequence[str]) -> NodeWait:
    """Return the wait for one of the nodes from which a node pulls."""
    return NodeWait(kind=WaitKind.SOURCES, text=f"{names(node_ids, last=' or ')} to run")


def for_worker(text: str = "") -> NodeWait:
    """Return the wait for a worker. Without `text`, an external worker has to accept the attempt."""
    return NodeWait(kind=WaitKind.WORKER, text=text or "an external worker")


def in_attempt(text: str) -> NodeWait:
    """Return what the worker of an attempt says that the attempt waits for."""
    return NodeWait(kind=WaitKind.ATTEMPT, text=text)


TEXT = "waits_for"
"""Field with the sentence, of a node in a task document and in the result of the query `status`."""
KIND = "wait_kind"
"""Field with the kind, beside the sentence."""
SINCE = "waits_since_ms"
"""Field with the begin, of waits for somebody outside the task, in milliseconds since the Unix epoch."""
FIELDS = (TEXT, KIND, SINCE)


def stored_wait(wait: NodeWait) -> dict[str, Any]:
    """Return the fields of a node that waits."""
    since = {} if wait.since is None else {SINCE: int(wait.since * 1000)}
    return {TEXT: wait.text, KIND: wait.kind.value, **since}


def read_wait(node: Mapping[str, Any]) -> NodeWait | None:
    """Return what a node waits for according to these fields; None if it waits for nothing.

    A sentence without a kind has the kind `unknown`: it may be a decision, or anything else.
    """
    text, kind, since = (node.get(name) for name in FIELDS)
    if not isinstance(text, str) or not text:
        return None
    known = WaitKind(kind) if isinstance(kind, str) and kind in [*WaitKind] else WaitKind.UNKNOWN
    return NodeWait(kind=known, text=text, since=since / 1000 if isinstance(since, int | float) else None)
