"""The handlers of a flow, by role."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowkit.activities.handlers import RoleHandler
from flowkit.core.user_code import contained, error_text
from flowkit.errors import ConfigError, GraphError
from flowkit.text import kind_of, one_line, printed
from flowkit.validation.values import is_role

if TYPE_CHECKING:
    from flowkit.flow.places import Place

    Given = type[RoleHandler[Any, Any]] | RoleHandler[Any, Any]


class Handlers:
    """Keeps one handler for each role. Creates a handler of a class when it is needed."""

    def __init__(self) -> None:
        self._given: dict[str, tuple[Given, Place]] = {}
        self._created: dict[str, RoleHandler[Any, Any]] = {}

    def add(self, handler: Given, node_id: str, place: Place) -> str:
        """Add the handler of a node and return its role. Raise GraphError, with the line, if that is impossible."""
        if problem := _handler_problem(handler):
            raise GraphError([f"{place}: node {node_id!r}: {problem}"])
        known, where = self._given.setdefault(handler.role, (handler, place))
        if known is not handler:
            remedy = "use that one, or give this one its own role"
            problem = f"role {handler.role!r} already has the handler {_name(known)}, at {where}; {remedy}"
            raise GraphError([f"{place}: node {node_id!r}: {problem}"])
        return handler.role

    def instances(self) -> dict[str, RoleHandler[Any, Any]]:
        """Return the handlers by role. Raise ConfigError, with the line, if a class needs arguments."""
        for role, (handler, place) in self._given.items():
            if role not in self._created:
                self._created[role] = _create(handler, place) if isinstance(handler, type) else handler
        return dict(self._created)


def _handler_problem(handler: Any) -> str | None:
    """Return why an object cannot run a node, or None."""
    kind = handler if isinstance(handler, type) else type(handler)
    if not issubclass(kind, RoleHandler):
        shown = f"the class {kind.__name__}" if isinstance(handler, type) else kind_of(handler)
        shown = f"the function {handler.__name__}" if hasattr(handler, "__code__") else shown
        return f"{shown} is no handler; pass a subclass of RoleHandler, an instance of one, or a function with @role"
    role = handler.role
    if not is_role(role):
        shown = f"role {printed(role)} cannot be a role's name" if role else "has no role"
        return f'handler {_name(handler)}: {shown}; set the class attribute role = "..."'
    return None


def _name(handler: Any) -> str:
    return handler.__name__ if isinstance(handler, type) else type(handler).__name__


def _create(kind: type[RoleHandler[Any, Any]], place: Place) -> RoleHandler[Any, Any]:
    try:
        with contained:
            return kind()
    except Exception as error:
        problem = f"{place}: handler {kind.__name__} cannot be created without arguments: {one_line(error_text(error))}"
        raise ConfigError(f"{problem}; pass an instance to flow.node") from error
