from pydantic import BaseModel

from flowkit import Flow
from flowkit.worker import RunContext, role
from other_systems import steps
from other_systems.steps import Page, Params, Report, Score


class Kept(BaseModel):
    scores: list[Score]
    pages: int


@role("fetch")
def fetch(city: str) -> Page:
    return steps.fetch(city)


@role("rate")
def rate(page: Page) -> Score:
    return steps.rate(page)


@role("keep")
def keep(score: Score, ctx: RunContext) -> Kept:
    kept = steps.keep([score], ctx.params_as(Params).minimum)
    return Kept(scores=kept, pages=len(kept))


@role("publish")
def publish(kept: Kept) -> list[str]:
    return steps.publish(kept.scores)


def write_report(published: list[list[str]]) -> Report:
    return steps.report([city for each in published for city in each])


@role("report", finalize=write_report)
def report(published: list[str]) -> list[str]:
    return published


flow = Flow("cities", params=Params, on_node_failure="continue")
pages = flow.node("fetch", fetch).maps("params.cities", str, parallel=10).retry(2, backoff_sec=1)
scores = flow.node("rate", rate).pulls(pages, streaming=True)
best = flow.node("keep", keep).pulls(scores, streaming=True)
count = flow.function("count", "metrics.aggregate", node_id="keep").after(best)
approve = flow.approval("approve", "Publish the pages?").after(count).when("nodes.keep.stats.pages > 0")
done = flow.node("publish", publish).after(approve).pulls(best, waits=False)
flow.node("report", report).pulls(done).gate("all_done")
