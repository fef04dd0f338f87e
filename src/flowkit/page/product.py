"""What the page adds to FlowKit. Each function imports what it needs when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flowkit.page import check_installed
from flowkit.products import Product, UpProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

    import typer


def _commands() -> typer.Typer:
    from flowkit.page.cli import ui

    return ui


def _options(ports: Sequence[int], kafka: bool) -> list[str]:
    return ["--port", str(ports[0])]


def _address(ports: Sequence[int]) -> str:
    return f"http://127.0.0.1:{ports[0]}/"


def _graphviz() -> Path:
    return Path(__file__).parent / "static" / "vendor" / "graphviz.js"


PRODUCT = Product(
    name="page",
    commands={"ui": _commands},
    graphviz=_graphviz,
    process=UpProcess(
        command=("ui",),
        options=_options,
        default_ports=(9655,),
        offset=8,
        check=check_installed,
        address=_address,
        exports=lambda ports: {"FLOWKIT_PAGE_URL": _address(ports)},
    ),
)
