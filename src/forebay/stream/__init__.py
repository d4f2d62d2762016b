"""Streams with a local tier in the Osiris format and a bottomless remote tier in a bucket."""

from forebay.stream._cache import BlockCache
from forebay.stream._config import ReaderConfig, RetentionPolicy, TierConfig
from forebay.stream._errors import Deposed, Diverged, Overtaken, RootMissing, StreamDeleted, StreamMissing
from forebay.stream._reader import StreamReader
from forebay.stream._spec import FIRST, LAST, NEXT, Spec
from forebay.stream._tier import Lag, StreamTier, TierProgress

__all__ = [
    "FIRST",
    "LAST",
    "NEXT",
    "BlockCache",
    "Deposed",
    "Diverged",
    "Lag",
    "Overtaken",
    "ReaderConfig",
    "RetentionPolicy",
    "RootMissing",
    "Spec",
    "StreamDeleted",
    "StreamMissing",
    "StreamReader",
    "StreamTier",
    "TierConfig",
    "TierProgress",
]
