"""The messages of the broker's HTTP door: what a request holds, what an answer holds, and where they go.

    JSON      POST /produce   {"topic_partitions": [{"topic", "partition", "records": ["a", {"base64": ""}]}]}
                          ->  {"results": [{"topic", "partition", "ok", "start_offset", "end_offset", "count",
                              "index_key", "wal_uri"}], "success_count", "error_count"}
    JSON      POST /consume   {"topic_partitions": [{"topic", "partition", "fetch_offset",
                              "partition_max_bytes"}], "max_wait_ms", "min_bytes", "max_bytes"}
                          ->  {"results": [{"topic", "partition", "ok", "records": [{"offset", "timestamp_ms",
                              "value", "key", "headers"}], "next_offset", "high_watermark",
                              "earliest_offset"}], "success_count", "error_count"}

    msgpack   the same field names; bytes are a bin where JSON has a string or {"base64": ...}. In place of
              `records` a batch may hold `frame`, a bin with one whole `bytes-batch-v1`; an answer to
              /consume with `"frames": true` in the request holds `batches` in place of `records`
    Arrow     POST /produce?topic=T&partition=N with one IPC stream of columns value[, key, timestamp,
              headers]; /consume answers an IPC stream with the front door's columns, and in the schema's
              metadata, under `ARROW_RESULTS_KEY`, the JSON of a `ConsumeResponse` without records

Field names are those of the specification. Optional fields are ours: keys, times and headers as columns
beside `records`, `producer_id` with `sequence` for repeatable appends, `epoch` for fenced ones. Unknown
fields are refused, so that a misspelt option is an error and not a silence.

Results use None for what is not there and leave it out; a failed batch has `ok: false`, `error_type` and
`error`. Everything else that goes wrong is an `ErrorBody`.

Bytes of a msgpack message are memoryviews into it: no copy is made of records that are only passed on.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from forebay.formats._http_fields import Bytes, Number, Offset, Partition, ProducerId, TimeMs, TopicName
from forebay.formats.http_admin import (
    CommitRequest,
    CommittedOffset,
    CompactionRequest,
    CompactionResponse,
    CompactionRun,
    CompactionState,
    CompactionStates,
    Deleted,
    ExplainResponse,
    FenceRequest,
    FenceView,
    GroupList,
    GroupMemberView,
    GroupPartition,
    GroupView,
    OffsetsView,
    ResetRequest,
    ResetResponse,
    ResetResult,
    RetentionRequest,
    RetentionResponse,
    TopicAlter,
    TopicCreate,
    TopicList,
    TopicSettingsView,
    TopicView,
    TrimRequest,
    TrimView,
    UnfenceRequest,
)
from forebay.formats.http_inspect import CompactionUnderWay, CostAt, CostView, ObjectsView, ObjectView

__all__ = [
    "ARROW",
    "ARROW_RESULTS_KEY",
    "BACKPRESSURE",
    "JSON",
    "MSGPACK",
    "OUTCOME_UNKNOWN",
    "PATHS",
    "REQUEST_ID",
    "SSE",
    "Base64",
    "CommitRequest",
    "CommittedOffset",
    "CompactionRequest",
    "CompactionResponse",
    "CompactionRun",
    "CompactionState",
    "CompactionStates",
    "CompactionUnderWay",
    "ConsumeBatch",
    "ConsumePartition",
    "ConsumeRecord",
    "ConsumeRecordPacked",
    "ConsumeRequest",
    "ConsumeResponse",
    "ConsumeResponsePacked",
    "ConsumeResult",
    "ConsumeResultPacked",
    "CostAt",
    "CostView",
    "Deleted",
    "ErrorBody",
    "ErrorDetail",
    "ExplainResponse",
    "FenceRequest",
    "FenceView",
    "GroupList",
    "GroupMemberView",
    "GroupPartition",
    "GroupView",
    "HealthResponse",
    "ObjectView",
    "ObjectsView",
    "Offset",
    "OffsetsView",
    "Partition",
    "ProducePartition",
    "ProducePartitionPacked",
    "ProduceRequest",
    "ProduceRequestPacked",
    "ProduceResponse",
    "ProduceResult",
    "ReadyResponse",
    "ResetRequest",
    "ResetResponse",
    "ResetResult",
    "RetentionRequest",
    "RetentionResponse",
    "TailEvent",
    "TextOrBytes",
    "TopicAlter",
    "TopicCreate",
    "TopicList",
    "TopicName",
    "TopicSettingsView",
    "TopicView",
    "TrimRequest",
    "TrimView",
    "UnfenceRequest",
    "as_text_or_bytes",
]

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
ARROW: Final = "application/vnd.apache.arrow.stream"
SSE: Final = "text/event-stream"
REQUEST_ID: Final = "X-Request-Id"
"""Header that names a request: taken over from the caller, or made, and always answered."""
ARROW_RESULTS_KEY: Final = "forebay.results"
BACKPRESSURE: Final = "BackPressureRejected"
"""`error_type` of a batch that was refused because too much is under way. Certainly not appended."""
OUTCOME_UNKNOWN: Final = "OutcomeUnknown"
"""`error_type` of a batch that may or may not have been appended. Repeat it only with a producer id."""


class PATHS:
    """Where each resource is. A part in braces stands for a name or a number."""

    HEALTH: Final = "/health"
    READY: Final = "/ready"
    METRICS: Final = "/metrics"
    METRICS_PROMETHEUS: Final = "/metrics/prometheus"
    OPENAPI: Final = "/openapi.json"
    PRODUCE: Final = "/produce"
    CONSUME: Final = "/consume"
    TAIL: Final = "/tail"
    """Server-sent events. Query: topic, partition, from (earliest, latest, an offset, -N for the last N)."""
    TOPICS: Final = "/topics"
    TOPIC: Final = "/topics/{topic}"
    OFFSETS: Final = "/topics/{topic}/partitions/{partition}/offsets"
    """Query: time_ms asks for the first offset from that time on, answered as `at`."""
    TRIM: Final = "/topics/{topic}/partitions/{partition}/trim"
    EXPLAIN: Final = "/topics/{topic}/partitions/{partition}/explain"
    """Query: offset."""
    FENCE: Final = "/topics/{topic}/partitions/{partition}/fence"
    UNFENCE: Final = "/topics/{topic}/partitions/{partition}/unfence"
    OBJECTS: Final = "/topics/{topic}/partitions/{partition}/objects"
    """Query: from, an offset; limit."""
    GROUPS: Final = "/groups"
    GROUP: Final = "/groups/{group}"
    GROUP_OFFSETS: Final = "/groups/{group}/offsets"
    GROUP_RESET: Final = "/groups/{group}/reset"
    COMPACTION: Final = "/compaction"
    RETENTION: Final = "/retention"
    COST: Final = "/cost"
    CONSOLE: Final = "/console"


class Base64(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes that are no UTF-8 text."""

    base64: bytes


