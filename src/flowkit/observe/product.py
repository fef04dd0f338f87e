"""What the product `observe` adds to FlowKit. Each function imports what it needs when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowkit.observe import CONTENT_TYPE, is_installed, start_metrics
from flowkit.products import Metrics, Product

if TYPE_CHECKING:
    from collections.abc import Mapping


def _join(texts: Mapping[str, bytes]) -> bytes:
    from flowkit.observe.joining import join

    return join(texts)


def _metrics() -> Metrics | None:
    return Metrics(content_type=CONTENT_TYPE, start=start_metrics, join=_join) if is_installed() else None


PRODUCT = Product(name="observe", metrics=_metrics)
