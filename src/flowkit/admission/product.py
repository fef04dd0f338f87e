"""What the admission queue adds to FlowKit. Each function imports what it needs when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowkit.admission import check_installed
from flowkit.products import Product, UpProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

    import typer

    from flowkit.adapters.mongo import Database
    from flowkit.products import OnClosed, Submissions


def _commands() -> typer.Typer:
    from flowkit.admission.cli.commands import admission

    return admission


def _submissions(db: Database, queue: str) -> Submissions:
    from flowkit.admission.client import AdmissionClient

    return AdmissionClient(db, queue)


def _on_closed(db: Database) -> OnClosed:
    from flowkit.admission.store import AdmittedTasks

    return AdmittedTasks(db).end


def _options(ports: Sequence[int], kafka: bool) -> list[str]:
    return ["--port", str(ports[0]), *(["--kafka"] if kafka else [])]


PRODUCT = Product(
    name="admission",
    commands={"admission": _commands},
    process=UpProcess(
        command=("admission", "run"), options=_options, default_ports=(9654,), offset=7, check=check_installed
    ),
    submissions=_submissions,
    on_closed=_on_closed,
)
