"""Which root is the current one: one small record per stream, swapped by compare-and-set.

With a coordinator the record is a key there. Without one it is the object `metadata/current` in the bucket,
swapped by the store's own conditional put. Either way `current` is in the bucket: in the first case as a
copy, written after each swap, in the second as the record itself. It says which of the two it is, so that
nobody swaps a copy.

Invariants: the revision grows by one with each swap; the epoch never falls; a deleted stream stays deleted. A
swap whose answer was lost is settled by reading back: a uid belongs to one attempt of one writer. An attempt
that arrives late finds another version and does nothing.

Deletion writes the tombstone into the bucket before the record goes, so that a record that is merely lost can
be told from one that was removed.
"""

from __future__ import annotations

import abc
import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from forebay.coordination import Coordinator
from forebay.errors import (
    ForebayError,
    FormatError,
    NotFound,
    OutcomeUnknown,
    PreconditionFailed,
    Unavailable,
)
from forebay.formats import Corrupt, UnsupportedEncoding
from forebay.kit.conditions import ABSENT
from forebay.kit.retry import retry
from forebay.stream._calls import Calls
from forebay.stream._errors import Diverged
from forebay.stream._keys import StreamKeys

__all__ = ["BucketPointer", "CoordinatorPointer", "Head", "Held", "Pointer", "read_current"]

Authority: TypeAlias = Literal["bucket", "coordinator"]
DIRECTORY = "rabbitmq_stream_s3"
"""Directory of the records in a coordinator."""
RECORD_VERSION = 1


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The record."""

    version: int = RECORD_VERSION
    uid: str = ""
    """Of the current root, 12 hexadecimal digits. Empty: the stream has none yet."""
    epoch: int = 0
    """Of the writer that swapped it in."""
    revision: int = 0
    generation: int = 0
    """How often the remote tier was cut back to a common point; collection stops where it changes."""
    gaps: tuple[tuple[int, int], ...] = ()
    """Offsets that never reached the bucket: from, to."""
    authority: Authority = "bucket"
    deleted: bool = False

    @property
    def root(self) -> int:
        """The uid as a number."""
        return int(self.uid, 16)


_UID = re.compile(r"(?:[0-9a-f]{12})?", re.ASCII)
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Head).decode


@dataclass(frozen=True, slots=True)
class Held:
    """A record as it was read, with the version to swap it by."""

    head: Head
    version: str | int


def decode_head(data: bytes, what: str) -> Head:
    """The record, or a `FormatError`."""
    try:
        head = _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise Corrupt(what, 0, str(error)) from error
    if head.version != RECORD_VERSION:
        raise UnsupportedEncoding(what, f"version {head.version}")
    if head.revision < 1 or not _UID.fullmatch(head.uid):
        # Every record that was ever written has a revision. Without this `{}` would be an empty stream.
        raise Corrupt(what, 0, f"revision {head.revision} with the root {head.uid!r}")
    return head


async def read_current(calls: Calls, keys: StreamKeys) -> Held | None:
    """The record or its copy, from the bucket."""
    try:
        found = await calls.look(lambda: calls.store.get(keys.current))
    except NotFound:
        return None
    return Held(decode_head(found.data, keys.current), found.version)


class Pointer(abc.ABC):
    """The record of one stream."""

    authority: Authority

    def __init__(self, calls: Calls, keys: StreamKeys) -> None:
        self._calls = calls
        self._keys = keys

    @abc.abstractmethod
    async def read(self) -> Held | None:
        """The record, or None where the stream has none."""

    @abc.abstractmethod
    async def _write(self, head: Head, expected: Held | None) -> str | int:
        """One attempt."""

    @abc.abstractmethod
    async def delete(self, expected: Held | None, tombstone: Head) -> None:
        """Mark the stream as deleted for ever, then let the record go."""

    async def publish(self, held: Held) -> None:
        """Copy the record into the bucket, where it is not the record itself."""

    async def swap(self, expected: Held | None, head: Head) -> Held:
        """Replace the record. Raises `PreconditionFailed` where somebody else was first."""

        async def attempt() -> Held:
            try:
                return Held(head, await self._write(head, expected))
            except (PreconditionFailed, OutcomeUnknown) as error:
                now = await self.read()
                if now is not None and now.head == head:
                    return now
                unchanged = (now.version if now else None) == (expected.version if expected else None)
                if isinstance(error, OutcomeUnknown) and not unchanged:
                    raise PreconditionFailed(self._keys.stream, expected=expected, actual=now) from error
                raise

        return await self._calls.again(attempt)


class BucketPointer(Pointer):
    """The record is an object: no other service is needed."""

    authority = "bucket"

    async def read(self) -> Held | None:
        """The record. Raises where it is only the copy of a coordinator's."""
        held = await read_current(self._calls, self._keys)
        if held is not None and held.head.authority != self.authority:
            raise Diverged(
                self._keys.stream,
                offset=0,
                reason="its record is kept by a coordinator, and none was given; name it with --coordinator",
            )
        return held

    async def _write(self, head: Head, expected: Held | None) -> str | int:
        when = ABSENT if expected is None else str(expected.version)
        return await self._calls.store.put(self._keys.current, _encode(head), when)

    async def delete(self, expected: Held | None, tombstone: Head) -> None:
        """The tombstone is the record's last value."""
        await self.swap(expected, tombstone)


class CoordinatorPointer(Pointer):
    """The record is a key of the coordinator; the bucket has a copy."""

    authority = "coordinator"

    def __init__(self, calls: Calls, keys: StreamKeys, coordinator: Coordinator) -> None:
        super().__init__(calls, keys)
        self._coordinator = coordinator
        self._key = f"{DIRECTORY}/{keys.stream}"

    async def read(self) -> Held | None:
        """The record, by a read that sees every swap that finished before it."""
        record = await self._calls.look(lambda: self._coordinator.get(self._key))
        return None if record is None else Held(decode_head(record.value, self._key), record.version)

    async def _write(self, head: Head, expected: Held | None) -> str | int:
        when = ABSENT if expected is None else int(expected.version)
        return await self._coordinator.put(self._key, _encode(head), when)

    async def delete(self, expected: Held | None, tombstone: Head) -> None:
        """First the tombstone in the bucket, then the record."""
        await self.publish(Held(tombstone, 0))
        if expected is not None:
            version = int(expected.version)
            await self._calls.again(lambda: self._remove(version))

    async def _remove(self, version: int) -> None:
        try:
            await self._coordinator.delete(self._key, version)
        except (PreconditionFailed, OutcomeUnknown):
            if await self._coordinator.get(self._key) is not None:
                raise

    async def publish(self, held: Held) -> None:
        """Copy the record, unless a later one or a tombstone is there."""

        async def attempt() -> None:
            current = await read_current(self._calls, self._keys)
            if current is not None and not _supersedes(held.head, current.head):
                return
            when = ABSENT if current is None else str(current.version)
            await self._calls.store.put(self._keys.current, _encode(held.head), when)

        await retry(
            attempt,
            policy=self._calls.policy,
            clock=self._calls.clock,
            randomness=self._calls.random,
            retryable=_raced,
        )


def _supersedes(new: Head, old: Head) -> bool:
    if old.deleted:
        return False
    return new.deleted or new.revision > old.revision


def _raced(error: ForebayError) -> bool:
    return isinstance(error, Unavailable | OutcomeUnknown | PreconditionFailed) and not isinstance(
        error, FormatError
    )
