"""The seam to object storage: what every engine may ask of a bucket, and what it may rely on.

The contract, held by one behaviour suite for every tenant:

* `put` is atomic and durable when it returns. Its condition is checked and the object replaced in one step.
* Every write has one of three outcomes: done, `NotDone` (mostly `PreconditionFailed`), `OutcomeUnknown`.
  A tenant whose reply was lost reads back and looks for its own mark before it answers.
* A version is opaque and belongs to exactly one write. On S3 it is the ETag, mostly a hash of the body, so
  bodies that are written conditionally must be unique: a counter or a token in them keeps a stale version
  from coming back.
* `get` returns data and version of the same write.
* `list` is in byte order of the keys and sees every write that finished before it began.
* No key may be a directory of another (`a` and `a/b`): files cannot hold both, so no store is asked to.
  Memory and local files refuse it with `KeyConflict`; a bucket does not look.
* Deleting what is not there succeeds.
"""

from __future__ import annotations

import abc
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeAlias

from forebay.errors import ForebayError, InvalidKey, InvalidUrl, NotDone, UsageError
from forebay.kit.conditions import ANY, Condition
from forebay.storage._source import Source, whole

__all__ = [
    "BucketMissing",
    "Buffer",
    "DeleteResult",
    "InvalidRange",
    "KeyConflict",
    "ObjectInfo",
    "ObjectStore",
    "Range",
    "StoredObject",
    "When",
    "copy_of",
    "parents_of",
    "validate_key",
    "validate_page_keys",
    "validate_prefix",
    "validate_range",
    "validate_when",
]

Buffer: TypeAlias = bytes | bytearray | memoryview
When: TypeAlias = Condition | str
"""`ANY`, `ABSENT`, or the version that must be there."""
Range: TypeAlias = tuple[int, int]
"""First byte and length."""

KEY_BYTES_MAX = 900
"""Longest key. S3 takes 1,024 bytes; the rest is left for the prefix in the store's URL."""
KEY_PART_BYTES_MAX = 240
"""Longest part between two slashes: a file name has 255 bytes, some stay free for our own suffixes."""
RESERVED_DIRECTORY = ".forebay"
"""First key part that belongs to the local store itself: locks, half-written files, coordination."""
LIST_PAGE_KEYS = 1000
"""Keys per page of a listing, as in S3."""

# Most keys, told by one call: letters, digits and a few signs, in parts that begin with no dot.
_PLAIN_PART = rf"[A-Za-z0-9_-][A-Za-z0-9._=-]{{0,{KEY_PART_BYTES_MAX - 1}}}+"
_is_plain_key = re.compile(rf"(?:{_PLAIN_PART}/)*+{_PLAIN_PART}").fullmatch


class KeyConflict(InvalidKey, NotDone):
    """The key is a directory of another key, or lies below one. Nothing was written."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason, hint="choose another key: no object may be a directory of another")


class BucketMissing(InvalidUrl, NotDone):
    """There is no such bucket or container: not a missing key, which a reader may take for an empty store."""

    def __init__(self, url: str) -> None:
        super().__init__(
            f"{url}: the bucket does not exist", hint="create it, or check its name and endpoint"
        )
        self.url = url


class InvalidRange(UsageError):
    """A byte range that is not inside the object."""

    def __init__(self, key: str, start: int, length: int, size: int | None = None) -> None:
        known = "" if size is None else f" of {size}"
        super().__init__(
            f"{key!r} has no bytes {start}..{start + length}{known}", hint="ask head() for the size first"
        )
        self.key = key
        self.start = start
        self.length = length
        self.size = size
        """Bytes of the object, or None where the other side did not tell."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as one write left it."""

    key: str
    data: bytes
    version: str


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a listing or a head request tells."""

    key: str
    size: int
    version: str
    last_modified_ms: int
    """By the store's clock, in milliseconds since the Unix epoch."""


@dataclass(frozen=True, slots=True)
class DeleteResult:
    """What became of one key of a bulk delete."""

    key: str
    error: ForebayError | None = None
    """None: the key is gone."""


