"""The lines of an attempt that wait: bounds, secrets, and what happens to them while MongoDB is unavailable."""

from __future__ import annotations

import itertools
import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.core import instruments
from flowkit.core.handler_lines import HandlerLine
from flowkit.limits import LOG_LINE_BYTES
from flowkit.observe import log_buffer
from flowkit.observe.log_buffer import LineBuffer, WaitingBytes
from tests.contract.builders import AT, attempt
from tests.processor_time import at_most

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20


class Counts:
    """A recorder that keeps the numbers of counters."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, ...], float] = {}

    def add(self, instrument: instruments.Counter, amount: float, labels: tuple[str, ...]) -> None:
        """Add to a number."""
        key = (instrument.name, *labels)
        self.numbers[key] = self.numbers.get(key, 0) + amount

    def observe(self, instrument: instruments.Histogram, value: float, labels: tuple[str, ...]) -> None:
        """Do nothing."""

    def set(self, instrument: instruments.Gauge, values: dict[tuple[str, ...], float]) -> None:
        """Do nothing."""

    def dropped(self, reason: str) -> float:
        """Return how many lines were not kept for a reason."""
        return self.numbers.get((instruments.LOG_LINES_DROPPED.name, "crawler", reason), 0)


@pytest.fixture
def counts() -> Iterator[Counts]:
    """What the instruments count during the test."""
    recorder = Counts()
    instruments.listen(recorder)
    yield recorder
    instruments.listen(None)


def make(room: WaitingBytes | None = None) -> LineBuffer:
    """Return the buffer of an attempt."""
    return LineBuffer(
        attempt(),
        "w-1",
        level=logging.INFO,
        prints=False,
        lock=threading.RLock(),
        room=room or WaitingBytes(),
        changed=lambda buffer: None,
    )


def line(text: str) -> HandlerLine:
    """Return a line with this text."""
    return HandlerLine(AT, logging.INFO, "shop", text)


def texts(buffer: LineBuffer) -> list[str]:
    """Return the texts of all lines that wait."""
    return [each["text"] for row in buffer.take()[0] for each in row.document["lines"]]


def test_first_and_last_part_of_a_long_log_are_kept(counts: Counts) -> None:
    buffer, stored, deleted = make(), dict[str, Any](), 0

    def store(buffer: LineBuffer) -> None:
        nonlocal deleted
        rows, gone = buffer.take()
        stored.update({row.document["_id"]: row.document for row in rows})
        deleted += sum(len(stored.pop(row_id)["lines"]) for row_id in gone)

    for number in range(30_000):
        buffer.add(line(f"line {number}"))
        if number % 7_000 == 6_999:
            store(buffer)
    store(buffer)
    kept = [each["n"] for document in stored.values() for each in document["lines"]]
    gaps = [(one, other) for one, other in itertools.pairwise(kept) if other != one + 1]
    assert (kept[0], kept[-1], len(gaps)) == (1, 30_000, 1)
    first_part, last_part = gaps[0][0], 30_000 - gaps[0][1]
    assert min(first_part, last_part) > 3_500
    assert counts.dropped("bound") + deleted == 30_000 - len(
        kept
    )  # the caller counts those that it has deleted
    assert 0.8 * MIB < sum(len(str(each)) for each in stored.values()) * 0.8 < 2 * MIB


def test_slow_log_of_single_lines_stays_in_the_bound() -> None:
    """Each second of it is a document of its own, which needs more room than its line."""
    buffer, documents = make(), 0
    for number in range(4_000):
        buffer.add(line(f"line {number}"))
        rows, gone = buffer.take()
        documents += len(rows) - len(gone)
    assert documents < MIB / log_buffer.ROW_OVERHEAD


def test_line_of_10_mb_keeps_its_beginning_and_its_end() -> None:
    buffer = make()
    with at_most(2):
        buffer.add(line("begin " + "ü" * 10_000_000 + " end"))
        (kept,) = texts(buffer)
    assert kept.startswith("begin ü")
    assert kept.endswith("ü end")
    assert "characters left out …" in kept
    assert len(kept.encode()) < LOG_LINE_BYTES + 100
    left_out = int(kept.partition("… ")[2].partition(" ")[0].replace(",", ""))
    assert left_out + kept.count("ü") == 10_000_000


@pytest.mark.parametrize("before", [0, 12_280, 16_380, 30_000])
def test_secrets_are_hidden_where_a_line_is_cut(before: int) -> None:
    secret, token = "correct horse battery staple", "AKIA" + "Q" * 16
    buffer = make()
    buffer.mask({"secret": secret}, lambda: {"nested": {"db_password": "hunter2-hunter2"}})
    for each in (secret, token, "hunter2-hunter2"):
        buffer.add(line("x" * before + f" {each} " + "y" * before))
    kept = "".join(texts(buffer))
    assert not [part for part in ("horse", "staple", "QQQQ", "hunter2", "AKIA") if part in kept]


def test_input_that_cannot_be_read_hides_nothing_and_fails_nothing() -> None:
    buffer = make()
    buffer.mask({}, lambda: 1 / 0)
    buffer.add(line("a line"))
    assert texts(buffer) == ["a line"]


def test_text_that_mongodb_cannot_store_is_escaped() -> None:
    buffer = make()
    buffer.add(line("\ud800 \x00 \x1b[2J \u202e reversed\nnext"))
    assert texts(buffer) == ["\\ud800 \x00 \x1b[2J \u202e reversed\nnext"]


def test_full_process_counts_what_it_does_not_keep(counts: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_buffer, "MAX_PROCESS_BYTES", 10_000)
    room = WaitingBytes()
    one, other = make(room), make(room)
    for _ in range(100):
        one.add(line("x" * 100))
    other.add(line("no room"))
    assert (
        counts.dropped("outage") == 51
    )  # at once: a buffer without a waiting line is never asked for its lines
    assert len(texts(one)) == 50
    assert texts(other) == []
    assert counts.dropped("outage") == 51


def test_clock_that_goes_back_does_not_change_the_order() -> None:
    buffer = make()
    buffer.add(line("one"))
    buffer.add(line("two")._replace(at=AT - 60))
    (row,) = buffer.take()[0]
    assert [each["at"] for each in row.document["lines"]] == [row.document["at"]] * 2
