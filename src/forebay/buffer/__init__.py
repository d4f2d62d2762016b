"""The stateless buffer: producers append batches to one ordered queue, one consumer takes them out."""

from forebay.buffer._batches import BatchDescriptor, ConsumedBatch
from forebay.buffer._commit_broker import CommitBroker
from forebay.buffer._commit_broker_client import BrokeredCommitter, BrokerGone
from forebay.buffer._commit_broker_socket import BrokerServer, BrokerSocket
from forebay.buffer._committer import Committed, Committer, ManifestCommitter, Upload
from forebay.buffer._config import BufferConfig, ConsumerConfig, ProducerConfig
from forebay.buffer._consumer import Consumer
from forebay.buffer._errors import (
    AckOutOfOrder,
    BatchMissing,
    CommitFailed,
    CommitUnknown,
    Fenced,
    ManifestLost,
    NotInitialized,
    QueueFull,
    ResumeRefused,
    UploadFailed,
)
from forebay.buffer._gc import GarbageCollector, GcReport, KeptObject
from forebay.buffer._producer import DurabilityWatcher, Durable, Producer, WriteHandle
from forebay.buffer._reader import BufferStats, EntryInfo, Reader, manifest_as_json

__all__ = [
    "AckOutOfOrder",
    "BatchDescriptor",
    "BatchMissing",
    "BrokerGone",
    "BrokerServer",
    "BrokerSocket",
    "BrokeredCommitter",
    "BufferConfig",
    "BufferStats",
    "CommitBroker",
    "CommitFailed",
    "CommitUnknown",
    "Committed",
    "Committer",
    "ConsumedBatch",
    "Consumer",
    "ConsumerConfig",
    "DurabilityWatcher",
    "Durable",
    "EntryInfo",
    "Fenced",
    "GarbageCollector",
    "GcReport",
    "KeptObject",
    "ManifestCommitter",
    "ManifestLost",
    "NotInitialized",
    "Producer",
    "ProducerConfig",
    "QueueFull",
    "Reader",
    "ResumeRefused",
    "Upload",
    "UploadFailed",
    "WriteHandle",
    "manifest_as_json",
]
