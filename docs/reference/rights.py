"""Every call of the HTTP servers, which tokens may make it, and which parts in a context may call a method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.routing import Route

from flowkit.admission.api import admission_routes
from flowkit.admission.metrics import metrics_route
from flowkit.admission.queue import AdmissionQueue
from flowkit.admission.store import AdmissionStore
from flowkit.gateway.permissions import EVERY_ACTOR, PERMISSIONS, ActorPart
from flowkit.gateway.service import Gateway, methods
from flowkit.page.api import PageApi, page_routes
from flowkit.server.app import create_app
from flowkit.server.auth import Authenticator, Caller
from flowkit.server.rights import Declared, OpenAccess, refusal
from flowkit.server.rpc import discovery, rpc_routes
from flowkit.server.token_store import TokenStore
from flowkit.server.tokens import Right
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.routing import BaseRoute

    from flowkit.server.rights import Need

METHODS = "Methods of the gateway"


class Row(NamedTuple):
    """One call, and what it needs."""

    call: str
    needs: Need


def gateway_routes(gateway: Gateway) -> list[BaseRoute]:
    """Return the routes of a gateway."""
    return rpc_routes("/", methods(gateway), {"title": "", "version": ""})


def queue_routes() -> list[BaseRoute]:
    """Return the routes of an admission queue that is empty."""
    queue = AdmissionQueue(AdmissionStore(memory_database(), queue="q"))
    return [*admission_routes(queue), metrics_route(queue)]


def rows_of(routes: Sequence[BaseRoute]) -> list[Row]:
    """Return the rows of the application with these routes."""
    app = create_app(routes, authenticator=Authenticator(TokenStore(memory_database())), health=bool)
    rows = []
    for route in app.routes:
        assert isinstance(route, Declared)
        verbs = sorted((route.methods or set()) - {"HEAD"}) if isinstance(route, Route) else ["WebSocket"]
        rows += [Row(f"`{verb} {route.path}`", route.needs) for verb in verbs]
    return rows


def method_rows() -> list[Row]:
    """Return the rows of the methods of the gateway."""
    nothing: Any = None
    served = [*methods(Gateway(nothing, nothing, nothing, nothing)), discovery({})]
    return [Row(f"`{each.name}`", each.needs) for each in served]


def sections() -> dict[str, list[Row]]:
    """Return the tables of the page by their titles."""
    nothing: Any = None
    return {
        "The gateway": rows_of(gateway_routes(Gateway(nothing, nothing, nothing, nothing))),
        METHODS: method_rows(),
        "Admission": rows_of(queue_routes()),
        "The page": rows_of(page_routes(PageApi(nothing, nothing, web_ui=None, read_only=False))),
    }


def permits(needs: Need, right: Right | None) -> bool:
    """Return whether a call that needs this is permitted to a token with one right, or without a token."""
    if right is None:
        return needs is OpenAccess.NOTHING
    return refusal(Caller(actor=1, rights=frozenset({right})), needs) is None


def rights_text() -> str:
    """Return a table for each part of the servers; that of the methods also lists the parts in a context."""
    rights = ["no token", *(f"`{right}`" for right in Right)]
    tables = []
    for title, rows in sections().items():
        head, cells = ["Call", *rights], [[row.call, *_permitted(row.needs)] for row in rows]
        if title == METHODS:
            head, cells = [*head, "Part in the context"], _with_parts(cells)
        lines = [f"| {' | '.join(row)} |" for row in (head, [":---"] * len(head), *cells)]
        tables.append("\n".join([f"## {title}\n", *lines, ""]))
    return "\n".join(tables)


def _with_parts(cells: list[list[str]]) -> list[list[str]]:
    """Return the rows of the methods, each with the parts of which an actor needs one."""
    replace = ["`flow.create` of a flow that exists", *_permitted(Right.FLOWS), _parts("flow.replace")]
    return [*([*row, _parts(row[0].strip("`"))] for row in cells), replace]


def _permitted(needs: Need) -> list[str]:
    return ["yes" if permits(needs, right) else "–" for right in (None, *Right)]


def _parts(method: str) -> str:
    parts = PERMISSIONS[method]
    if parts == EVERY_ACTOR:
        return "none needed"
    return ", ".join(part for part in ActorPart if part in parts) or "–"
