"""What a batch of Kafka decompresses to takes limited memory, and no record of it is lost."""

from __future__ import annotations

import struct
from itertools import islice
from typing import TYPE_CHECKING, Any

import cramjam
import pytest
from aiokafka.consumer.fetcher import PartitionRecords
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.structs import TopicPartition
from tests.kafka_batches import (
    CODECS,
    MB,
    Codec,
    batch,
    compress,
    field,
    good_large_good,
    peak_memory_mb,
    record,
    reset_peak_memory,
    varint,
)

from flowkit.bridge.kafka.clients import UnreadableBatch
from flowkit.bridge.kafka.record_reader import RecordReader
from flowkit.limits import KAFKA_RECORD_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

PLACE = TopicPartition("topic", 0)


def ours(fetched: bytes) -> Any:
    """Return what a reader makes of the bytes of a response."""
    return RecordReader(None).batches(fetched)


def read(fetched: bytes, batches: Callable[[bytes], Any] = ours, offset: int = 0) -> list[Any]:
    """Return the records that aiokafka's fetcher gives its client."""
    return [*PartitionRecords(PLACE, batches(fetched), [], offset, None, None, True, 0)]


@pytest.mark.parametrize("codec", Codec, ids=lambda codec: codec.name)
def test_records_are_those_that_aiokafka_reads(codec: Codec) -> None:
    values = [b"", None, b"x" * 300, b"y" * 200_000]
    payload = b"".join(
        record(number, value, key, [(b"name", b"v"), ("é".encode(), None)])
        for number, (value, key) in enumerate((value, key) for value in values for key in (b"k", None))
    )
    # The last record of the second batch was removed by compaction; the third was not fetched whole.
    one, two = record(0, b"z"), record(0, b"a") + record(3, b"b")
    fetched = b"".join(
        [
            batch(compress(codec, [payload]), 8, codec, base=5),
            batch(compress(codec, [two]), 2, codec, base=20, time_ms=7),
            batch(compress(codec, [one]), 1, codec, base=90, flags=0x20),
            batch(compress(codec, [one]), 1, codec, base=91, flags=0x08),
            batch(compress(codec, [one]), 1, codec, base=92)[:-1],
        ]
    )
    assert read(fetched, offset=7) == read(fetched, MemoryRecords, offset=7)
    assert [each.offset for each in read(fetched, offset=7)] == [7, 8, 9, 10, 11, 12, 20, 23, 91]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_a_record_of_300_mb_is_cut_off_and_those_beside_it_are_read(codec: Codec) -> None:
    fetched = good_large_good(codec)
    reset_peak_memory()
    before = peak_memory_mb()
    records = read(fetched)
    assert peak_memory_mb() - before < 100
    assert [(each.offset, each.key) for each in records] == [(0, b"k"), (1, b"k"), (2, b"k")]
    assert [each.value for each in records] == [b"0", bytes(KAFKA_RECORD_BYTES + 1), b"2"]


def test_a_record_is_cut_off_only_beyond_the_limit() -> None:
    sizes = [KAFKA_RECORD_BYTES, KAFKA_RECORD_BYTES + 1, KAFKA_RECORD_BYTES + 200_000]
    records = read(batch(b"".join(record(n, bytes(size)) for n, size in enumerate(sizes)), 3))
    assert [len(each.value) for each in records] == [sizes[0], sizes[1], sizes[1]]


@pytest.mark.parametrize(
    "large",
    [
        record(0, b"value", key=bytes(5 * MB)),
        record(0, b"value", key=bytes(KAFKA_RECORD_BYTES + 100_000 - 12)),
        record(0, b"value", headers=[(b"name", bytes(5 * MB))]),
        record(0, None, headers=[(b"name", bytes(5 * MB))]),
        record(0, bytes(3 * MB), key=bytes(3 * MB)),
    ],
    ids=["key", "key up to the limit", "header", "header without a value", "key and value"],
)
def test_a_record_that_is_large_by_its_key_or_its_headers_counts_as_too_large(large: bytes) -> None:
    [found, good] = read(batch(large + record(1, b"good"), 2))
    assert (len(found.value), found.headers) == (KAFKA_RECORD_BYTES + 1, ())
    assert good.value == b"good"


class Fetched:
    """A client whose fetcher has already fetched a batch for one partition."""

    def __init__(self, fetched: bytes, reader: RecordReader) -> None:
        records = PartitionRecords(PLACE, reader.batches(fetched), [], 0, None, None, True, 0)
        self._records = (each for each in records)

    async def getmany(self, timeout_ms: int, max_records: int) -> dict[TopicPartition, list[Any]]:
        """Return the next records."""
        records = [*islice(self._records, max_records)]
        return {PLACE: records} if records else {}


