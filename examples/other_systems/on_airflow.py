from datetime import timedelta

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import Param, dag, task, teardown

from other_systems import steps
from other_systems.steps import Page, Report, Score


@task
def choose(params: dict[str, list[str]]) -> list[str]:
    return params["cities"]


@task(retries=2, retry_delay=timedelta(seconds=1), max_active_tis_per_dagrun=10)
def fetch(city: str) -> Page:
    return steps.fetch(city)


@task
def rate(page: Page) -> Score:
    return steps.rate(page)


@task
def keep(scores: list[Score], params: dict[str, int]) -> list[Score]:
    return steps.keep(list(scores), params["minimum"])


@task.short_circuit(ignore_downstream_trigger_rules=False)
def any_left(kept: list[Score]) -> bool:
    return bool(kept)


@task
def publish(kept: list[Score]) -> list[str]:
    return steps.publish(kept)


@teardown
def report(published: list[str] | None) -> Report:
    return steps.report(published or [])


@dag(
    schedule=None,
    params={
        "cities": Param(["Lima", "Oslo"], type="array", items={"type": "string"}),
        "minimum": Param(5, type="integer"),
    },
)
def cities() -> None:
    kept = keep(rate.expand(page=fetch.expand(city=choose())))
    approve = ApprovalOperator(
        task_id="approve", subject="Publish the pages?", body="{{ ti.xcom_pull('keep') }}"
    )
    published = publish(kept)
    any_left(kept) >> approve >> published
    report(published)


cities_dag = cities()
