from collections.abc import Iterator

import dagster as dg

from other_systems import steps
from other_systems.steps import Page, Report, Score


class Cities(dg.Config):
    cities: list[str]


class Minimum(dg.Config):
    minimum: int = 5


@dg.op(out=dg.DynamicOut())
def choose(config: Cities) -> Iterator[dg.DynamicOutput[str]]:
    for city in config.cities:
        yield dg.DynamicOutput(city, mapping_key=city)


@dg.op(retry_policy=dg.RetryPolicy(max_retries=2, delay=1))
def fetch(city: str) -> Page:
    return steps.fetch(city)


@dg.op
def rate(page: Page) -> Score:
    return steps.rate(page)


@dg.op(out=dg.Out(is_required=False))
def keep(config: Minimum, scores: list[Score]) -> Iterator[dg.Output[list[Score]]]:
    if kept := steps.keep(scores, config.minimum):
        yield dg.Output(kept)


@dg.graph_asset
def best_pages() -> list[Score]:
    return keep(choose().map(lambda city: rate(fetch(city))).collect())


@dg.asset
def published(best_pages: list[Score]) -> list[str]:
    return steps.publish(best_pages)


@dg.asset
def report(published: list[str]) -> Report:
    return steps.report(published)


ten_at_once = dg.multiprocess_executor.configured({"max_concurrent": 10})
rating = dg.define_asset_job("rating", [best_pages], executor_def=ten_at_once)
publishing = dg.define_asset_job("publishing", [published, report])  # launched by the person who approves


@dg.run_failure_sensor(monitored_jobs=[rating, publishing])
def report_failure(context: dg.RunFailureSensorContext) -> None:
    steps.report([])


defs = dg.Definitions([best_pages, published, report], jobs=[rating, publishing], sensors=[report_failure])
