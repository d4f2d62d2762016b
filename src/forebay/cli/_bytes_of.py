"""The bytes of a file or of an object, by one name for both."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from forebay.errors import UsageError

__all__ = ["bytes_of"]


async def bytes_of(file_or_url: str) -> bytes:
    """Read a file, or an object in a bucket: `s3://bucket/prefix/key?endpoint=...`."""
    from forebay.storage import open_store

    scheme = urlsplit(file_or_url).scheme if "://" in file_or_url else ""
    if scheme in ("", "file"):
        path = Path(file_or_url.removeprefix("file://"))
        return await asyncio.to_thread(path.read_bytes)
    parts = urlsplit(file_or_url)
    key = parts.path.strip("/")
    if not key:
        raise UsageError(f"{file_or_url!r} names no object", hint="add its key: s3://bucket/prefix/key")
    async with open_store(urlunsplit((parts.scheme, parts.netloc, "", parts.query, ""))) as store:
        return (await store.get(key)).data
