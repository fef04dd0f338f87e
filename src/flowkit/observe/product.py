"""What the product `observe` adds to FlowKit. Each function imports what it needs when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowkit.observe import CONTENT_TYPE, is_installed, start_metrics
from flowkit.products import Logs, Metrics, Product

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flowkit.adapters.mongo import Database
    from flowkit.config import KeptLogs
    from flowkit.products import LogKeeper, LogReader


def _join(texts: Mapping[str, bytes]) -> bytes:
    from flowkit.observe.joining import join

    return join(texts)


def _metrics() -> Metrics | None:
    return Metrics(content_type=CONTENT_TYPE, start=start_metrics, join=_join) if is_installed() else None


def _keeper(db: Database, settings: KeptLogs) -> LogKeeper:
    from flowkit.observe.log_keeper import HandlerLogKeeper

    return HandlerLogKeeper(db, settings)


def _reader(db: Database) -> LogReader:
    from flowkit.observe.log_reading import HandlerLogReader

    return HandlerLogReader(db)


async def _expire_after(db: Database, seconds: float) -> None:
    from flowkit.observe.log_store import LogStore

    await LogStore(db).expire_after(seconds)


PRODUCT = Product(
    name="observe",
    metrics=_metrics,
    logs=Logs(keeper=_keeper, reader=_reader, expire_after=_expire_after),
    belongings=("attempt_logs",),
)
