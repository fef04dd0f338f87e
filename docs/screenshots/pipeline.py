"""The pipeline of the pictures: the orders of some shops, put into one currency, summed up by country, ranked."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

from flowkit.worker import Batch, BatchResult, FinalizeResult, RoleHandler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.worker.handlers.base import RunContext

NAME = "daily-orders"
FORECAST = "forecast"
"""A role that nobody serves."""

SHOPS = {"athens": "GR", "berlin": "DE", "geneva": "CH", "lisbon": "PT", "london": "GB", "porto": "PT"}
ORDERS = 40
"""Of one shop on one day."""

_CURRENCIES = {"CH": "CHF", "GB": "GBP"}
_RATES = {"EUR": 1.0, "CHF": 1.06, "GBP": 1.17}


class RatesUnavailable(Exception):
    """The service of exchange rates does not answer."""


class RateService:
    """Exchange rates of a day. The script says on which days it fails, and on which it takes its time."""

    def __init__(self) -> None:
        self.refuses: dict[str, int] = {}
        """Requests still to be refused, by day."""
        self.hangs: set[str] = set()
        """Days on which only the first two shops get an answer."""

    async def rate(self, day: str, shop: str, currency: str) -> float:
        """Euros for one unit of a currency."""
        if self.refuses.get(day, 0) > 0:
            self.refuses[day] -= 1
            raise RatesUnavailable(f"rates of {day}: the service answered 503 Service Unavailable")
        if day in self.hangs and shop not in list(SHOPS)[:2]:
            await asyncio.Event().wait()
        return _RATES[currency]


class ExtractOrders(RoleHandler):
    """The orders of a day, a batch for each shop."""

    role = "extract"

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """One batch for each shop, named after it."""
        given = loaded["input_inline"]
        for shop in SHOPS:
            yield Batch(batch_uid=shop, payload={"shop": shop, **given})

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """The shop's orders; one of the shop `damaged` has an amount that is no number."""
        shop, day = batch.payload["shop"], batch.payload["day"]
        chance = random.Random(f"{shop} {day}")  # the same orders in every attempt
        amounts: list[float | str] = [round(chance.uniform(5, 250), 2) for _ in range(ORDERS)]
        if shop == batch.payload.get("damaged"):
            amounts[17] = "n/a"
        orders = [{"order": 1000 + i, "amount": amount} for i, amount in enumerate(amounts)]
        return BatchResult(success=True, metrics={"shop": shop, "day": day, "orders": orders})


class EnrichOrders(RoleHandler):
    """Amounts in euros and the country of the shop."""

    role = "enrich"

    def __init__(self, rates: RateService) -> None:
        self._rates = rates

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """The orders of one shop."""
        meta = batch.payload["meta"]
        country = SHOPS[meta["shop"]]
        asked = self._rates.rate(meta["day"], meta["shop"], _CURRENCIES.get(country, "EUR"))
        rate = await ctx.cancellable(asked)
        orders = [{**order, "euros": _euros(meta["shop"], order, rate)} for order in meta["orders"]]
        return BatchResult(success=True, metrics={"country": country, "orders": orders})

    def classify_error(self, exc: BaseException) -> tuple[str, bool]:
        """A service that is away comes back; orders that cannot be read stay so."""
        if isinstance(exc, RatesUnavailable):
            return "rates_unavailable", False
        return super().classify_error(exc)


def _euros(shop: str, order: dict[str, Any], rate: float) -> float:
    try:
        return round(float(order["amount"]) * rate, 2)
    except ValueError:
        raise ValueError(
            f"order {order['order']} of {shop}: amount {order['amount']!r} is no number"
        ) from None


class GroupByCountry(RoleHandler):
    """Revenue of a batch by country."""

    role = "group"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """The sum of one shop's orders, under its country."""
        meta = batch.payload["meta"]
        euros = sum(order["euros"] for order in meta["orders"])
        return BatchResult(success=True, metrics={"country": meta["country"], "euros": round(euros, 2)})


class AnalyseRevenue(RoleHandler):
    """Countries by revenue."""

    role = "analyse"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Keep the sums as this node's own, for `finalize`."""
        return BatchResult(success=True, metrics=batch.payload["meta"])

    async def finalize(self, ctx: RunContext) -> FinalizeResult:
        """The ranking."""
        total: dict[str, float] = {}
        async for partial in ctx.artifacts.partials():
            country = partial["meta"]["country"]
            total[country] = round(total.get(country, 0.0) + partial["meta"]["euros"], 2)
        ranking = sorted(total.items(), key=lambda pair: -pair[1])
        return FinalizeResult(metrics={"ranking": [list(pair) for pair in ranking]})


def handlers(rates: RateService) -> dict[str, RoleHandler]:
    """A handler for each role of the pipeline."""
    made = [ExtractOrders(), EnrichOrders(rates), GroupByCountry(), AnalyseRevenue()]
    return {handler.role: handler for handler in made}


def graph(day: str, *, backoff_sec: float = 1, **extract: Any) -> dict[str, Any]:
    """The orders of one day: extract, enrich, group, analyse, and a mark in the task's variables at the end."""
    retries = {"max": 2, "backoff_sec": backoff_sec}
    listing = {"input_inline": {"day": day, **extract}}
    mark = {"fn": "vars.set", "fn_args": {"kv": {"report": f"ready for {day}"}}}
    return {
        "name": NAME,
        "nodes": [
            {"node_id": "extract_orders", "type": "extract", "io": listing},
            {**pulling("enrich_orders", "enrich", "extract_orders"), "retry_policy": retries},
            pulling("group_by_country", "group", "enrich_orders"),
            pulling("analyse_revenue", "analyse", "group_by_country"),
            {
                "node_id": "announce_report",
                "type": "coordinator_fn",
                "depends_on": ["analyse_revenue"],
                "io": mark,
            },
        ],
    }


def pulling(node_id: str, role: str, source: str) -> dict[str, Any]:
    """A node that starts after `source` and gets its batches."""
    io = {"input_inline": {"input_adapter": "pull.from_artifacts"}}
    return {"node_id": node_id, "type": role, "depends_on": [source], "io": io}
