"""Leaderless topics and partitions.

What reads is loaded here; what writes, and what looks after a log, when it is first asked for. Every query of
Spark starts processes that only read, and they pay for all that they load.
"""

import importlib
import typing

from forebay.formats.record_columns import RECORD_SCHEMA
from forebay.formats.record_routing import partition_of, route
from forebay.log._errors import (
    AnotherLog,
    Contended,
    DataLost,
    Fenced,
    OffsetOutOfRange,
    OutOfSequence,
    UnknownPartition,
    UnknownTopic,
)
from forebay.log._fetched import Fetched, FetchedBatch, ReaderConfig, ReadRequest
from forebay.log._positions import Positions, PositionsSeen, Span
from forebay.log._reader import LogReader
from forebay.log._resolve import PartitionOffsets
from forebay.log._tail_cache import MemoryTailCache, TailCache, TailCacheConfig
from forebay.log._topic import Topic, TopicDeleted, TopicExists, TopicSettings

if typing.TYPE_CHECKING:
    from forebay.log._append import AppendGroup, AppendResult
    from forebay.log._batching import BatchingProducer, ProducerConfig
    from forebay.log._billing import CountingStore
    from forebay.log._compactor import CompactionResult, Compactor, CompactorConfig
    from forebay.log._compactor_service import CompactorService, CompactorServiceConfig
    from forebay.log._explain import Explanation, explain
    from forebay.log._fencing import FenceState, Fencing
    from forebay.log._group_consumer import GroupConsumer
    from forebay.log._group_member import GroupConfig, GroupMember
    from forebay.log._group_records import (
        GenerationFenced,
        GroupBusy,
        GroupOffset,
        MemberRecord,
        TopicPartition,
    )
    from forebay.log._groups import GroupDescription, GroupLag, GroupReset, Groups
    from forebay.log._identity import log_identity
    from forebay.log._retention import Retention, RetentionReport
    from forebay.log._staged import Publications, Published, StagedAppend, stage
    from forebay.log._tail_cache_files import FileTailCache
    from forebay.log._topics import Catalog
    from forebay.log._trim import Trimmed, Trimmer
    from forebay.log._vacuum import Vacuum, VacuumConfig, VacuumReport
    from forebay.log._verify import PartitionReport, VerifyReport, verify
    from forebay.log._writer import LogWriter
    from forebay.log._writer_config import WriterConfig

__all__ = [
    "RECORD_SCHEMA",
    "AnotherLog",
    "AppendGroup",
    "AppendResult",
    "BatchingProducer",
    "Catalog",
    "CompactionResult",
    "Compactor",
    "CompactorConfig",
    "CompactorService",
    "CompactorServiceConfig",
    "Contended",
    "CountingStore",
    "DataLost",
    "Explanation",
    "FenceState",
    "Fenced",
    "Fencing",
    "Fetched",
    "FetchedBatch",
    "FileTailCache",
    "GenerationFenced",
    "GroupBusy",
    "GroupConfig",
    "GroupConsumer",
    "GroupDescription",
    "GroupLag",
    "GroupMember",
    "GroupOffset",
    "GroupReset",
    "Groups",
    "LogReader",
    "LogWriter",
    "MemberRecord",
    "MemoryTailCache",
    "OffsetOutOfRange",
    "OutOfSequence",
    "PartitionOffsets",
    "PartitionReport",
    "Positions",
    "PositionsSeen",
    "ProducerConfig",
    "Publications",
    "Published",
    "ReadRequest",
    "ReaderConfig",
    "Retention",
    "RetentionReport",
    "Span",
    "StagedAppend",
    "TailCache",
    "TailCacheConfig",
    "Topic",
    "TopicDeleted",
    "TopicExists",
    "TopicPartition",
    "TopicSettings",
    "Trimmed",
    "Trimmer",
    "UnknownPartition",
    "UnknownTopic",
    "Vacuum",
    "VacuumConfig",
    "VacuumReport",
    "VerifyReport",
    "WriterConfig",
    "explain",
    "log_identity",
    "partition_of",
    "route",
    "stage",
    "verify",
]

_LATER = {
    "AppendGroup": "_append",
    "AppendResult": "_append",
    "BatchingProducer": "_batching",
    "ProducerConfig": "_batching",
    "CountingStore": "_billing",
    "CompactionResult": "_compactor",
    "Compactor": "_compactor",
    "CompactorConfig": "_compactor",
    "CompactorService": "_compactor_service",
    "CompactorServiceConfig": "_compactor_service",
    "Explanation": "_explain",
    "explain": "_explain",
    "FenceState": "_fencing",
    "Fencing": "_fencing",
    "GroupConsumer": "_group_consumer",
    "GroupConfig": "_group_member",
    "GroupMember": "_group_member",
    "GenerationFenced": "_group_records",
    "GroupBusy": "_group_records",
    "GroupOffset": "_group_records",
    "MemberRecord": "_group_records",
    "TopicPartition": "_group_records",
    "GroupDescription": "_groups",
    "GroupLag": "_groups",
    "GroupReset": "_groups",
    "Groups": "_groups",
    "log_identity": "_identity",
    "Retention": "_retention",
    "RetentionReport": "_retention",
    "Publications": "_staged",
    "Published": "_staged",
    "StagedAppend": "_staged",
    "stage": "_staged",
    "FileTailCache": "_tail_cache_files",
    "Catalog": "_topics",
    "Trimmed": "_trim",
    "Trimmer": "_trim",
    "Vacuum": "_vacuum",
    "VacuumConfig": "_vacuum",
    "VacuumReport": "_vacuum",
    "PartitionReport": "_verify",
    "VerifyReport": "_verify",
    "verify": "_verify",
    "LogWriter": "_writer",
    "WriterConfig": "_writer_config",
}
"""Names that are loaded when they are first asked for, and their modules."""


def __getattr__(name: str) -> typing.Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    return found
