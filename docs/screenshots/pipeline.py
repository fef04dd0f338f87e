"""The pipeline of the screenshots: orders of some shops, converted to euros, summed by country and ranked."""

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
"""A role without workers."""

SHOPS = {"athens": "GR", "berlin": "DE", "geneva": "CH", "lisbon": "PT", "london": "GB", "porto": "PT"}
ORDERS = 40
"""Orders of one shop on one day."""

_CURRENCIES = {"CH": "CHF", "GB": "GBP"}
_RATES = {"EUR": 1.0, "CHF": 1.06, "GBP": 1.17}


class RatesUnavailable(Exception):
    """The exchange rate service does not respond."""


class RateService:
    """Exchange rates of a day. The script configures the days on which it fails or hangs."""

    def __init__(self) -> None:
        self.refuses: dict[str, int] = {}
        """Number of requests that still fail, by day."""
        self.hangs: set[str] = set()
        """Days on which only requests for the first two shops return."""

    async def rate(self, day: str, shop: str, currency: str) -> float:
        """Return the euros for one unit of a currency."""
        if self.refuses.get(day, 0) > 0:
            self.refuses[day] -= 1
            raise RatesUnavailable(f"rates of {day}: the service answered 503 Service Unavailable")
        if day in self.hangs and shop not in list(SHOPS)[:2]:
            await asyncio.Event().wait()
        return _RATES[currency]


class ExtractOrders(RoleHandler):
    """Reads the orders of a day, one batch for each shop."""

    role = "extract"

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """Yield one batch for each shop, with the shop as its uid."""
        given = loaded["input_inline"]
        for shop in SHOPS:
            yield Batch(batch_uid=shop, payload={"shop": shop, **given})

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return the orders of the shop; one order of the shop `damaged` has an invalid amount."""
        shop, day = batch.payload["shop"], batch.payload["day"]
        chance = random.Random(f"{shop} {day}")  # the same orders in every attempt
        amounts: list[float | str] = [round(chance.uniform(5, 250), 2) for _ in range(ORDERS)]
        if shop == batch.payload.get("damaged"):
            amounts[17] = "n/a"
        orders = [{"order": 1000 + i, "amount": amount} for i, amount in enumerate(amounts)]
        return BatchResult(success=True, metrics={"shop": shop, "day": day, "orders": orders})


class EnrichOrders(RoleHandler):
    """Adds the amount in euros and the country of the shop."""

    role = "enrich"

    def __init__(self, rates: RateService) -> None:
        self._rates = rates

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Convert the orders of one shop."""
        meta = batch.payload["meta"]
        country = SHOPS[meta["shop"]]
        request = self._rates.rate(meta["day"], meta["shop"], _CURRENCIES.get(country, "EUR"))
        rate = await ctx.cancellable(request)
        orders = [{**order, "euros": _euros(meta["shop"], order, rate)} for order in meta["orders"]]
        return BatchResult(success=True, metrics={"country": country, "orders": orders})

    def classify_error(self, exc: BaseException) -> tuple[str, bool]:
        """Retry while the service is unavailable; invalid orders are permanent failures."""
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
    """Sums the revenue of a batch by country."""

    role = "group"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return the sum of one shop's orders, with its country."""
        meta = batch.payload["meta"]
        euros = sum(order["euros"] for order in meta["orders"])
        return BatchResult(success=True, metrics={"country": meta["country"], "euros": round(euros, 2)})


class AnalyseRevenue(RoleHandler):
    """Ranks the countries by revenue."""

    role = "analyse"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Store the sums as results of this node, for `finalize`."""
        return BatchResult(success=True, metrics=batch.payload["meta"])

    async def finalize(self, ctx: RunContext) -> FinalizeResult:
        """Return the ranking."""
        total: dict[str, float] = {}
        async for partial in ctx.artifacts.partials():
            country = partial["meta"]["country"]
            total[country] = round(total.get(country, 0.0) + partial["meta"]["euros"], 2)
        ranking = sorted(total.items(), key=lambda pair: -pair[1])
        return FinalizeResult(metrics={"ranking": [list(pair) for pair in ranking]})


def handlers(rates: RateService) -> dict[str, RoleHandler]:
    """Return a handler for each role of the pipeline."""
    created = [ExtractOrders(), EnrichOrders(rates), GroupByCountry(), AnalyseRevenue()]
    return {handler.role: handler for handler in created}


def graph(day: str, *, backoff_sec: float = 1, **extract: Any) -> dict[str, Any]:
    """Return the graph for the orders of one day; its last node sets a variable of the task."""
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


def routed_graph(day: str) -> dict[str, Any]:
    """Return the graph of a day on which the end of `enrich_orders` decides what follows."""
    routed = graph(day)
    extract, enrich, group, analyse, announce = routed["nodes"]
    enrich["routing"] = {"on_success": ["group_by_country"], "on_failure": ["ask_for_rates"]}
    ask = {"fn": "vars.set", "fn_args": {"kv": {"problem": f"no rates of {day}"}}}
    announce |= {"node_id": "close_day", "depends_on": ["analyse_revenue", "ask_for_rates"], "fan_in": "any"}
    asking = {"node_id": "ask_for_rates", "type": "coordinator_fn", "io": ask}
    return {**routed, "nodes": [extract, enrich, group, analyse, asking, announce]}


def held_graph(day: str) -> dict[str, Any]:
    """Return the graph of a day with an invalid order, whose failures wait for a decision, and with an approval."""
    ordinary = graph(day, damaged="lisbon")
    approval = {"text": f"Are the shop prices of {day} checked?"}
    checked = {"node_id": "prices_checked", "type": "approval", "io": {"input_inline": approval}}
    return {**ordinary, "on_node_failure": "hold", "nodes": [*ordinary["nodes"], checked]}


def pulling(node_id: str, role: str, source: str) -> dict[str, Any]:
    """Return a node that starts after `source` and pulls its batches."""
    io = {"input_inline": {"input_adapter": "pull.from_artifacts"}}
    return {"node_id": node_id, "type": role, "depends_on": [source], "io": io}
