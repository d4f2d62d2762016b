"""Fetched records as JSON, msgpack and Arrow.

JSON and msgpack with `records` make an object per record, since that is what they are for: people, scripts,
other languages. Frames and Arrow pass columns on.

Making an object per record holds the event loop: for 16 MiB of small ones a tenth of a second and more. So a
large answer is encoded in pieces, with a turn for others between them. A thread would not do better: making
objects needs the lock of the interpreter all the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import msgspec
import pyarrow as pa

from forebay.broker._errors import type_of
from forebay.broker._http import Response
from forebay.errors import ForebayError
from forebay.formats import bytes_batch
from forebay.formats.bytes_batch import _offsets
from forebay.formats.http_messages import (
    ARROW,
    ARROW_RESULTS_KEY,
    ConsumeBatch,
    ConsumePartition,
    ConsumeRecord,
    ConsumeRecordPacked,
    ConsumeResponse,
    ConsumeResponsePacked,
    ConsumeResult,
    ConsumeResultPacked,
    as_text_or_bytes,
)
from forebay.log import RECORD_SCHEMA, Fetched, FetchedBatch

__all__ = [
    "arrow_response",
    "batch_size",
    "is_large",
    "json_records",
    "json_results",
    "large_json",
    "packed_results",
]

PIECE_RECORDS: Final = 2_000
PIECE_BYTES: Final = 1024 * 1024
"""Records, and bytes of values and keys, that are encoded without a turn for others: some 2 ms of work."""

_json: Final = msgspec.json.Encoder()
_msgpack: Final = msgspec.msgpack.Encoder()
Answers = Sequence[Fetched | ForebayError]
T = TypeVar("T")
R = TypeVar("R", ConsumeResult, ConsumeResultPacked)


def json_results(wanted: Sequence[ConsumePartition], answers: Answers) -> list[ConsumeResult]:
    """A result per partition, with records."""
    results = []
    for each, answer in zip(wanted, answers, strict=True):
        result = _result(ConsumeResult, each, answer)
        if isinstance(answer, Fetched):
            result.records = [record for batch in answer.batches for record in json_records(batch)]
        results.append(result)
    return results


def packed_results(
    wanted: Sequence[ConsumePartition], answers: Answers, *, frames: bool
) -> list[ConsumeResultPacked]:
    """A result per partition, with records or frames."""
    results = []
    for each, answer in zip(wanted, answers, strict=True):
        result = _result(ConsumeResultPacked, each, answer)
        if isinstance(answer, Fetched) and frames:
            result.batches = [_frame(batch) for batch in answer.batches]
        elif isinstance(answer, Fetched):
            result.records = [record for batch in answer.batches for record in _packed_records(batch)]
        results.append(result)
    return results


def arrow_response(wanted: Sequence[ConsumePartition], answers: Answers) -> Response:
    """One IPC stream with the records of all partitions; where to read on is in the schema's metadata."""
    results = [_result(ConsumeResult, each, answer) for each, answer in zip(wanted, answers, strict=True)]
    about = msgspec.json.encode(ConsumeResponse(results, len(results), 0))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, RECORD_SCHEMA.with_metadata({ARROW_RESULTS_KEY: about})) as writer:
        for answer in answers:
            assert isinstance(answer, Fetched)
            for batch in answer.batches:
                writer.write_batch(batch.to_arrow())
    return Response(200, sink.getvalue().to_pybytes(), ARROW)


# -- large answers


def is_large(answers: Answers) -> bool:
    """Whether an object per record would hold up others."""
    batches = [batch for answer in answers if isinstance(answer, Fetched) for batch in answer.batches]
    return sum(map(len, batches)) > PIECE_RECORDS or sum(map(batch_size, batches)) > PIECE_BYTES


async def large_json(wanted: Sequence[ConsumePartition], answers: Answers, errors: int) -> bytearray:
    """`ConsumeResponse` in JSON, piece by piece in one buffer: to join pieces would hold up others, too."""
    before, after = _json.encode(ConsumeResponse([], len(answers) - errors, errors)).split(b"]", 1)
    body = bytearray(before)
    for each, answer in zip(wanted, answers, strict=True):
        result = _result(ConsumeResult, each, answer)
        result.records = [] if isinstance(answer, Fetched) else None
        _json.encode_into(result, body, -1)
        if isinstance(answer, Fetched) and answer.batches:
            del body[-len(b"[]}") :]
            first = len(body)
            async for records in _in_pieces(answer.batches, json_records):
                start = len(body)
                _json.encode_into(records, body, -1)
                if start > first:
                    body[start] = ord(",")
                body.pop()
            body += b"]}"
        body += b","
    body[-1:] = b"]" + after
    return body


