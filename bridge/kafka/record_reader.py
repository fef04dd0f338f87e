"""Reads the records that a client has fetched with bounded memory, whatever their batches decompress to.

The limits of a fetch count compressed bytes, but some kilobytes can decompress to gigabytes, and aiokafka
decompresses a whole batch at once. It has no setting for that. A `RecordReader` therefore replaces the one class by
which aiokafka's fetcher reads batches, `MemoryRecords`, for its own client only. It decompresses a batch as a stream,
record by record, and cuts off a record that is larger than `KAFKA_RECORD_BYTES`. It relies on no stated size.

It also reads what brokers accept, but aiokafka does not: names of headers that are not UTF-8, and records without a
time. Any of them would otherwise stop its topic for ever.
"""

from __future__ import annotations

import asyncio
import functools
import gzip
import io
import struct
import sys
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from weakref import WeakSet

import cramjam
import lz4.frame
from aiokafka.consumer import fetcher
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import DefaultRecordBase
from aiokafka.record.util import calc_crc32c

from flowkit.bridge.kafka import clients
from flowkit.bridge.kafka.clients import UnreadableBatch
from flowkit.limits import KAFKA_RECORD_BYTES

if sys.version_info >= (3, 14):
    from compression.zstd import DecompressionParameter, ZstdFile
else:
    from backports.zstd import DecompressionParameter, ZstdFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aiokafka import ConsumerRecord, TopicPartition

    Found = dict[TopicPartition, list[ConsumerRecord[bytes, bytes]]]

T = TypeVar("T")

MAX_RECORDS: Final = 500
"""Most records that one read returns."""

READ_BYTES: Final = 2 * KAFKA_RECORD_BYTES
"""About how many bytes of records one read returns."""

_CUT_BYTES: Final = KAFKA_RECORD_BYTES + 1
"""How long the value of a record is whose end was cut off, so that its readers refuse it."""

_KEPT_BYTES: Final = KAFKA_RECORD_BYTES + 100_000
"""How much of a record is kept: the largest value, and the key and the headers beside it."""

_KEPT_HEADERS: Final = 1_000
"""How many headers of a record are kept. One of 4 MB can have millions, which take seconds and 150 MB."""
_HEADER_BYTES: Final = 200
"""About how much memory a header takes beside its bytes."""

_PIECE_BYTES: Final = 1 << 16

_MEMORY_BITS: Final = 27
"""A codec may need 128 MB at once: the window of zstd at its highest level, or a block of snappy."""

_LENGTH: Final = struct.Struct(">i")
_LENGTH_AT, _COUNTED_AT = 8, 12
"""Where a batch says how long it is, and which byte is the first that counts."""
_MAGIC_AT, _VERSION = 16, 2
_VARINT_BYTES: Final = 10
_CODEC_MASK: Final = DefaultRecordBase.CODEC_MASK
_HEADER: Final = DefaultRecordBase.HEADER_STRUCT
_XERIAL: Final = b"\x82SNAPPY\x00"
_XERIAL_HEADER_BYTES: Final = 16


