"""Buckets of S3, Google Cloud Storage and Azure, through obstore.

`_url` reads the address, `_failure` reads obstore's errors, `_patience` is the retry loop, `_put` settles
writes whose reply was lost, `_listing` puts listings in order, `_ranges` reads parts of objects, `_store`
is the tenant.
"""

from forebay.storage._bucket._store import BucketStore, open_bucket

__all__ = ["BucketStore", "open_bucket"]
