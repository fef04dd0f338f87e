"""The metrics of several processes in one text."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from flowkit.observe.joining import join

ONE = b"""# HELP sent_total What was sent.
# TYPE sent_total counter
sent_total{role="a} b \\" c"} 1.0
# HELP up_seconds Time.
# TYPE up_seconds gauge
up_seconds 5.0
"""
TWO = b"""# HELP up_seconds Time.
# TYPE up_seconds gauge
up_seconds{} 6.0
# HELP time_seconds Durations.
# TYPE time_seconds histogram
time_seconds_bucket{le="+Inf"} 1.0
time_seconds_count 1.0
"""


def test_each_sample_names_its_process_and_families_stay_together() -> None:
    text = join({"1": ONE, "2": TWO}).decode()
    families = list(text_string_to_metric_families(text))
    assert [(each.name, each.type, each.documentation) for each in families] == [
        ("sent", "counter", "What was sent."),
        ("up_seconds", "gauge", "Time."),
        ("time_seconds", "histogram", "Durations."),
    ]
    assert [(each.labels, each.value) for family in families for each in family.samples] == [
        ({"process": "1", "role": 'a} b " c'}, 1),
        ({"process": "1"}, 5),
        ({"process": "2"}, 6),
        ({"process": "2", "le": "+Inf"}, 1),
        ({"process": "2"}, 1),
    ]