@pytest.mark.parametrize("part", ["key", "value", "header"])
async def test_one_read_returns_little_more_than_its_limit_whatever_makes_records_large(part: str) -> None:
    content = bytes(MB)
    one = {
        "key": lambda number: record(number, b"value", key=content),
        "value": lambda number: record(number, content),
        "header": lambda number: record(number, b"value", headers=[(b"name", content)]),
    }[part]
    reader = RecordReader(None)
    fetched = batch(compress(Codec.zstd, map(one, range(20))), 20, Codec.zstd)
    reader._client = Fetched(fetched, reader)
    counts = []
    while records := await reader.read(0):
        counts.append(len(records[PLACE]))
    assert counts == [8, 8, 4]


def test_of_millions_of_headers_a_thousand_are_read() -> None:
    [found, good] = read(batch(record(0, b"value", headers=[(b"", None)] * 2_000) + record(1, b"good"), 2))
    assert (found.value, len(found.headers), good.value) == (b"value", 1_000, b"good")


def test_what_brokers_accept_and_aiokafka_does_not_is_read() -> None:
    """A name of a header that is not UTF-8, and a record without a time."""
    [found] = read(batch(record(0, b"x", headers=[(b"\xff", b"v")]), 1, time_ms=-1))
    assert (found.value, found.headers, found.timestamp) == (b"x", (("\ufffd", b"v"),), -1)
    with pytest.raises(UnicodeDecodeError):
        read(batch(record(0, b"x", headers=[(b"\xff", b"v")]), 1), MemoryRecords)


ZSTD_WINDOW_OF_2_GB = bytes.fromhex("28b52ffd00a8") + b"\x03\x00\x00a" * 3
UNREADABLE = {
    "not compressed": batch(b"odd", 1, Codec.gzip),
    "ends early": batch(compress(Codec.zstd, [record(0, bytes(1_000))])[:-4], 1, Codec.zstd),
    "fewer records": batch(compress(Codec.lz4, [b""]), 1, Codec.lz4),
    "unknown codec": batch(record(0, b"x"), 1, flags=7),
    "a large window": batch(ZSTD_WINDOW_OF_2_GB, 1, Codec.zstd),
    "a large block": batch(b"\xff\xff\xff\xff\x0f" + b"\x00a", 1, Codec.snappy),
    "a large block in a stream": batch(
        b"\x82SNAPPY\0" + bytes(8) + struct.pack(">i", 7) + b"\xff\xff\xff\xff\x0f" + b"\x00a",
        1,
        Codec.snappy,
    ),
    "a block that does not end": batch(
        b"\x82SNAPPY\0" + bytes(8) + struct.pack(">i", 2**31 - 1) + b"\x01\x00a", 1, Codec.snappy
    ),
    "a negative block": batch(b"\x82SNAPPY\0" + bytes(8) + struct.pack(">i", -4), 1, Codec.snappy),
    "a negative record": batch(varint(-5), 1),
    "an endless number": batch(b"\xff" * 100, 1),
    "an endless number, compressed": batch(compress(Codec.gzip, [b"\xff" * 5 * MB]), 1, Codec.gzip),
    "a field that does not end": batch(varint(9) + b"\0\0\0" + varint(100) + b"12345", 1),
    "a negative field": batch(varint(5) + b"\0\0\0" + varint(-9) + b"1", 1),
    "headers that do not end": batch(varint(11) + b"\0\0\0" + field(b"") + field(b"") + varint(2**40), 1),
    "bytes behind the headers": batch(varint(7) + b"\0\0\0" + field(b"") + field(b"") + b"\0\0", 1),
    "an old format": batch(record(0, b"x"), 1)[:16] + b"\1" + batch(record(0, b"x"), 1)[17:],
    "shorter than its header": struct.pack(">qiibI", 0, 9, 0, 2, 0),
    "a negative length": struct.pack(">qiibI", 0, -9, 0, 2, 0),
}


@pytest.mark.parametrize("fetched", UNREADABLE.values(), ids=UNREADABLE)
def test_a_batch_that_cannot_be_read_names_its_offset(fetched: bytes) -> None:
    good = batch(record(0, b"good"), 1, base=0)
    moved = struct.pack(">q", 1) + fetched[8:]
    records = PartitionRecords(PLACE, ours(good + moved), [], 0, None, None, False, 0)
    assert next(records).value == b"good"
    with pytest.raises(UnreadableBatch, match="the record at offset 1 cannot be read: ") as caught:
        next(records)
    assert caught.value.offset == 1


def test_the_largest_block_of_snappy_is_read() -> None:
    block = bytes(cramjam.snappy.compress_raw(record(0, bytes(20 * MB)) + record(1, b"good")))
    assert [len(each.value) for each in read(batch(block, 2, Codec.snappy))] == [KAFKA_RECORD_BYTES + 1, 4]
