"""The `flowkit` command."""

from flowkit.cli.app import main

__all__ = ["main"]