class RecordReader:
    """Reads what an aiokafka consumer fetches. Start the consumer with `start`.

    A record that is much larger than `KAFKA_RECORD_BYTES` has only the beginning of its value, which is one byte
    longer than that, and no headers. Others have at most `_KEPT_HEADERS` headers.
    """

    def __init__(self, client: Any, *, one_by_one: bool = False) -> None:
        """With `one_by_one`, it returns all records before a batch that cannot be read."""
        self._client = client
        self._one_by_one = one_by_one
        self._fetched: WeakSet[_FetchedBatches] = WeakSet()
        self._error: UnreadableBatch | None = None

    async def start(self) -> Any:
        """Start the client and return it; close it if it does not start."""
        _use_own_batches()
        token = _reader.set(self)  # the tasks that fetch inherit it
        try:
            return await clients.start(self._client)
        finally:
            _reader.reset(token)

    async def read(self, timeout_ms: int) -> Found:
        """Return the next records by partition, or nothing after `timeout_ms`.

        Raise UnreadableBatch, after which the client has skipped records: close it. Raise an aiokafka error.
        """
        if self._error is not None:
            raise self._error
        found: Found = {}
        count = size = 0
        try:
            while count < MAX_RECORDS and size < READ_BYTES:
                some = await self._read_some(0 if count else timeout_ms, MAX_RECORDS - count)
                if not some:
                    break
                for place, records in some.items():
                    found.setdefault(place, []).extend(records)
                    count += len(records)
                    size += sum(map(_size_of, records))
        except (CorruptRecordException, UnreadableBatch) as error:
            self._error = error if isinstance(error, UnreadableBatch) else UnreadableBatch(str(error))
            if not found:
                raise self._error from None
        return found

    async def _read_some(self, timeout_ms: int, limit: int) -> Found:
        """Return at most `limit` records; if a batch is compressed, one, because only that shows what it takes."""
        for each in list(self._fetched):
            if each.has_rest:
                # It takes up to a second for each gigabyte.
                await asyncio.to_thread(each.skip_rest)
        # A fetch that arrives while it waits may have a compressed batch.
        one = timeout_ms > 0 or self._one_by_one or any(each.compressed for each in self._fetched)
        found: Found = await self._client.getmany(timeout_ms=timeout_ms, max_records=1 if one else limit)
        return found

    def batches(self, fetched: bytes) -> _FetchedBatches:
        """Return the batches of one partition that were fetched."""
        batches = _FetchedBatches(fetched)
        self._fetched.add(batches)
        return batches


def _size_of(record: ConsumerRecord[bytes, bytes]) -> int:
    """Return about how much memory a record takes. Its key and its headers can be as large as its value."""
    headers = sum(_HEADER_BYTES + len(name) + len(value or b"") for name, value in record.headers)
    return len(record.key or b"") + len(record.value or b"") + headers


_reader: ContextVar[RecordReader | None] = ContextVar("_reader", default=None)


def _use_own_batches() -> None:
    """Let aiokafka's fetcher read batches by the reader of its client. Other clients of the process keep its class."""
    if not isinstance(fetcher.MemoryRecords, functools.partial):
        fetcher.MemoryRecords = functools.partial(_batches_of, fetcher.MemoryRecords)


def _batches_of(original: Callable[[bytes], Any], fetched: bytes) -> Any:
    reader = _reader.get()
    return original(fetched) if reader is None else reader.batches(fetched)


class _FetchedBatches:
    """The batches that one response has for a partition, in place of aiokafka's `MemoryRecords`."""

    def __init__(self, fetched: bytes) -> None:
        self._fetched = fetched
        self._at = 0
        self._batch: _Batch | None = None
        self.compressed = any(_is_compressed(raw) for raw in self._split())
        """Whether its records may take more memory than was fetched."""

    def _split(self) -> Iterator[bytes]:
        at = 0
        while (end := self._end(at)) is not None:
            yield self._fetched[at : min(end, at + _HEADER.size)]
            at = end

    def _end(self, at: int) -> int | None:
        """Return where the batch at `at` ends. None if it was not fetched whole."""
        if len(self._fetched) - at < _COUNTED_AT:
            return None
        end: int = at + _COUNTED_AT + max(0, *_LENGTH.unpack_from(self._fetched, at + _LENGTH_AT))
        return end if end <= len(self._fetched) else None

    def size_in_bytes(self) -> int:
        """Return how much was fetched."""
        return len(self._fetched)

    def has_next(self) -> bool:
        """Return whether there is a further batch."""
        return self._end(self._at) is not None

    def next_batch(self) -> _Batch | None:
        """Return the next batch. Raise UnreadableBatch."""
        at, end = self._at, self._end(self._at)
        if end is None:
            return None
        self._batch, self._at = _Batch(memoryview(self._fetched)[at:end]), end
        return self._batch

    @property
    def has_rest(self) -> bool:
        """Whether the latest record has more bytes than were read of it."""
        return self._batch is not None and self._batch.stream.rest > 0

    def skip_rest(self) -> None:
        """Read over the rest of the latest record. Raise UnreadableBatch."""
        if self._batch is not None:
            self._batch.skip_rest()


def _is_compressed(header: bytes) -> bool:
    return len(header) < _HEADER.size or bool(_Header(*_HEADER.unpack(header)).attributes & _CODEC_MASK)


class _Header(NamedTuple):
    """The header of a batch."""

    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    first_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    records: int


