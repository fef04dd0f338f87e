from pathlib import Path
from typing import Any

import dagster as dg

from other_systems.on_dagster import defs, report_failure
from other_systems.steps import Report


def config_of(*cities: str, minimum: int = 5) -> dict[str, Any]:
    choose, keep = {"config": {"cities": list(cities)}}, {"config": {"minimum": minimum}}
    return {"ops": {"best_pages": {"ops": {"choose": choose, "keep": keep}}}}


def test_run(tmp_path: Path) -> None:
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        rating, publishing = defs.resolve_job_def("rating"), defs.resolve_job_def("publishing")
        assert rating.execute_in_process(config_of("Lima", "Oslo", "Turin"), instance).success
        approved = publishing.execute_in_process(instance=instance)
        assert approved.output_for_node("published") == ["Lima", "Oslo"]


def test_nothing_to_approve() -> None:
    result = defs.resolve_job_def("rating").execute_in_process(config_of("Turin"))
    assert result.success and not result.asset_materializations_for_node("best_pages.keep")


def test_report_runs_after_a_failure() -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        rating = defs.resolve_job_def("rating")
        failed = rating.execute_in_process(config_of("Atlantis"), instance, raise_on_error=False)
        context = dg.build_run_status_sensor_context(
            "report_failure", failed.get_run_failure_event(), instance, failed.dagster_run
        )
        report_failure(context.for_run_failure())
    assert Report.model_validate_json(Path("report.json").read_text()).published == []
