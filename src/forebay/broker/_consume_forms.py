"""Fetched records as JSON, msgpack and Arrow.

JSON and msgpack with `records` make an object per record, since that is what they are for: people, scripts,
other languages. Frames and Arrow pass columns on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import pyarrow as pa

from forebay.broker._errors import type_of
from forebay.broker._http import Response
from forebay.errors import ForebayError
from forebay.formats import bytes_batch
from forebay.formats.http_messages import (
    ARROW,
    ARROW_RESULTS_KEY,
    ConsumeBatch,
    ConsumePartition,
    ConsumeRecord,
    ConsumeRecordPacked,
    ConsumeResponse,
    ConsumeResult,
    ConsumeResultPacked,
    as_text_or_bytes,
)
from forebay.log import RECORD_SCHEMA, Fetched, FetchedBatch

__all__ = ["arrow_response", "json_records", "json_results", "packed_results"]

Answers = Sequence[Fetched | ForebayError]
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
