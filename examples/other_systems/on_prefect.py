from prefect import flow, pause_flow_run, task
from prefect.task_runners import ThreadPoolTaskRunner

from other_systems import steps
from other_systems.steps import Page, Params, Report, Score


@task(retries=2, retry_delay_seconds=1)
def fetch(city: str) -> Page:
    return steps.fetch(city)


@task
def rate(page: Page) -> Score:
    return steps.rate(page)


@task
def publish(scores: list[Score]) -> list[str]:
    return steps.publish(scores)


@task
def report(published: list[str]) -> Report:
    return steps.report(published)


@flow(task_runner=ThreadPoolTaskRunner(max_workers=10))
def cities(params: Params) -> Report:
    published: list[str] = []
    try:
        scores = rate.map(fetch.map(params.cities)).result()
        if kept := steps.keep(scores, params.minimum):
            approved = pause_flow_run(wait_for_input=bool, timeout=86400)
            if approved:
                published = publish(kept)
    finally:
        done = report(published)
    return done
