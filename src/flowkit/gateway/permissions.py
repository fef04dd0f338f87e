"""Who may call which method: one table, which the docs show and the gateway applies to every call."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from flowkit.server.tokens import Right

if TYPE_CHECKING:
    from collections.abc import Mapping


class ActorPart(StrEnum):
    """The part that an actor plays for a call. An operator may call every method."""

    ADMIN = "admin"
    EXECUTOR = "executor"
    READER = "reader"
    CREATOR = "creator"
    """The actor that has created the flow, while it has any other part in the context."""


A, E, R, C = ActorPart.ADMIN, ActorPart.EXECUTOR, ActorPart.READER, ActorPart.CREATOR
MEMBERS: Final = frozenset({A, E, R})
EVERY_ACTOR: Final = frozenset(ActorPart)
"""The method needs no part in a context; every actor may call it."""

PERMISSIONS: Final[dict[str, frozenset[ActorPart]]] = {
    "rpc.discover": EVERY_ACTOR,
    "actor.create": frozenset(),
    "actor.load": EVERY_ACTOR,
    "actor.list": EVERY_ACTOR,
    "context.create": frozenset({A}),
    "context.load": MEMBERS,
    "context.list": EVERY_ACTOR,
    "runner.create": frozenset({A}),
    "runner.load": MEMBERS,
    "runner.list": MEMBERS,
    "runner.ping": frozenset({A, E}),
    "job.create": frozenset({A, E}),
    "job.load": MEMBERS,
    "job.list": MEMBERS,
    "job.result": MEMBERS,
    "job.logs": MEMBERS,
    "flow.create": frozenset({A, E}),
    "flow.replace": frozenset({C}),
    "flow.add_nodes": frozenset({C}),
    "flow.load": MEMBERS,
    "flow.list": MEMBERS,
    "flow.status": MEMBERS,
    "flow.dag": MEMBERS,
    "flow.subscribe": MEMBERS,
    "flow.start": frozenset({A, E, C}),
    "flow.cancel": frozenset({A, C}),
    "flow.retry": frozenset({A, C}),
    "node.satisfy": frozenset({A, E, C}),
    "message.create": frozenset({A, E}),
    "message.load": MEMBERS,
    "message.list": MEMBERS,
    "message.status": MEMBERS,
}
"""By method, the parts of which one suffices. `flow.replace` is a `flow.create` of a flow that exists.

An admin may replace a context, and only an operator may create one.
"""


def right_for(method: str) -> Right:
    """Return the right that a token needs for a method of the gateway. One that no part may call is for operators."""
    return Right.FLOWS if PERMISSIONS[method] else Right.OPERATOR


def parts_of(
    actor: int | None, context: Mapping[str, Any], creator: int | None = None
) -> frozenset[ActorPart]:
    """Return the parts that an actor plays in a context, for an entity with this creator."""
    if actor is None:
        return frozenset()
    lists = {ActorPart.ADMIN: "admins", ActorPart.EXECUTOR: "executors", ActorPart.READER: "readers"}
    found = {part for part, name in lists.items() if actor in context[name]}
    return frozenset(found | {ActorPart.CREATOR}) if found and actor == creator else frozenset(found)


def may_call(method: str, parts: frozenset[ActorPart]) -> bool:
    """Return whether an actor with these parts may call a method."""
    return not PERMISSIONS[method].isdisjoint(parts)
