"""What travels between nodes, and how it lies in Quiver.

A parcel is a list of requests of one signal. In Quiver a request is a row: its bytes as they came, and how
many items are in them. The signal is Quiver's own, so that a segment holds requests of one signal.

Rejected: columns of spans, metrics and logs in Quiver. Decoding into columns takes ten times as long as
parsing, on the path of the sender; the OTLP exporter would have to encode everything again, and could only
send on what the columns know. Rejected too: the range of event times per request, which would cost as much as
half of the parsing. Segments carry the range of ingestion times.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import pyarrow as pa

from forebay.errors import ForebayError
from forebay.quiver import SegmentView

__all__ = ["SCHEMA", "Parcel", "Refused", "Sink", "parcel_of", "record_batch"]

SCHEMA: Final = pa.schema(
    [pa.field("items", pa.int64(), nullable=False), pa.field("request", pa.binary(), nullable=False)]
)


@dataclass(frozen=True, slots=True)
class Parcel:
    """Requests of one signal."""

    signal: str
    requests: Sequence[bytes]
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


def record_batch(parcels: Sequence[Parcel]) -> pa.RecordBatch:
    """Parcels as rows."""
    requests = [request for parcel in parcels for request in parcel.requests]
    # Only the sum counts later; a parcel of several requests puts its items into the first row.
    items = [parcel.items if index == 0 else 0 for parcel in parcels for index in range(len(parcel.requests))]
    return pa.record_batch([pa.array(items, pa.int64()), pa.array(requests, pa.binary())], schema=SCHEMA)


def parcel_of(view: SegmentView, giver: str) -> Parcel:
    """A segment as a parcel."""
    requests: list[bytes] = []
    items = 0
    for batch in view.batches():
        requests.extend(batch.column("request").to_pylist())
        items += sum(batch.column("items").to_pylist())
    meta = view.meta
    # The checksums tell stores apart that began to count anew; the number alone would let a file of the new
    # one replace a file of the old one.
    digest = hashlib.blake2b(digest_size=6)
    for part in meta.parts:
        digest.update(part.crc.to_bytes(4, "little"))
    digest.update(repr(meta.ingested_ms).encode())
    return Parcel(
        meta.signal,
        requests,
        items,
        sum(map(len, requests)),
        meta.ingested_ms[0],
        f"{giver}-{meta.segment:012d}-{digest.hexdigest()}",
    )
