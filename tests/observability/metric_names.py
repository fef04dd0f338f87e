"""The metrics that processes of FlowKit serve, with their labels."""

from __future__ import annotations

import re
from pathlib import Path

from flowkit.core.instruments import ALL, Histogram

ROOT = Path(__file__).parents[2]
OF_PROCESSES = {
    "flowkit_info": {"kind", "version", "queue"},
    "flowkit_healthy": set[str](),
    "flowkit_loop_running": {"loop"},
    "flowkit_loop_last_success_timestamp_seconds": {"loop"},
    "flowkit_loop_last_error_timestamp_seconds": {"loop"},
    "process_cpu_seconds_total": set[str](),
    "process_start_time_seconds": set[str](),
    "process_resident_memory_bytes": set[str](),
    "up": set[str](),
    "ALERTS": {"alertname", "alertstate", "severity"},
    "temporal_workflow_task_schedule_to_start_latency_seconds_bucket": {"task_queue", "le"},
    "temporal_workflow_task_execution_latency_seconds_bucket": {"task_queue", "le"},
    "temporal_request_failure_total": {"operation", "status_code"},
    "temporal_long_request_failure_total": {"operation", "status_code"},
}


def _instruments() -> dict[str, set[str]]:
    named: dict[str, set[str]] = {}
    for each in ALL:
        names = [f"{each.name}_{part}" for part in ("bucket", "sum", "count")]
        for name in names if isinstance(each, Histogram) else [each.name]:
            named[name] = {*each.labels, *(["le"] if name.endswith("_bucket") else [])}
    return named


def _of_admission() -> dict[str, set[str]]:
    """Return the metrics of the table of the page, with the labels that their texts name."""
    page = (ROOT / "docs/admission.md").read_text(encoding="utf-8").partition("\n## Metrics\n")[2]
    named: dict[str, set[str]] = {}
    for name, kind, text in re.findall(
        r"^\| `(\w+)` \| (gauge|counter|histogram) \| (.*) \|$", page, re.MULTILINE
    ):
        labels = set(re.findall(r"by `(\w+)`", text))
        named |= {f"{name}_bucket": labels | {"le"}} if kind == "histogram" else {name: labels}
    return named


KNOWN = OF_PROCESSES | _instruments() | _of_admission()


def labels_of(name: str) -> set[str]:
    """Return the labels of a metric. KeyError if no process serves it."""
    return KNOWN[name]
