"""Objects: one seam to buckets and directories, with memory, local files, S3, GCS and Azure behind it."""

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
from forebay.storage._bucket import BucketStore
from forebay.storage._local import LocalStore
from forebay.storage._memory import MemoryStore
from forebay.storage._open import open_store

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
    "StoredObject",
    "open_store",
]
