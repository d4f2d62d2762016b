"""The Arrow streams inside one gRPC stream: one per table, each with its schema and dictionaries.

**State.** The first payload of a table begins with a schema; those that follow have only what is new, so that
none of them can be left out. Whatever goes wrong in reading one leaves dictionaries of which nobody knows
what is in them: `StreamBroken`, and the gRPC stream has to end. The sender begins a new one.

**Bounds.** A payload is measured before Arrow reads it. What all payloads of a batch become, and what all
dictionaries hold, is limited; the size of a payload itself is limited by gRPC. After reading, everything is
validated in full, because Arrow believes what it reads.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa

from forebay.dataflow._otap._payloads import ALLOWED, PayloadType
from forebay.dataflow._otap.otap_pb2 import Batch, Payload
from forebay.errors import FormatError, LimitExceeded
from forebay.formats.arrow_messages import DICTIONARY, RECORDS, SCHEMA, message_facts

__all__ = ["PayloadStreams", "StreamBroken"]

DICTIONARY_BYTES_MAX: Final = 32 * 1024 * 1024
"""Bytes of all dictionaries of one gRPC stream."""
PAYLOAD_MESSAGES_MAX: Final = 1_024
"""Arrow messages in one payload."""
SCHEMA_FIELDS_MAX: Final = 256
"""Columns of a table, those inside of others counted."""

# Tables are small; threads of Arrow would cost more than they do.
_OPTIONS: Final = pa.ipc.IpcReadOptions(use_threads=False)


class StreamBroken(FormatError):
    """A payload that cannot be read; nor can any that follows it in the same stream."""


class PayloadStreams:
    """Reads the payloads of one gRPC stream, batch after batch."""

    def __init__(
        self, signal: str, unpacked_bytes_max: int, reserve: Callable[[int], None] = lambda _: None
    ) -> None:
        self._allowed = ALLOWED[signal]
        self._signal = signal
        self._unpacked_bytes_max = unpacked_bytes_max
        self._reserve = reserve
        self._streams: dict[int, _Stream] = {}
        self.dictionary_bytes = 0
        """Held by all dictionaries now."""

    def read(self, batch: Batch) -> dict[PayloadType, pa.RecordBatch]:
        """The tables of a batch. Raises `StreamBroken` and `LimitExceeded`; both end the stream."""
        tables: dict[PayloadType, pa.RecordBatch] = {}
        left = self._unpacked_bytes_max
        for payload in batch.payloads:
            if payload.type not in self._allowed or payload.type in tables:
                raise StreamBroken(
                    f"a payload of type {payload.type} among {self._signal}",
                    hint="each table of the signal at most once",
                )
            kind = PayloadType(payload.type)
            stream = self._streams.get(kind)
            if stream is None or stream.schema_id != payload.schema_id:
                stream = self._streams[kind] = _Stream(payload.schema_id)
            try:
                left -= stream.measure(payload, left)
                self._count_dictionaries()
                tables[kind] = stream.read(payload)
            except (pa.ArrowException, ValueError, TypeError, OSError, KeyError) as error:
                text = str(error).replace("\n", " ")[:200]
                raise StreamBroken(f"{kind.name}: {text}", hint="send Arrow IPC streams") from error
        return tables

    def _count_dictionaries(self) -> None:
        total = sum(sum(each.dictionaries.values()) for each in self._streams.values())
        if total > DICTIONARY_BYTES_MAX:
            raise LimitExceeded(
                "DICTIONARY_BYTES_MAX", limit=DICTIONARY_BYTES_MAX, actual=total, hint="begin a new stream"
            )
        self._reserve(total - self.dictionary_bytes)
        self.dictionary_bytes = total


class _Stream:
    """One table: a reader that is fed payload by payload."""

    def __init__(self, schema_id: str) -> None:
        self.schema_id = schema_id
        self.dictionaries: dict[int, int] = {}
        self._source = _Source()
        self._reader: Any = None

    def measure(self, payload: Payload, most: int) -> int:
        """Bytes that the payload becomes; its dictionaries are noted."""
        total = 0
        batches = schemas = 0
        for number, facts in enumerate(message_facts(payload.record)):
            total += facts.size
            if total > most or number >= PAYLOAD_MESSAGES_MAX:
                name, limit = (
                    ("max_request_size", most)
                    if total > most
                    else ("PAYLOAD_MESSAGES_MAX", PAYLOAD_MESSAGES_MAX)
                )
                raise LimitExceeded(name, limit=limit, actual=max(total, number), hint="send smaller batches")
            if facts.kind == DICTIONARY:
                before = self.dictionaries.get(facts.dictionary, 0) if facts.is_delta else 0
                self.dictionaries[facts.dictionary] = before + facts.size
            batches += facts.kind == RECORDS
            if facts.kind == SCHEMA:
                # A stream may also begin anew under its old name.
                schemas += 1
                self.dictionaries.clear()
                self._reader = None
        if batches != 1 or schemas > 1 or (self._reader is None) != bool(schemas):
            raise ValueError(f"{batches} record batches and {schemas} schemas in a payload")
        return total

    def read(self, payload: Payload) -> pa.RecordBatch:
        """The record batch of the payload."""
        self._source.feed(payload.record)
        if self._reader is None:
            self._reader = pa.ipc.open_stream(self._source, options=_OPTIONS)
            _check_fields(self._reader.schema)
        try:
            batch = self._reader.read_next_batch()
        except StopIteration:
            raise ValueError("no record batch in a payload") from None
        batch.validate(full=True)
        return batch


class _Source(io.RawIOBase):
    """A file that has only what was fed last."""

    def __init__(self) -> None:
        self._data = b""
        self._at = 0

    def feed(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        end = len(self._data) if size is None or size < 0 else self._at + size
        found = self._data[self._at : end]
        self._at += len(found)
        return found


def _check_fields(schema: pa.Schema) -> None:
    waiting = [field.type for field in schema]
    for number, kind in enumerate(waiting):
        if number >= SCHEMA_FIELDS_MAX:
            raise ValueError(f"more than {SCHEMA_FIELDS_MAX} columns")
        waiting.extend(kind.field(index).type for index in range(kind.num_fields))
    if len(set(schema.names)) != len(schema.names):
        raise ValueError("two columns of one name")
