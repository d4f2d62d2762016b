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
from forebay.log._topics import Catalog, Topic, TopicDeleted, TopicExists, TopicSettings
from forebay.log._writer import LogWriter
from forebay.log._writer_config import WriterConfig

__all__ = [
    "AppendGroup",
    "AppendResult",
    "BatchingProducer",
    "Catalog",
    "Contended",
    "DataLost",
    "FenceState",
    "Fenced",
    "Fencing",
    "LogWriter",
    "OffsetOutOfRange",
    "OutOfSequence",
    "ProducerConfig",
    "Topic",
    "TopicDeleted",
    "TopicExists",
    "TopicSettings",
    "UnknownTopic",
    "WriterConfig",
]