class ObjectStore(abc.ABC):
    """One bucket, or one directory of it."""

    url: str
    """What `open_store` was given, without secrets: for messages."""
    gathers: bool = False
    """Whether `put_parts` writes the parts from where they lie. Elsewhere it joins them: who then has to care
    for memory joins them himself and lets go of them first."""

    @abc.abstractmethod
    async def put(self, key: str, data: Buffer, when: When = ANY) -> str:
        """Store `data` durably under `key` if `when` holds; return the new version.

        Raises `PreconditionFailed`, another `NotDone`, or `OutcomeUnknown`.
        """

    async def put_parts(self, key: str, parts: Sequence[bytes | memoryview], when: When = ANY) -> str:
        """`put` of the parts as one object, in order. Nobody may change them until it returns."""
        return await self.put(key, b"".join(parts), when)

    async def put_source(self, key: str, source: Source, when: When = ANY) -> str:
        """`put` of a body that is read from `source`, again from its beginning where a try is repeated.

        Stores that can hand it on piece by piece and never hold it. What the source raises is raised, and
        then nothing was stored. Such an object bears no mark of its writer: where a reply was lost and the
        very same bytes lie there, that counts as done, whoever wrote them.
        """
        return await self.put(key, whole(key, source), when)

    @abc.abstractmethod
    async def get(self, key: str) -> StoredObject:
        """The whole object. Raises `NotFound`."""

    @abc.abstractmethod
    async def get_if_changed(self, key: str, version: str) -> StoredObject | None:
        """The object, or None if it is still at `version`. Raises `NotFound`."""

    @abc.abstractmethod
    async def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        """Several byte ranges of one object, in the order asked for. Raises `InvalidRange` past the end."""

    async def view_ranges(self, key: str, ranges: Sequence[Range]) -> Sequence[bytes | memoryview]:
        """`get_ranges` for a process that may end: as views of the object where the store has it at hand.

        What lies under such a view may end the process when it goes bad; see the store.
        """
        found = self.views_at_hand(key, ranges)
        return await self.get_ranges(key, ranges) if found is None else found

    def views_at_hand(self, key: str, ranges: Sequence[Range]) -> Sequence[memoryview] | None:
        """What `view_ranges` finds without waiting for anything, and without a look at the bytes; None where
        it would have to. Raises as it does."""
        return None

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        """One byte range."""
        [data] = await self.get_ranges(key, [(start, length)])
        return data

    @abc.abstractmethod
    async def head(self, key: str) -> ObjectInfo:
        """Size, version and time without the data. Raises `NotFound`."""

    @abc.abstractmethod
    def list_pages(
        self, prefix: str = "", *, after: str = "", page_keys: int = LIST_PAGE_KEYS
    ) -> AsyncIterator[list[ObjectInfo]]:
        """Objects whose key starts with `prefix` and comes after `after`, in byte order, page by page."""

    @abc.abstractmethod
    async def delete(self, keys: Sequence[str]) -> list[DeleteResult]:
        """Delete many objects; one result per key, in order. A missing key counts as deleted."""

    async def close(self) -> None:
        """Let go of threads and connections. The data stays."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def list(self, prefix: str = "", *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """`list_pages`, one by one. (Last in the class: its name hides the builtin from annotations.)"""
        async for page in self.list_pages(prefix, after=after):
            for info in page:
                yield info


def validate_key(key: str) -> str:
    """Return `key`, or raise `InvalidKey` naming what is wrong with it."""
    if not isinstance(key, str):
        raise UsageError(f"a key is text, not {type(key).__name__}", hint="pass a str")
    if len(key) <= KEY_BYTES_MAX and _is_plain_key(key):
        return key
    _check_parts(key, key.split("/"))
    if len(key) > KEY_BYTES_MAX or len(key.encode("utf-8", "surrogatepass")) > KEY_BYTES_MAX:
        raise InvalidKey(key, f"longer than {KEY_BYTES_MAX} bytes")
    return key


def validate_prefix(prefix: str) -> str:
    """Return `prefix`, or raise `InvalidKey`. Empty means everything; the last part may be cut anywhere."""
    if prefix:
        parts = prefix.split("/")
        _check_parts(prefix, parts if parts[-1] else parts[:-1])
    return prefix


def validate_when(when: When) -> None:
    """Raise `UsageError` where `when` is an empty version or None: neither says what must be there."""
    if not when:
        raise UsageError(
            f"{when!r} is no condition", hint="give ANY, ABSENT or the version that must be there"
        )


def copy_of(data: Buffer) -> bytes:
    """The bytes of `data`. Raises `UsageError` where it has none: `bytes(5)` would be five zeros."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise UsageError(f"an object is bytes, not {type(data).__name__}", hint="encode it first")
    return bytes(data)


def validate_page_keys(page_keys: int) -> None:
    """Raise `UsageError` where a page could hold nothing."""
    if page_keys < 1:
        raise UsageError(f"a page of {page_keys} keys", hint="page_keys is at least 1")


def validate_range(key: str, start: int, length: int, size: int | None = None) -> None:
    """Raise `InvalidRange` unless the bytes asked for are there. A length of 0 is allowed."""
    if start < 0 or length < 0 or (size is not None and start + length > size):
        raise InvalidRange(key, start, length, size)


def parents_of(key: str) -> list[str]:
    """The directories that `key` lies in: `a/b/c` gives `a` and `a/b`."""
    parents, at = [], key.find("/")
    while at >= 0:
        parents.append(key[:at])
        at = key.find("/", at + 1)
    return parents


def _check_parts(key: str, parts: Sequence[str]) -> None:
    if not key:
        raise InvalidKey(key, "it is empty")
    if not key.isprintable():
        raise InvalidKey(key, "it holds a control character or one that cannot be printed")
    if "\\" in key:
        raise InvalidKey(key, "it holds a backslash, which some stores take for a slash")
    for part in parts:
        if part in ("", ".", ".."):
            raise InvalidKey(key, f"a part is {part!r}", hint="use plain names between single slashes")
        if len(part) > KEY_PART_BYTES_MAX or len(part.encode("utf-8", "surrogatepass")) > KEY_PART_BYTES_MAX:
            raise InvalidKey(key, f"a part is longer than {KEY_PART_BYTES_MAX} bytes")
    if parts[0] == RESERVED_DIRECTORY:
        raise InvalidKey(key, f"{RESERVED_DIRECTORY!r} belongs to the local store")
