"""Counts and logs Kafka records that are not messages of the protocol. The bridge skips them."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowkit.bridge.rules.reading import KafkaRecord

_logger = logging.getLogger("flowkit.bridge")

_REMEMBERED = 10_000


class MalformedRecords:
    """The malformed records that one bridge has skipped."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Number of skipped records by topic."""
        self._seen: set[tuple[str, int, int]] = set()

    def skip(self, record: KafkaRecord, why: Exception) -> None:
        """Count a record and log it. A record that Kafka delivers again is neither counted nor logged again."""
        place = (record.topic, record.partition, record.offset)
        if place in self._seen:
            return
        if len(self._seen) >= _REMEMBERED:
            self._seen.clear()
        self._seen.add(place)
        self.counts[record.topic] += 1
        _logger.warning("skipped a malformed record (topic %s, partition %d, offset %d): %s", *place, why)