class _Record(NamedTuple):
    """A record, as aiokafka's fetcher reads it."""

    offset: int
    timestamp: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    checksum: None = None


class _Batch:
    """A batch, in place of aiokafka's `DefaultRecordBatch`: an iterator of its records."""

    def __init__(self, raw: memoryview) -> None:
        if len(raw) < _HEADER.size or raw[_MAGIC_AT] != _VERSION:
            offset = int.from_bytes(raw[:8], "big", signed=True)
            raise UnreadableBatch("its batch has a format of Kafka before 0.11, or is damaged", offset)
        self._raw = raw
        self._header = header = _Header(*_HEADER.unpack_from(raw))
        self.base_offset, self.producer_id = header.base_offset, header.producer_id
        self.is_transactional = bool(header.attributes & DefaultRecordBase.TRANSACTIONAL_MASK)
        self.is_control_batch = bool(header.attributes & DefaultRecordBase.CONTROL_MASK)
        self.next_offset = header.base_offset + header.last_offset_delta + 1
        """The offset after the last record of the batch."""
        self.stream = _BatchBytes(_decompress(header.attributes & _CODEC_MASK, raw[_HEADER.size :]))
        self._left = header.records
        self._next = header.base_offset

    def validate_crc(self) -> bool:
        """Return whether the batch is as its producer has sent it."""
        return bool(
            calc_crc32c(self._raw[DefaultRecordBase.ATTRIBUTES_OFFSET :].tobytes()) == self._header.crc
        )

    def __iter__(self) -> _Batch:
        return self

    def __next__(self) -> _Record:
        if self._left <= 0:
            raise StopIteration
        record = self._read(self._read_record)
        self._left -= 1
        self._next = record.offset + 1
        return record

    def skip_rest(self) -> None:
        """Read over the rest of the latest record. Raise UnreadableBatch."""
        self._read(self.stream.skip_rest)

    def _read(self, read: Callable[[], T]) -> T:
        """Return the result of `read`. Every library has errors of its own for what it cannot decompress."""
        try:
            return read()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise UnreadableBatch(why, self._next, self.next_offset) from error

    def _read_record(self) -> _Record:
        self.stream.skip_rest()
        length = self.stream.varint()
        body = self.stream.take(min(length, _KEPT_BYTES))
        self.stream.rest = length - len(body)
        return self._parse(body, is_cut=length > len(body))

    def _parse(self, body: bytes, *, is_cut: bool) -> _Record:
        """Return the record whose bytes after its length are `body`, or begin with it if it `is_cut`."""
        header = self._header
        delta, at = _varint(body, 1)  # after the attributes, which have no meaning yet
        offset_delta, at = _varint(body, at)
        key, at = _field(body, at)
        value: bytes | None = b""
        headers: list[tuple[str, bytes | None]] = []
        if not is_cut:
            value, at = _field(body, at)
            headers = _headers(body, at)
        elif at + _VARINT_BYTES > len(body):
            key = None  # it alone is too large
        else:
            value, _ = _field(body, at)
        if is_cut:
            value = (value or b"")[:_CUT_BYTES].ljust(_CUT_BYTES)
        is_appended = bool(header.attributes & DefaultRecordBase.TIMESTAMP_TYPE_MASK)
        timestamp = header.max_timestamp if is_appended else header.first_timestamp + delta
        return _Record(header.base_offset + offset_delta, timestamp, int(is_appended), key, value, headers)


def _varint(body: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return a number in zigzag encoding, and where it ends. aiokafka's function may read behind the end."""
    number = body[at]
    if number < 0x80:
        return (number >> 1) ^ -(number & 1), at + 1
    number, shift, at = number & 0x7F, 7, at + 1
    while shift < 7 * _VARINT_BYTES:
        byte = body[at]
        number |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1), at
    raise ValueError("a number has more than 64 bits")


def _field(body: bytes, at: int) -> tuple[bytes | None, int]:
    """Return a key or a value, or what `body` has of it, and where it ends."""
    size, at = _varint(body, at)
    if size < -1:
        raise ValueError(f"a field has {size} bytes")
    return (None, at) if size == -1 else (body[at : at + size], at + size)


