"""Record batches of Kafka, byte by byte, as any program may send them."""

from __future__ import annotations

import gzip
import re
import struct
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cramjam
import lz4.frame
from aiokafka import TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import for_code
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.util import calc_crc32c, encode_varint
from backports.zstd import ZstdCompressor

from flowkit.bridge.kafka.clients import call_with_retries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Headers = Iterable[tuple[bytes, bytes | None]]

MB = 1 << 20
TIME_MS = 1_760_000_000_000


class Codec(IntEnum):
    """The codecs of Kafka, with their numbers."""

    none = 0
    gzip = 1
    snappy = 2
    lz4 = 3
    zstd = 4


CODECS = [each for each in Codec if each is not Codec.none]


def varint(number: int) -> bytes:
    """Return a number as Kafka encodes it in records."""
    encoded = bytearray()
    encode_varint(number, encoded.append)
    return bytes(encoded)


def field(value: bytes | None) -> bytes:
    """Return a key, a value or a part of a header with its length."""
    return varint(-1) if value is None else varint(len(value)) + value


def record(number: int, value: bytes | None, key: bytes | None = b"k", headers: Headers = ()) -> bytes:
    """Return the record with this number in its batch."""
    parts = [part for header in headers for part in header]
    body = b"".join(
        [
            b"\0",
            varint(0),
            varint(number),
            field(key),
            field(value),
            varint(len(parts) // 2),
            *map(field, parts),
        ]
    )
    return varint(len(body)) + body


def large_record(number: int, megabytes: int) -> Iterator[bytes]:
    """Yield the pieces of a record whose value is this many zeros."""
    size = megabytes * MB
    begin = b"\0" + varint(0) + varint(number) + field(b"k") + varint(size)
    yield varint(len(begin) + size + 1) + begin
    for _ in range(megabytes):
        yield bytes(MB)
    yield varint(0)


def compress(codec: Codec, pieces: Iterable[bytes]) -> bytes:
    """Compress pieces one by one, because all together they may be larger than the memory."""
    if codec is Codec.gzip:
        return b"".join(gzip.compress(piece, 1) for piece in pieces)
    if codec is Codec.snappy:
        return b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1) + b"".join(map(_snappy_block, pieces))
    if codec is Codec.lz4:
        compressor = lz4.frame.LZ4FrameCompressor(block_linked=False)
        return bytes(compressor.begin() + b"".join(map(compressor.compress, pieces)) + compressor.flush())
    if codec is Codec.zstd:
        zstd = ZstdCompressor()
        return b"".join(map(zstd.compress, pieces)) + zstd.flush()
    return b"".join(pieces)


def _snappy_block(piece: bytes) -> bytes:
    block = bytes(cramjam.snappy.compress_raw(piece))
    return struct.pack(">i", len(block)) + block


def batch(
    payload: bytes,
    count: int,
    codec: Codec = Codec.none,
    *,
    base: int = 0,
    time_ms: int = TIME_MS,
    flags: int = 0,
) -> bytes:
    """Return a batch of `count` records, which `payload` has, compressed by `codec`."""
    counted = (
        struct.pack(">hiqqqhii", codec | flags, count - 1, time_ms, time_ms, -1, -1, -1, count) + payload
    )
    crc = calc_crc32c(counted)
    return struct.pack(">qiibI", base, 9 + len(counted), 0, 2, crc) + counted


def good_large_good(
    codec: Codec,
    megabytes: int = 300,
    good: Callable[[int], bytes] = lambda n: b"%d" % n,
    key: bytes | None = b"k",
) -> bytes:
    """Return a batch of three records: the values of the first and the last are `good(0)` and `good(2)`."""
    pieces = [record(0, good(0)), *large_record(1, megabytes), record(2, good(2))]
    return batch(compress(codec, pieces), 3, codec)


async def send_batch(bootstrap: str, topic: str, raw: bytes, partition: int = 0) -> int:
    """Append a batch to a partition, and return the offset of its first record. Raise KafkaUnavailable."""
    client: Any = AIOKafkaClient(bootstrap_servers=bootstrap, request_timeout_ms=60_000)

    async def send() -> int:
        # A topic that was just created may have no leader yet.
        await client.set_topics([topic])
        leader = client.cluster.leader_for_partition(TopicPartition(topic, partition))
        response = await client.send(leader, ProduceRequest(None, -1, 60_000, [(topic, [(partition, raw)])]))
        ((_, ((_, code, offset, *_),)),) = response.topics
        if code:
            await client.force_metadata_update()
            raise for_code(code)(topic)
        return int(offset)

    await client.bootstrap()
    try:
        return await call_with_retries(send, what="appending a batch", address=bootstrap, limit=60)
    finally:
        await client.close()


def reset_peak_memory() -> None:
    """Let the peak of this process's memory begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mb() -> int:
    """Return the most memory that this process has taken since the last reset."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) >> 10
