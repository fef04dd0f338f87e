import asyncio
from datetime import timedelta

from temporalio import activity, workflow
from temporalio.common import RetryPolicy

with workflow.unsafe.imports_passed_through():
    from other_systems import steps
    from other_systems.steps import Page, Params, Report, Score


@activity.defn
def fetch(city: str) -> Page:
    return steps.fetch(city)


@activity.defn
def rate(page: Page) -> Score:
    return steps.rate(page)


@activity.defn
def publish(scores: list[Score]) -> list[str]:
    return steps.publish(scores)


@activity.defn
def report(published: list[str]) -> Report:
    return steps.report(published)


@workflow.defn
class Cities:
    def __init__(self) -> None:
        self.approved: bool | None = None
        self.slots = asyncio.Semaphore(10)

    @workflow.update
    def decide(self, approved: bool) -> None:
        self.approved = approved

    @workflow.run
    async def run(self, params: Params) -> Report:
        published: list[str] = []
        try:
            scores = await asyncio.gather(*[self.rated(city) for city in params.cities])
            if kept := steps.keep(scores, params.minimum):
                await workflow.wait_condition(lambda: self.approved is not None)
                if self.approved:
                    published = await workflow.execute_activity(publish, kept, start_to_close_timeout=MINUTE)
        finally:
            done = await workflow.execute_activity(report, published, start_to_close_timeout=MINUTE)
        return done

    async def rated(self, city: str) -> Score:
        async with self.slots:
            page = await workflow.execute_activity(
                fetch, city, start_to_close_timeout=MINUTE, retry_policy=RetryPolicy(maximum_attempts=3)
            )
        return await workflow.execute_activity(rate, page, start_to_close_timeout=MINUTE)


MINUTE = timedelta(minutes=1)