def _headers(body: bytes, at: int) -> list[tuple[str, bytes | None]]:
    count, at = _varint(body, at)
    headers = []
    for _ in range(min(count, _KEPT_HEADERS)):
        name, at = _field(body, at)
        value, at = _field(body, at)
        headers.append(((name or b"").decode(errors="replace"), value))
    if at != len(body) and count <= _KEPT_HEADERS:
        raise ValueError(f"the record has {len(body)} bytes, and its fields end at {at}")
    return headers


class _BatchBytes:
    """The bytes of a batch, which are decompressed when they are read."""

    def __init__(self, pieces: Iterator[bytes | memoryview]) -> None:
        self._pieces = pieces
        self._piece: bytes | memoryview = b""
        self._at = 0
        self.rest = 0
        """The number of bytes up to the next record."""

    def take(self, size: int) -> bytes:
        """Return the next bytes. Raise an error if there are fewer."""
        if size < 0:
            raise ValueError(f"a record has {size} bytes")
        begin, end = self._at, self._at + size
        if end <= len(self._piece):
            self._at = end
            return bytes(self._piece[begin:end])
        parts = []
        while (left := len(self._piece) - self._at) < size:
            parts.append(self._piece[self._at :])
            size -= left
            self._next()
        parts.append(self._piece[self._at : self._at + size])
        self._at += size
        return b"".join(parts)

    def skip_rest(self) -> None:
        """Read over the rest of a record."""
        while (left := len(self._piece) - self._at) < self.rest:
            self.rest -= left
            self._next()
        self._at += self.rest
        self.rest = 0

    def varint(self) -> int:
        """Return the next number."""
        if self._at + _VARINT_BYTES <= len(self._piece):
            value, self._at = _varint(self._piece, self._at)
            return value
        number = self.take(1)
        while number[-1] >= 0x80 and len(number) < _VARINT_BYTES:
            number += self.take(1)
        return _varint(number, 0)[0]

    def _next(self) -> None:
        self._piece, self._at = b"", 0
        self._piece = next(self._pieces, b"")
        if not self._piece:
            raise EOFError("its batch ends too early")


def _decompress(codec: int, raw: memoryview) -> Iterator[bytes | memoryview]:
    """Return the bytes of a batch, in pieces of limited size."""
    match codec:
        case DefaultRecordBase.CODEC_NONE:
            return iter([raw])
        case DefaultRecordBase.CODEC_GZIP:
            return _read_pieces(gzip.GzipFile(fileobj=io.BytesIO(raw)))
        case DefaultRecordBase.CODEC_SNAPPY:
            return _decompress_snappy(raw)
        case DefaultRecordBase.CODEC_LZ4:
            return _read_pieces(lz4.frame.LZ4FrameFile(io.BytesIO(raw)))
        case DefaultRecordBase.CODEC_ZSTD:
            options = {int(DecompressionParameter.window_log_max): _MEMORY_BITS}
            return _read_pieces(ZstdFile(io.BytesIO(raw), options=options))
    return _refuse(f"codec {codec} is unknown")


def _read_pieces(file: Any) -> Iterator[bytes]:
    return iter(functools.partial(file.read1, _PIECE_BYTES), b"")


def _refuse(why: str) -> Iterator[bytes]:
    raise ValueError(why)
    yield b""


def _decompress_snappy(raw: memoryview) -> Iterator[memoryview]:
    """Decompress the blocks of the format of Java and aiokafka, or the only block that librdkafka sends."""
    if bytes(raw[: len(_XERIAL)]) != _XERIAL:
        yield _decompress_block(raw)
        return
    at = _XERIAL_HEADER_BYTES
    while at < len(raw):
        (size,) = _LENGTH.unpack_from(raw, at)
        at += _LENGTH.size
        if not 0 < size <= len(raw) - at:
            raise ValueError(f"a block has {size} bytes, of which {len(raw) - at} are left")
        yield _decompress_block(raw[at : at + size])
        at += size


def _decompress_block(block: memoryview) -> memoryview:
    size = cramjam.snappy.decompress_raw_len(block)
    if size > 1 << _MEMORY_BITS:
        raise ValueError(f"a block has {size:,} bytes, more than {1 << _MEMORY_BITS:,}")
    return memoryview(cramjam.snappy.decompress_raw(block))
