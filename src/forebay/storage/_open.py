"""`open_store`: from a URL to a store, without touching the network.

A plain string without a scheme is a path. A one-letter scheme would be a drive letter elsewhere; here it is
an unknown scheme like any other.
"""

from __future__ import annotations

import os
import random
import re
from urllib.parse import unquote, urlsplit

from forebay.errors import InvalidUrl
from forebay.kit.clock import Clock
from forebay.kit.ids import IdSource
from forebay.storage._api import ObjectStore
from forebay.storage._local import LocalStore
from forebay.storage._memory import MemoryStore

__all__ = ["open_store"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_BUCKETS = ("s3", "gs", "az")
_KNOWN = "memory://, a path or file://, s3://, gs://, az://"


def open_store(
    url: str | os.PathLike[str],
    *,
    clock: Clock | None = None,
    ids: IdSource | None = None,
    randomness: random.Random | None = None,
) -> ObjectStore:
    """Open the store that `url` names. Nothing is contacted and nothing is written before it is used.

    `memory://` begins empty, `memory://name` is shared by this process; a path or `file://` is a directory;
    `s3://bucket/prefix?endpoint=...`, `gs://bucket/prefix` and `az://container/prefix` are buckets.
    `clock`, `ids` and `randomness` are the machine's own unless given.
    """
    if not isinstance(url, str):
        return LocalStore(url, ids)
    if not url:
        raise InvalidUrl("an empty store URL", hint=f"known are {_KNOWN}")
    match = _SCHEME.match(url)
    if match is None:
        _refuse_half_a_scheme(url)
        return LocalStore(url, ids)
    scheme = match[1].lower()
    if scheme == "memory":
        return _open_memory(url, clock, ids)
    if scheme == "file":
        return LocalStore(_file_path(url), ids)
    if scheme in _BUCKETS:
        from forebay.storage._bucket import open_bucket  # behind it lies obstore, which is dear to import

        return open_bucket(url, clock=clock, ids=ids, randomness=randomness)
    raise InvalidUrl(f"unknown store scheme {scheme!r}", hint=f"known are {_KNOWN}")


def _refuse_half_a_scheme(path: str) -> None:
    """`s3:/bucket` would quietly be a new directory on this disk."""
    scheme = path.partition(":")[0].lower()
    if ":" in path and scheme in ("memory", "file", *_BUCKETS):
        raise InvalidUrl(
            f"{path[:200]!r} is neither a URL nor a plain path",
            hint=f"write {scheme}:// for the URL, or ./{scheme}: for a directory of that name",
        )


def _open_memory(url: str, clock: Clock | None, ids: IdSource | None) -> ObjectStore:
    name = url.partition("://")[2].rstrip("/")
    if "?" in name or "#" in name:
        raise InvalidUrl(f"memory:// takes a name and no options: {url!r}", hint="for example memory://test")
    return MemoryStore(clock, ids, name=name)


def _file_path(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise InvalidUrl(f"a file URL names another machine: {parts.netloc!r}", hint="use file:///path")
    if parts.query or parts.fragment or not parts.path:
        raise InvalidUrl(f"not a file URL: {url!r}", hint="use file:///path, without options")
    return unquote(parts.path)
