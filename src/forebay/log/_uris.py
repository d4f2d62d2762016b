"""Names of objects as index entries hold them: full URIs, so that an entry tells where its data lies.

    s3://bucket/prefix/llog/wal-shared/{uuid}      a bucket, without the options of its URL
    file:///var/data/llog/wal-shared/{uuid}        a directory

A bucket's name is the same for everybody, so an entry of another bucket or prefix is refused: the key alone
might exist here too, and hold something else. A directory's name is not. It is moved, mounted elsewhere,
copied to another machine together with its embedded coordinator; entries of a directory, and of stores that
live in memory, are therefore read by their key alone.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from forebay.errors import StorageDamaged
from forebay.log._keys import ROOT
from forebay.storage import ObjectStore

__all__ = ["key_of", "uri_of"]

_BUCKETS: Final = ("s3://", "gs://", "az://")
_KEY: Final = re.compile(rf"(?:^|/)({ROOT}/(?:wal-shared/[^/]+|[^/]+/partitions/[0-9]+/data/[a-z]+/[^/]+))$")


STORES_REMEMBERED: Final = 256
"""Stores whose base is kept at hand: every entry of an index is taken apart with it."""


def uri_of(store: ObjectStore, key: str) -> str:
    """The full name of an object of this store."""
    return f"{_base(store.url)}/{key}"


def key_of(store: ObjectStore, uri: str) -> str:
    """The key inside this store; raises `StorageDamaged` where the URI belongs to another bucket."""
    base = _base(store.url)
    if base.startswith(_BUCKETS) or uri.startswith(_BUCKETS):
        key = uri[len(base) + 1 :] if uri.startswith(f"{base}/") else ""
    else:
        match = _KEY.search(uri)
        key = match[1] if match else ""
    if not key:
        raise StorageDamaged(
            f"{uri[:300]!r} is not an object of {base}",
            hint="open the store that this log was written to, with the same bucket and prefix",
        )
    return key


@lru_cache(STORES_REMEMBERED)
def _base(url: str) -> str:
    scheme, separator, rest = url.partition("?")[0].partition("://")
    if not separator:
        scheme, rest = "file", url
    return f"{scheme}://{rest.rstrip('/')}"
