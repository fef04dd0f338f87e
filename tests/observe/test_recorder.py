"""What a recorder keeps, how it bounds labels, and the text that it becomes."""

from __future__ import annotations

import threading
import tracemalloc

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from flowkit.core.instruments import Counter, Gauge, Histogram
from flowkit.observe.recorder import MAX_COMBINATIONS, MAX_LABEL_CHARS, MAX_VALUES, OTHER, MetricsRecorder

SENT = Counter(name="sent_total", text="What was sent.", labels=("role", "kind"))
TIME = Histogram(name="time_seconds", text="How long it took.", labels=("role",), buckets=(0.1, 1))
OLDEST = Gauge(name="oldest_seconds", text="How old the oldest is.", labels=("role",), is_maximum=True)
OPEN = Gauge(name="open_things", text="What is open.", labels=("role",))


def values(recorder: MetricsRecorder) -> dict[tuple[str, ...], float]:
    """Return the samples of the text, by name and values of labels."""
    registry = CollectorRegistry()
    registry.register(recorder)
    text = generate_latest(registry).decode()
    families = text_string_to_metric_families(text)
    return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}


def test_counters_add_and_histograms_sort_their_values_into_buckets() -> None:
    recorder = MetricsRecorder()
    recorder.add(SENT, 1, ("a", "x"))
    recorder.add(SENT, 2.5, ("a", "x"))
    for value in (0.1, 0.5, 7):
        recorder.observe(TIME, value, ("a",))
    assert values(recorder) == {
        ("sent_total", "x", "a"): 3.5,
        ("time_seconds_bucket", "0.1", "a"): 1,
        ("time_seconds_bucket", "1.0", "a"): 2,
        ("time_seconds_bucket", "+Inf", "a"): 3,
        ("time_seconds_count", "a"): 3,
        ("time_seconds_sum", "a"): 7.6,
    }


def test_setting_a_gauge_removes_its_earlier_values() -> None:
    recorder = MetricsRecorder()
    recorder.set(OPEN, {("a",): 1, ("b",): 2})
    recorder.set(OPEN, {("b",): 3})
    assert values(recorder) == {("open_things", "b"): 3}


def test_labels_beyond_the_bounds_count_as_other() -> None:
    recorder = MetricsRecorder()
    for number in range(MAX_VALUES + 50):
        recorder.add(SENT, 1, (f"r{number}", "x"))
    recorder.set(OPEN, {(f"g{number}",): 1 for number in range(MAX_VALUES + 50)})
    found = values(recorder)
    assert len([key for key in found if key[0] == "sent_total"]) == MAX_VALUES + 1
    assert found["sent_total", "x", OTHER] == found["open_things", OTHER] == 50


def test_ages_beyond_the_bound_are_not_added_up() -> None:
    recorder = MetricsRecorder()
    recorder.set(OLDEST, {(f"r{number}",): 600 for number in range(MAX_VALUES + 50)})
    assert values(recorder)["oldest_seconds", OTHER] == 600


def test_combinations_beyond_the_bound_count_as_other() -> None:
    recorder = MetricsRecorder()
    for number in range(MAX_COMBINATIONS * 5):
        recorder.add(SENT, 1, (f"r{number % 150}", f"k{number // 150}"))
    found = values(recorder)
    assert len(found) == MAX_COMBINATIONS + 1
    assert found["sent_total", OTHER, OTHER] == MAX_COMBINATIONS * 4


@pytest.mark.parametrize("hostile", ['a"} 1\nevil 2', "\\", "\ud800", "x" * 10_000, "\r\x00\u2028", ""])
def test_hostile_values_of_labels_stay_values(hostile: str) -> None:
    recorder = MetricsRecorder()
    recorder.add(SENT, 1, (hostile, "x"))
    shown = hostile[:MAX_LABEL_CHARS].replace("\ud800", "?")
    assert values(recorder) == {("sent_total", "x", shown): 1}


def test_long_values_of_labels_use_no_memory() -> None:
    recorder = MetricsRecorder()
    tracemalloc.start()
    try:
        for number in range(100):
            recorder.add(SENT, 1, (f"{number}{'x' * 100_000}", "x"))
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()


def test_threads_lose_no_count() -> None:
    recorder = MetricsRecorder()

    def count() -> None:
        for number in range(2_000):
            recorder.add(SENT, 1, ("a", f"{number % 20}"))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for each in threads:
        each.start()
    while any(each.is_alive() for each in threads):
        values(recorder)
    assert sum(values(recorder).values()) == 8_000