TextOrBytes: TypeAlias = str | Base64
"""How JSON writes bytes: as text where they are UTF-8, as `{"base64": ...}` otherwise."""


def as_text_or_bytes(data: bytes) -> TextOrBytes:
    """The JSON form of some bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return Base64(data)


# -- produce


class _Batch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    topic: TopicName
    partition: Partition
    timestamps_ms: list[TimeMs] | None = None
    """Time of each record; without it all have the time of their append."""
    producer_id: ProducerId | None = None
    """With `sequence`: a repetition of the same batch is recognised and appended once."""
    sequence: Number | None = None
    """Number of this batch among those of the producer to this partition: 0, 1, 2 and so on."""
    epoch: Number | None = None
    """Fencing epoch of the writer."""


class ProducePartition(_Batch, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Records for one partition, in JSON."""

    records: Annotated[list[TextOrBytes], Meta(min_length=1)]
    keys: list[TextOrBytes | None] | None = None
    """One per record."""
    headers: list[list[tuple[str, TextOrBytes | None]] | None] | None = None
    """One list of [name, value] per record."""


class ProduceRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /produce in JSON."""

    topic_partitions: Annotated[list[ProducePartition], Meta(min_length=1)]


class ProducePartitionPacked(_Batch, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Records for one partition, in msgpack: either `records` or `frame`."""

    records: Annotated[list[memoryview], Meta(min_length=1)] | None = None
    keys: list[memoryview | None] | None = None
    headers: list[list[tuple[str, memoryview | None]] | None] | None = None
    frame: memoryview | None = None
    """One `bytes-batch-v1`, which brings its own keys, times and headers."""


