"""The generated page about the rights of tokens: every call of the HTTP servers, and which tokens may make it.

`PYTHONPATH=. python -m tests.docs.rights_page` writes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.routing import Route
from tests.docs.flow_pages import DOCS

from flowkit.admission.api import admission_routes
from flowkit.admission.metrics import metrics_route
from flowkit.admission.queue import AdmissionQueue
from flowkit.admission.store import AdmissionStore
from flowkit.gateway.service import Gateway, methods
from flowkit.server.app import create_app
from flowkit.server.auth import Authenticator, Caller
from flowkit.server.rights import Declared, Open, refusal
from flowkit.server.rpc import discovery, rpc_routes
from flowkit.server.token_store import TokenStore
from flowkit.server.tokens import Right
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.routing import BaseRoute

    from flowkit.server.rights import Need

PAGE = DOCS / "rights.md"

_INTRODUCTION = """# Rights of tokens

This page lists every call of FlowKit's [HTTP servers](http-server.md) and the rights that permit it. It is generated from
what the routes and methods declare; the server refuses to start with one that declares nothing. A token may have several
rights, and an operator has all of them. [`flowkit token create`](http-server.md#tokens) gives them.

A right is not the whole permission: the gateway also asks for the [part of the actor in the
context](flows.md#who-may-do-what), and admission for the [owner of a request](admission.md#who-may-do-what) and the roles of
its graph.

"""
_NOTES = """
Without a token, a call has status 401. With a token that lacks the right, it has status 403 and the code
`permission_denied`; a JSON-RPC method returns the error `PermissionDenied`, whose `data.right` names the right. While there
are [no tokens](http-server.md#without-tokens), every call of the machine is that of an operator.
"""


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
        "Methods of the gateway": method_rows(),
        "Admission": rows_of(queue_routes()),
    }


def permits(needs: Need, right: Right | None) -> bool:
    """Return whether a call that needs this is permitted to a token with one right, or without a token."""
    if right is None:
        return needs is Open.NOTHING
    return refusal(Caller(actor=1, rights=frozenset({right})), needs) is None


def page() -> str:
    """Return the page."""
    head = f"| Call | no token | {' | '.join(f'`{right}`' for right in Right)} |"
    line = f"|:---|{':---|' * (1 + len(Right))}"
    parts = []
    for title, rows in sections().items():
        lines = [head, line]
        for row in rows:
            cells = ["yes" if permits(row.needs, right) else "–" for right in (None, *Right)]
            lines.append(f"| {row.call} | {' | '.join(cells)} |")
        parts.append(f"## {title}\n\n" + "\n".join(lines) + "\n")
    return _INTRODUCTION + "\n".join(parts) + _NOTES


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
