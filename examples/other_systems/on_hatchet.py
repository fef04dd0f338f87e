from datetime import timedelta

from hatchet_sdk import ConcurrencyExpression, ConcurrencyLimitStrategy, Context, DurableContext, Hatchet
from pydantic import BaseModel

from other_systems import steps
from other_systems.steps import Page, Params, Report, Score

hatchet = Hatchet()
ten_at_once = ConcurrencyExpression(
    expression="'guide'", max_runs=10, limit_strategy=ConcurrencyLimitStrategy.GROUP_ROUND_ROBIN
)


class City(BaseModel):
    city: str


class Scores(BaseModel):
    scores: list[Score]


class Decision(BaseModel):
    run: str
    approved: bool


@hatchet.task(input_validator=City, retries=2, backoff_factor=2.0, concurrency=ten_at_once)
def fetch(input: City, ctx: Context) -> Page:
    return steps.fetch(input.city)


@hatchet.task(input_validator=Page)
def rate(input: Page, ctx: Context) -> Score:
    return steps.rate(input)


@hatchet.task(input_validator=Scores)
def publish(input: Scores, ctx: Context) -> Report:
    return Report(published=steps.publish(input.scores))


@hatchet.task(input_validator=Report)
def report(input: Report, ctx: Context) -> Report:
    return steps.report(input.published)


@hatchet.durable_task(input_validator=Params, execution_timeout=timedelta(days=7))
async def rate_cities(input: Params, ctx: DurableContext) -> Report:
    result = Report(published=[])
    try:
        cities = [fetch.create_bulk_run_item(City(city=city)) for city in input.cities]
        pages = [rate.create_bulk_run_item(page) for page in await fetch.aio_run_many(cities)]
        scores = await rate.aio_run_many(pages)
        if kept := steps.keep(scores, input.minimum):
            decision = await ctx.aio_wait_for_event(
                "decided", f"input.run == '{ctx.workflow_run_id}'", payload_validator=Decision
            )
            if decision.approved:
                result = await publish.aio_run(Scores(scores=kept))
    finally:
        await report.aio_run(result)
    return result


if __name__ == "__main__":
    hatchet.worker("cities", workflows=[rate_cities, fetch, rate, publish, report]).start()