class ProduceRequestPacked(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /produce in msgpack."""

    topic_partitions: Annotated[list[ProducePartitionPacked], Meta(min_length=1)]


class ProduceResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What became of one batch."""

    topic: str
    partition: int
    ok: bool
    start_offset: int | None = None
    end_offset: int | None = None
    count: int | None = None
    index_key: str | None = None
    wal_uri: str | None = None
    duplicate: bool = False
    """A repetition: the offsets are those of the first time, nothing was appended now."""
    error_type: str | None = None
    """`BackPressureRejected`, `OutcomeUnknown`, or the name of another error. All but `OutcomeUnknown` say
    that nothing was appended."""
    error: str | None = None
    hint: str | None = None


class ProduceResponse(msgspec.Struct):
    """Answer of POST /produce. 200: all batches succeeded; 503: all met back-pressure; 409: other ends."""

    results: list[ProduceResult]
    success_count: int
    error_count: int


# -- consume


class ConsumePartition(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """From where to read one partition."""

    topic: TopicName
    partition: Partition
    fetch_offset: Offset
    """First offset wanted. The first record of a log has offset 1."""
    partition_max_bytes: Bytes | None = None
    """Most bytes of this partition, unless its first record is larger."""


class ConsumeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of POST /consume, in JSON or msgpack."""

    topic_partitions: Annotated[list[ConsumePartition], Meta(min_length=1)]
    max_wait_ms: Annotated[int, Meta(ge=0, le=(1 << 31))] = 0
    """Milliseconds to wait for records where there are fewer than `min_bytes`, and no partition has more than
    its bounds let it give."""
    min_bytes: Annotated[int, Meta(ge=0, le=(1 << 40))] = 1
    """Bytes worth an answer before the time is up. 0: never wait."""
    max_bytes: Bytes | None = None
    """Most bytes of all partitions together, unless the first record is larger."""
    frames: bool = False
    """Answer whole `bytes-batch-v1` frames. Only where the answer is msgpack."""


class ConsumeRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One record, in JSON."""

    offset: int
    timestamp_ms: int
    value: TextOrBytes
    key: TextOrBytes | None = None
    headers: list[tuple[str, TextOrBytes | None]] | None = None


class ConsumeRecordPacked(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One record, in msgpack."""

    offset: int
    timestamp_ms: int
    value: memoryview
    key: memoryview | None = None
    headers: list[tuple[str, memoryview | None]] | None = None


class ConsumeBatch(msgspec.Struct, kw_only=True):
    """Records with consecutive offsets, as one frame."""

    start_offset: int
    count: int
    timestamp_ms: int
    """Time of the append: that of every record without a time of its own."""
    frame: memoryview


class _ConsumeResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    topic: str
    partition: int
    ok: bool
    next_offset: int | None = None
    """Where to read on."""
    high_watermark: int | None = None
    """One past the last record known to be written."""
    earliest_offset: int | None = None
    """First offset that can be read."""
    error_type: str | None = None
    error: str | None = None
    hint: str | None = None


class ConsumeResult(_ConsumeResult, kw_only=True, omit_defaults=True):
    """The records of one partition, in JSON. A failed one has no `records`."""

    records: list[ConsumeRecord] | None = None


class ConsumeResponse(msgspec.Struct):
    """Answer of POST /consume in JSON. 200: all partitions succeeded; 409: one or more failed."""

    results: list[ConsumeResult]
    success_count: int
    error_count: int


class ConsumeResultPacked(_ConsumeResult, kw_only=True, omit_defaults=True):
    """The records of one partition, in msgpack: `records`, or `batches` where frames were asked for."""

    records: list[ConsumeRecordPacked] | None = None
    batches: list[ConsumeBatch] | None = None


class ConsumeResponsePacked(msgspec.Struct):
    """Answer of POST /consume in msgpack."""

    results: list[ConsumeResultPacked]
    success_count: int
    error_count: int


class TailEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`data` of an event of GET /tail: one record. The event's `id` is its offset."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    value: TextOrBytes
    key: TextOrBytes | None = None
    headers: list[tuple[str, TextOrBytes | None]] | None = None


# -- errors, health


class ErrorDetail(msgspec.Struct):
    """What happened, what to do, and which request it was."""

    type: str
    message: str
    hint: str
    request_id: str


class ErrorBody(msgspec.Struct):
    """Body of every answer that is an error as a whole."""

    error: ErrorDetail


class HealthResponse(msgspec.Struct, kw_only=True):
    """Answer of GET /health."""

    status: Literal["ok"]
    broker_id: str
    host: str
    port: int
    started_at_ms: int


class ReadyResponse(msgspec.Struct, kw_only=True):
    """Answer of GET /ready: 200 where requests can be served, 503 where not."""

    ready: bool
    broker_id: str
    roles: list[str]
    reasons: list[str]
