"""Objects: one seam to buckets and directories, with memory, local files, S3, GCS and Azure behind it.

`BucketStore` is looked up when it is first asked for: behind it lies obstore, which costs more to import than
all the rest and is needed by nobody who works on a directory or in the simulated world.
"""

import typing

from forebay.kit.conditions import ABSENT, ANY
from forebay.storage._api import (
    BucketMissing,
    DeleteResult,
    InvalidRange,
    KeyConflict,
    ObjectInfo,
    ObjectStore,
    StoredObject,
)
from forebay.storage._local import LocalStore
from forebay.storage._memory import MemoryStore
from forebay.storage._open import open_store
from forebay.storage._source import Source, SourceFailed

if typing.TYPE_CHECKING:
    from forebay.storage._bucket import BucketStore

__all__ = [
    "ABSENT",
    "ANY",
    "BucketMissing",
    "BucketStore",
    "DeleteResult",
    "InvalidRange",
    "KeyConflict",
    "LocalStore",
    "MemoryStore",
    "ObjectInfo",
    "ObjectStore",
    "Source",
    "SourceFailed",
    "StoredObject",
    "open_store",
]


def __getattr__(name: str) -> object:
    if name == "BucketStore":
        from forebay.storage._bucket import BucketStore

        globals()[name] = BucketStore
        return BucketStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
