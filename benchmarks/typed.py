"""`python -m benchmarks.typed`: what `process` costs more than a `process_batch` that validates the same model by hand.

It needs no servers. Each round takes turns between the two; a figure is the processor time of one batch.
"""

from __future__ import annotations

import asyncio
import time
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel

from flowkit.testing.context import handler_context
from flowkit.worker import Batch, BatchResult, RoleHandler, RunContext, role

if TYPE_CHECKING:
    from collections.abc import Sequence

TARGET_US = 30.0
"""Most microseconds that `process` may cost more for a batch."""
BATCHES = 5_000


class Page(BaseModel):
    url: str
    text: str
    links: list[str]


class Words(BaseModel):
    url: str
    words: int


class Typed(RoleHandler[Page, Words]):
    """Receives models."""

    role = "typed"

    async def process(self, item: Page, ctx: RunContext) -> Words:
        return Words(url=item.url, words=len(item.text))


@role("function")
async def function(page: Page, *, least: int = 3) -> Words:
    """Receive a model and a parameter."""
    return Words(url=page.url, words=len(page.text) + least)


class ByHand(RoleHandler):
    """Validates the same models itself."""

    role = "by_hand"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        item = Page.model_validate(batch.payload["meta"])
        result = Words(url=item.url, words=len(item.text))
        return BatchResult(success=True, metrics=result.model_dump(mode="json"))


def _make_batches(links: int) -> Sequence[Batch]:
    meta = {
        "url": "https://example.org",
        "text": "x" * 200,
        "links": [f"https://example.org/{n}" for n in range(links)],
    }
    return [
        Batch(batch_uid=f"{n}", payload={"from_node": "a", "ref": {"batch_uid": f"{n}"}, "meta": meta})
        for n in range(BATCHES)
    ]


async def _measure(handler: RoleHandler[Any, Any], batches: Sequence[Batch]) -> float:
    """Return the microseconds of processor time for one batch."""
    ctx = handler_context(input_inline={"least": 4})
    process: Any = handler.process_batch
    began = time.process_time()
    for batch in batches:
        await process(batch, ctx)
    return (time.process_time() - began) / len(batches) * 1e6


async def _compare(links: int, rounds: int) -> dict[str, list[float]]:
    """Return the samples of each handler."""
    handlers: tuple[RoleHandler[Any, Any], ...] = (ByHand(), Typed(), function)
    batches, samples = _make_batches(links), {each.role: list[float]() for each in handlers}
    for number in range(rounds + 1):
        for handler in handlers:
            taken = await _measure(handler, batches)
            if number:  # The first round only warms up.
                samples[handler.role].append(taken)
    return samples


def main(rounds: Annotated[int, typer.Option(help="Samples of each handler.")] = 9) -> None:
    """Compare typed handlers with one that validates by hand, for small and larger items."""
    for links in (3, 300):
        samples = asyncio.run(_compare(links, rounds))
        by_hand = samples.pop("by_hand")
        typer.echo(f"items with {links} links; by hand {median(by_hand):.1f} µs a batch")
        for name, found in samples.items():
            more = median(each - other for each, other in zip(found, by_hand, strict=True))
            verdict = "within" if more <= TARGET_US else "ABOVE"
            typer.echo(
                f"  {name}: {median(found):.1f} µs, {more:+.1f} µs a batch ({verdict} {TARGET_US:g} µs)"
            )


if __name__ == "__main__":
    typer.run(main)
