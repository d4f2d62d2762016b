"""Work of one machine, spread over many: compaction, vacuum, verification and replay on Spark."""

from forebay.spark.export._spread import spread
from forebay.spark.jobs._compact import CompactedPartition, compact
from forebay.spark.jobs._place import Place
from forebay.spark.jobs._replay import ReplayedPartition, replay
from forebay.spark.jobs._vacuum import vacuum
from forebay.spark.jobs._verify import verify

__all__ = [
    "CompactedPartition",
    "Place",
    "ReplayedPartition",
    "compact",
    "replay",
    "spread",
    "vacuum",
    "verify",
]