async def large_packed(wanted: Sequence[ConsumePartition], answers: Answers, errors: int) -> bytearray:
    """`ConsumeResponsePacked` with records, in the same way."""
    empty = _packed_head(0)
    message = ConsumeResponsePacked([], len(answers) - errors, errors)
    before, after = _msgpack.encode(message).split(empty, 1)
    body = bytearray(before + _packed_head(len(answers)))
    for each, answer in zip(wanted, answers, strict=True):
        result = _result(ConsumeResultPacked, each, answer)
        result.records = [] if isinstance(answer, Fetched) else None
        _msgpack.encode_into(result, body, -1)
        if isinstance(answer, Fetched):
            body[-len(empty) :] = _packed_head(len(answer))
            async for records in _in_pieces(answer.batches, _packed_records):
                start = len(body)
                _msgpack.encode_into(records, body, -1)
                del body[start : start + len(_packed_head(len(records)))]
    body += after
    return body


async def _in_pieces(
    batches: Sequence[FetchedBatch], records: Callable[[FetchedBatch], list[T]]
) -> AsyncIterator[list[T]]:
    """The records in lists of about a piece; others have their turn after each of them."""
    waiting: list[T] = []
    size = 0
    for batch in batches:
        for part in _parts(batch):
            waiting += records(part)
            size += batch_size(part)
            if len(waiting) >= PIECE_RECORDS or size >= PIECE_BYTES:
                yield waiting
                waiting, size = [], 0
                await asyncio.sleep(0)
    if waiting:
        yield waiting


def _parts(batch: FetchedBatch) -> Iterator[FetchedBatch]:
    """The batch in parts of about a piece."""
    count = min(PIECE_RECORDS, max(1, PIECE_BYTES * len(batch) // max(1, batch_size(batch))))
    for start in range(batch.start_offset, batch.end_offset + 1, count):
        yield batch.part(start, min(count, batch.end_offset + 1 - start))


def _packed_head(count: int) -> bytes:
    """The beginning of a list in msgpack."""
    if count < 1 << 4:
        return bytes([0x90 | count])
    return b"\xdc" + count.to_bytes(2, "big") if count < 1 << 16 else b"\xdd" + count.to_bytes(4, "big")


def batch_size(batch: FetchedBatch) -> int:
    """Bytes of values and keys."""
    columns = batch.batch
    size = _data_bytes(columns.values)
    return size if columns.keys is None else size + _data_bytes(columns.keys)


def _data_bytes(column: pa.BinaryArray) -> int:
    offsets = _offsets(column)
    return int(offsets[-1]) - int(offsets[0])


# -- parts of an answer


def _result(kind: type[R], each: ConsumePartition, answer: Fetched | ForebayError) -> R:
    if isinstance(answer, ForebayError):
        return kind(
            topic=each.topic,
            partition=each.partition,
            ok=False,
            error_type=type_of(answer),
            error=answer.message,
            hint=answer.hint or None,
            earliest_offset=getattr(answer, "earliest", None),
            high_watermark=getattr(answer, "next", None),
        )
    return kind(
        topic=each.topic,
        partition=each.partition,
        ok=True,
        next_offset=answer.next_offset,
        high_watermark=answer.high_watermark,
        earliest_offset=answer.earliest,
    )


def _frame(batch: FetchedBatch) -> ConsumeBatch:
    return ConsumeBatch(
        start_offset=batch.start_offset,
        count=len(batch),
        timestamp_ms=batch.time_ms,
        frame=memoryview(bytes_batch.encode_batch(batch.batch)),
    )


def json_records(batch: FetchedBatch) -> list[ConsumeRecord]:
    """The records of a batch as JSON has them."""
    return [
        ConsumeRecord(offset=offset, timestamp_ms=time, value=value, key=key, headers=headers)
        for offset, time, value, key, headers in _rows(batch, as_text_or_bytes)
    ]


def _packed_records(batch: FetchedBatch) -> list[ConsumeRecordPacked]:
    return [
        ConsumeRecordPacked(offset=offset, timestamp_ms=time, value=value, key=key, headers=headers)
        for offset, time, value, key, headers in _rows(batch, memoryview)
    ]


def _rows(batch: FetchedBatch, shown: Callable[[bytes], Any]) -> list[tuple[int, int, Any, Any, Any]]:
    columns, count = batch.batch, len(batch)
    times = columns.timestamps_ms
    return [
        (
            batch.start_offset + number,
            batch.time_ms if times is None else int(times[number]),
            shown(value),
            None if key is None else shown(key),
            None if not headers else [(each["key"], _shown(each["value"], shown)) for each in headers],
        )
        for number, (value, key, headers) in enumerate(
            zip(
                columns.values.to_pylist(),
                [None] * count if columns.keys is None else columns.keys.to_pylist(),
                [None] * count if columns.headers is None else columns.headers.to_pylist(),
                strict=True,
            )
        )
    ]


def _shown(value: bytes | None, shown: Callable[[bytes], Any]) -> Any:
    return None if value is None else shown(value)
