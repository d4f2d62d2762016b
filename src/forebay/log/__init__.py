"""Leaderless topics and partitions."""

from forebay.log._append import AppendGroup, AppendResult
from forebay.log._batching import BatchingProducer, ProducerConfig
from forebay.log._errors import (
    Contended,
    DataLost,
    Fenced,
    OffsetOutOfRange,
    OutOfSequence,
    UnknownTopic,
)
from forebay.log._fencing import FenceState, Fencing
from forebay.log._fetched import Fetched, FetchedBatch, ReaderConfig, ReadRequest
from forebay.log._reader import LogReader
from forebay.log._resolve import PartitionOffsets
from forebay.log._schema import RECORD_SCHEMA
from forebay.log._tail_cache import MemoryTailCache, TailCache, TailCacheConfig
from forebay.log._topics import Catalog, Topic, TopicDeleted, TopicExists, TopicSettings
from forebay.log._writer import LogWriter
from forebay.log._writer_config import WriterConfig

__all__ = [
    "RECORD_SCHEMA",
    "AppendGroup",
    "AppendResult",
    "BatchingProducer",
    "Catalog",
    "Contended",
    "DataLost",
    "FenceState",
    "Fenced",
    "Fencing",
    "Fetched",
    "FetchedBatch",
    "LogReader",
    "LogWriter",
    "MemoryTailCache",
    "OffsetOutOfRange",
    "OutOfSequence",
    "PartitionOffsets",
    "ProducerConfig",
    "ReadRequest",
    "ReaderConfig",
    "TailCache",
    "TailCacheConfig",
    "Topic",
    "TopicDeleted",
    "TopicExists",
    "TopicSettings",
    "UnknownTopic",
    "WriterConfig",
]
