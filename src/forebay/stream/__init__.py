"""Streams with a local tier in the Osiris format and a bottomless remote tier in a bucket."""

from forebay.stream._cache import BlockCache
from forebay.stream._catalog import StreamStats, find_stream, list_streams, stats_of
from forebay.stream._collect import Collection, collect
from forebay.stream._config import ReaderConfig, RetentionPolicy, TierConfig
from forebay.stream._errors import (
    Deposed,
    Diverged,
    FragmentMissing,
    OffsetOutOfRange,
    Overtaken,
    RootMissing,
    StreamDeleted,
    StreamMissing,
)
from forebay.stream._keys import short_name
from forebay.stream._pressure import LagGate, LagLimits
from forebay.stream._reader import StreamReader
from forebay.stream._remote import RemoteTier
from forebay.stream._restore import Restored
from forebay.stream._restore import restore as restore_stream
from forebay.stream._sidecar import Sidecar
from forebay.stream._spec import FIRST, LAST, NEXT, Spec
from forebay.stream._tier import Lag, StreamTier, TierProgress
from forebay.stream._verify import Verification
from forebay.stream._verify import verify as verify_stream
from forebay.stream._writer import Appended, StreamWriter, WriterConfig

__all__ = [
    "FIRST",
    "LAST",
    "NEXT",
    "Appended",
    "BlockCache",
    "Collection",
    "Deposed",
    "Diverged",
    "FragmentMissing",
    "Lag",
    "LagGate",
    "LagLimits",
    "OffsetOutOfRange",
    "Overtaken",
    "ReaderConfig",
    "RemoteTier",
    "Restored",
    "RetentionPolicy",
    "RootMissing",
    "Sidecar",
    "Spec",
    "StreamDeleted",
    "StreamMissing",
    "StreamReader",
    "StreamStats",
    "StreamTier",
    "StreamWriter",
    "TierConfig",
    "TierProgress",
    "Verification",
    "WriterConfig",
    "collect",
    "find_stream",
    "list_streams",
    "restore_stream",
    "short_name",
    "stats_of",
    "verify_stream",
]
