"""What the HTTP server adds to FlowKit: the commands for its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowkit.products import Product

if TYPE_CHECKING:
    import typer


def _commands() -> typer.Typer:
    from flowkit.server.cli import tokens

    return tokens


PRODUCT = Product(name="server", commands={"token": _commands})
