"""Objects: one seam to buckets and directories, with memory, local files, S3, GCS and Azure behind it."""

from forebay.kit.conditions import ABSENT, ANY
from forebay.storage._api import DeleteResult, ObjectInfo, ObjectStore, StoredObject

__all__ = ["ABSENT", "ANY", "DeleteResult", "ObjectInfo", "ObjectStore", "StoredObject"]
