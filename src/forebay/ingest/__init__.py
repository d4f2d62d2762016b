"""The claiming queue: many ingestors write batches, many collectors claim, process and acknowledge them.

At least once, no order across collectors, on nothing but an object store. `forebay.buffer` is the queue with
one consumer and one order.
"""

from forebay.ingest._collector import CollectedBatch, Collector
from forebay.ingest._config import CollectorConfig, IngestorConfig, OrphanConfig
from forebay.ingest._errors import (
    BatchMissing,
    ClaimLost,
    CommitFailed,
    CommitUnknown,
    ManifestLost,
    PrefixTaken,
    QueueFull,
)
from forebay.ingest._ingestor import Ingestor, WriteWatcher
from forebay.ingest._orphans import OrphanCollector, OrphanReport

__all__ = [
    "BatchMissing",
    "ClaimLost",
    "CollectedBatch",
    "Collector",
    "CollectorConfig",
    "CommitFailed",
    "CommitUnknown",
    "Ingestor",
    "IngestorConfig",
    "ManifestLost",
    "OrphanCollector",
    "OrphanConfig",
    "OrphanReport",
    "PrefixTaken",
    "QueueFull",
    "WriteWatcher",
]
