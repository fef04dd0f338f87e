"""What the gateway adds to FlowKit. Each function imports what it needs when it is called."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from flowkit.gateway import check_installed
from flowkit.products import Product, UpProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

    import typer


def _commands() -> typer.Typer:
    from flowkit.gateway.cli import gateway

    return gateway


def _options(ports: Sequence[int], kafka: bool) -> list[str]:
    """Return the options of the gateway.

    Its supervisors may run on this machine, unless the environment says otherwise.
    """
    http, websocket = ports
    networks = os.environ.get("FLOWKIT_SUPERVISOR_NETWORKS") or "loopback,private,public"
    return [
        *("--port", str(http), "--websocket-port", str(websocket)),
        *("--supervisor-networks", networks),
    ]


PRODUCT = Product(
    name="gateway",
    commands={"gateway": _commands},
    belongings=("flow_messages", "flow_events"),
    process=UpProcess(
        command=("gateway",),
        options=_options,
        default_ports=(9652, 9653),
        offset=5,
        check=check_installed,
        exports=lambda ports: {"COORDINATOR_URL": f"http://127.0.0.1:{ports[0]}"},
    ),
)
