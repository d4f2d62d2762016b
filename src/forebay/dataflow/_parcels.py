"""What travels between nodes, and how it lies in Quiver.

A parcel is a list of requests of one signal. In Quiver a request is a row: its bytes as they came, and how
many items are in them. The signal is Quiver's own, so that a segment holds requests of one signal.

Rejected: columns of spans, metrics and logs in Quiver. Decoding into columns takes ten times as long as
parsing, on the path of the sender; the OTLP exporter would have to encode everything again, and could only
send on what the columns know. Rejected too: the range of event times per request, which would cost as much as
half of the parsing. Segments carry the range of ingestion times.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from forebay.errors import ForebayError, LimitExceeded, Unavailable
from forebay.quiver import SegmentView

__all__ = [
    "SCHEMA",
    "AskedToWait",
    "Bytes",
    "Parcel",
    "Refused",
    "Sink",
    "join",
    "parcel_of",
    "pieces",
    "record_batch",
]

Bytes: TypeAlias = bytes | memoryview
BATCH_BYTES_MAX: Final = 240 * 1024 * 1024
"""Bytes of requests in one record batch; an entry of Quiver's WAL holds a little more."""
_ONE_OFFSET: Final = struct.Struct("<ii")

SCHEMA: Final = pa.schema(
    [pa.field("items", pa.int64(), nullable=False), pa.field("request", pa.binary(), nullable=False)]
)


@dataclass(frozen=True, slots=True)
class Parcel:
    """Requests of one signal."""

    signal: str
    requests: Sequence[Bytes]
    items: int
    """Spans, log records or metrics in all of them."""
    size: int
    """Bytes of all of them."""
    ingested_ms: int = 0
    """When the first of them came, 0 where it is coming now."""
    key: str = ""
    """The same for each delivery of the same parcel, so that a second one can replace the first. Empty where
    there is no second delivery."""


class Sink(Protocol):
    """Takes parcels."""

    async def take(self, parcel: Parcel) -> None:
        """Return when the parcel is safe. Raises `ForebayError`; `Refused` where trying again is useless."""
        ...


class Refused(ForebayError):
    """The destination will never take a part of it; it has the rest."""

    def __init__(self, message: str, *, hint: str = "", items: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.items = items
        """Spans, log records or metrics in that part."""


class AskedToWait(Unavailable):
    """The destination takes it later, and said when."""

    def __init__(self, message: str, wait_s: float) -> None:
        super().__init__(message, hint=f"it asks for {wait_s:g} s; then it is tried again")
        self.wait_s = wait_s


def join(requests: Sequence[Bytes], size_max: int) -> list[list[Bytes]]:
    """Consecutive requests in groups of at most `size_max` bytes; a larger one stands alone."""
    groups: list[list[Bytes]] = []
    size = 0
    for request in requests:
        if not groups or size + len(request) > size_max:
            groups.append([])
            size = 0
        groups[-1].append(request)
        size += len(request)
    return groups


def pieces(parcel: Parcel) -> Iterator[Parcel]:
    """The parcel, or several where it is more than a record batch holds, as a segment of a store may be."""
    if parcel.size <= BATCH_BYTES_MAX:
        yield parcel
        return
    items = parcel.items
    for requests in join(parcel.requests, BATCH_BYTES_MAX):
        yield replace(parcel, requests=requests, items=items, size=sum(map(len, requests)))
        items = 0  # only the sum counts later


def record_batch(parcels: Sequence[Parcel]) -> pa.RecordBatch:
    """Parcels as rows. A single request is not copied, several are copied once."""
    if len(parcels) == 1 and len(parcels[0].requests) == 1:
        [parcel] = parcels
        [request] = parcel.requests
        return _rows([parcel.items], _ONE_OFFSET.pack(0, len(request)), request)
    requests = [request for parcel in parcels for request in parcel.requests]
    ends = list(itertools.accumulate(map(len, requests), initial=0))
    # Only the sum counts later; a parcel of several requests puts its items into its first row.
    items = [parcel.items if index == 0 else 0 for parcel in parcels for index in range(len(parcel.requests))]
    return _rows(items, np.array(ends, np.int32).tobytes(), b"".join(requests))


def _rows(items: list[int], offsets: bytes, data: Bytes) -> pa.RecordBatch:
    if len(data) > BATCH_BYTES_MAX:
        raise LimitExceeded("BATCH_BYTES_MAX", limit=BATCH_BYTES_MAX, actual=len(data))
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    requests = pa.Array.from_buffers(pa.binary(), len(items), buffers)
    # `pa.array` of a list would import pandas at the first request, and everybody would wait for that.
    counts = pa.Array.from_buffers(pa.int64(), len(items), [None, pa.py_buffer(np.array(items, np.int64))])
    return pa.RecordBatch.from_arrays([counts, requests], schema=SCHEMA)


def parcel_of(view: SegmentView, giver: str) -> Parcel:
    """A segment as a parcel. Its requests are views into the mapped file."""
    requests: list[Bytes] = []
    items = size = 0
    for batch in view.batches():
        found = _views(batch.column("request"))
        requests += found
        size += sum(map(len, found))
        items += _sum(batch.column("items"))
    meta = view.meta
    return Parcel(
        meta.signal,
        requests,
        items,
        size,
        meta.ingested_ms[0],
        # The number alone would let a file of a store that was made anew replace a file of the old one.
        f"{giver}-{meta.segment:012d}-{meta.identity}",
    )


def _sum(column: pa.Array) -> int:
    """As `to_numpy().sum()`, which would import pandas."""
    values = np.frombuffer(column.buffers()[1], np.int64)
    return int(values[column.offset : column.offset + len(column)].sum())


def _views(column: pa.Array) -> list[memoryview]:
    """The values without copying them, as `to_pylist` would."""
    _, offset_buffer, data = column.buffers()
    begin = column.offset
    offsets = np.frombuffer(offset_buffer, np.int32)[begin : begin + len(column) + 1].tolist()
    whole = memoryview(data) if data is not None else memoryview(b"")
    return [whole[first:last] for first, last in itertools.pairwise(offsets)]
