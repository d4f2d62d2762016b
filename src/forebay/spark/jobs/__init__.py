"""Work of one machine, spread over many: compaction, vacuum, verification, replay and load-test analysis."""

from forebay.spark.export._spread import spread
from forebay.spark.jobs._compact import CompactedPartition, compact
from forebay.spark.jobs._loadtest import LoadtestReport, analyse_loadtest
from forebay.spark.jobs._place import Place
from forebay.spark.jobs._replay import ReplayedPartition, ReplayTrimmed, replay
from forebay.spark.jobs._vacuum import vacuum
from forebay.spark.jobs._verify import verify

__all__ = [
    "CompactedPartition",
    "LoadtestReport",
    "Place",
    "ReplayTrimmed",
    "ReplayedPartition",
    "analyse_loadtest",
    "compact",
    "replay",
    "spread",
    "vacuum",
    "verify",
]
