"""The seam to coordination: versioned keys, sessions, and many writes in one round trip.

The contract, held by one behaviour suite for every tenant:

* A key is a path. Order is promised only among the leaves of one directory, because servers differ beyond
  it; ranges and neighbour lookups therefore never leave the directory of the key they are given.
* A version is a number that grows with every write and never comes back, not even after a delete.
* `write` sends many operations in one round trip and answers each one by itself. It is ordered, not
  transactional: all puts, then all deletes, then all range deletes, each kind in the order given, and a
  refused operation does not stop the others. Readers see the operations of one shard all at once.
* `partition_key` says which keys live together. Whoever writes a key with it must read it with it; without
  one a key lives by itself. Operations of one `write` that share it are one atomic step.
* An ephemeral key belongs to a session and vanishes with it. Any later put by somebody else makes it theirs.
* Three outcomes: done, `NotDone` (mostly `PreconditionFailed`), `OutcomeUnknown`. Put something unique into
  a value that is written conditionally, so that a lost reply can be resolved by reading back.
* Calls that are not awaited one after the other are concurrent and may be applied in any order.
"""

from __future__ import annotations

import abc
import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeAlias

import msgspec

from forebay.errors import ForebayError, InvalidKey, LimitExceeded, UsageError
from forebay.kit.conditions import ABSENT, ANY, Condition

__all__ = [
    "Coordinator",
    "Delete",
    "DeleteRange",
    "Operation",
    "Put",
    "Record",
    "Session",
    "Watch",
    "When",
    "WriteResult",
    "children",
    "directory_of",
    "foreign_session",
    "validate_directory",
    "validate_key",
    "validate_limit",
    "validate_operations",
    "validate_partition_key",
    "validate_range",
    "validate_timeout_ms",
    "validate_value",
]

When: TypeAlias = Condition | int
"""`ANY`, `ABSENT`, or the version that must be there."""

KEY_BYTES_MAX = 1024
"""Longest key, in bytes of UTF-8."""
VALUE_BYTES_MAX = 1024 * 1024
"""Largest value. Keys are for metadata; data belongs into objects."""
SCAN_RECORDS_MAX = 1000
"""Most records one range scan returns; ask again from the last key for more."""
WRITE_OPERATIONS_MAX = 10_000
"""Most operations of one `write`."""
WRITE_BYTES_MAX = 48 * 1024 * 1024
"""Most bytes of keys and values of one `write`: below the 64 MiB at which an Oxia server breaks."""
SESSION_TIMEOUT_MS_MIN = 2_000
SESSION_TIMEOUT_MS_MAX = 300_000
"""Bounds of a session timeout: those of an Oxia server, so that every tenant takes the same values."""

# Printable ASCII in parts that begin with no dot, no dot in the last one, no underscore before them all: most
# keys, told by one call. A part gives nothing back, or the last one would be tried at every length before it
# is seen to be the last. Without the backslash the letters are three ranges, which `re` looks up in a table.
_is_plain_key = re.compile(r"(?!_)(?:[ -\-0-[\]-~][ -.0-[\]-~]*+/)*+[ -\-0-[\]-~]++").fullmatch


@dataclass(frozen=True, slots=True)
class Record:
    """A key as one write left it."""

    key: str
    value: bytes
    version: int
    session_id: int | None = None
    """The session an ephemeral key belongs to."""


class Session(abc.ABC):
    """Proof of life. It renews itself until closed; when its process dies, its keys vanish with it."""

    id: int
    timeout_ms: int

    @property
    @abc.abstractmethod
    def alive(self) -> bool:
        """Whether the session is certainly valid by our own clock. In doubt it says no."""

    @abc.abstractmethod
    async def close(self) -> None:
        """End it now. Its ephemeral keys are gone when this returns."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


# A commit makes two of these per partition: a struct is made in a tenth of the time of a frozen dataclass.
class Put(msgspec.Struct, frozen=True):
    """Write a value if the condition holds."""

    key: str
    value: bytes
    when: When = ANY
    session: Session | None = None
    """Makes the key ephemeral."""
    partition_key: str | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a key if the condition holds. Removing what is not there succeeds under `ANY`."""

    key: str
    when: When = ANY
    partition_key: str | None = None


@dataclass(frozen=True, slots=True)
class DeleteRange:
    """Remove the leaves of one directory with start <= key < end, in one atomic step."""

    start: str
    end: str
    partition_key: str | None = None


Operation: TypeAlias = Put | Delete | DeleteRange


class WriteResult(msgspec.Struct, frozen=True):
    """What became of one operation of a `write`."""

    version: int | None = None
    """The new version, after a put that was done."""
    error: ForebayError | None = None
    """None: done. Otherwise a `NotDone` or an `OutcomeUnknown`."""

    def unwrap(self) -> int | None:
        """The version; raises the error."""
        if self.error is None:
            return self.version
        try:
            raise self.error
        finally:
            # The traceback of the error holds this frame, and `self` the error: a ring until a collection.
            del self


class Watch(abc.ABC):
    """Wakes its owner after changes in one directory. May wake without a reason, never sleeps through one."""

    @abc.abstractmethod
    async def changed(self) -> None:
        """Return once something may have changed since the watch began or since the last return."""


class Coordinator(abc.ABC):
    """Versioned keys, shared by all processes of a deployment."""

    url: str
    """What `open_coordinator` was given, without secrets: for messages."""

    @abc.abstractmethod
    async def get(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """The record, or None."""

    async def get_many(self, keys: Sequence[tuple[str, str | None]]) -> Sequence[Record | None]:
        """The records of many keys, each with its partition key, in the order given.

        One round trip per shard where keys are across a wire. Not from one moment: as so many calls of `get`.
        """
        return await asyncio.gather(*(self.get(key, partition_key=home) for key, home in keys))

    async def get_and_ceiling(
        self, key: str, start: str, *, partition_key: str
    ) -> tuple[Record | None, Record | None]:
        """`get` of `key`, and after it `ceiling` of `start`: one round trip where keys are across a wire."""
        found = await self.get(key, partition_key=partition_key)
        return found, await self.ceiling(start, partition_key=partition_key)

    @abc.abstractmethod
    async def write(self, operations: Sequence[Operation]) -> list[WriteResult]:
        """Apply many operations in one round trip (one per shard); one result each, in the order given.

        Raises only for wrong usage, before anything is sent.
        """

    async def put(
        self,
        key: str,
        value: bytes,
        when: When = ANY,
        *,
        session: Session | None = None,
        partition_key: str | None = None,
    ) -> int:
        """Write one key and return its new version."""
        version = (await self.write([Put(key, value, when, session, partition_key)]))[0].unwrap()
        assert version is not None
        return version

    async def delete(self, key: str, when: When = ANY, *, partition_key: str | None = None) -> None:
        """Remove one key."""
        (await self.write([Delete(key, when, partition_key)]))[0].unwrap()

    async def delete_range(self, start: str, end: str, *, partition_key: str | None = None) -> None:
        """Remove the leaves of one directory with start <= key < end, in one atomic step."""
        (await self.write([DeleteRange(start, end, partition_key)]))[0].unwrap()

    @abc.abstractmethod
    async def range_scan(
        self, start: str, end: str, *, limit: int = SCAN_RECORDS_MAX, partition_key: str | None = None
    ) -> list[Record]:
        """The first `limit` records of one directory with start <= key < end, in order, from one moment."""

    async def scan_all(
        self, start: str, end: str, *, partition_key: str | None = None
    ) -> AsyncIterator[Record]:
        """Every record of a range, scan after scan. Each scan is from one moment, all of them are not."""
        while True:
            records = await self.range_scan(start, end, partition_key=partition_key)
            for record in records:
                yield record
            if len(records) < SCAN_RECORDS_MAX:
                return
            start = records[-1].key + "\0"

    @abc.abstractmethod
    async def ceiling(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """The lowest record at or above `key` in its directory."""

    @abc.abstractmethod
    async def floor(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """The highest record at or below `key` in its directory."""

    @abc.abstractmethod
    async def higher(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """The lowest record above `key` in its directory."""

    @abc.abstractmethod
    async def lower(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """The highest record below `key` in its directory."""

    @abc.abstractmethod
    async def open_session(self, timeout_ms: int = 15_000) -> Session:
        """Begin a session. `timeout_ms` from 2,000 to 300,000."""

    @abc.abstractmethod
    def watch(self, directory: str) -> AbstractAsyncContextManager[Watch]:
        """Watch the leaves of one directory from the moment the block is entered."""

    async def close(self) -> None:
        """Let go of threads and connections. Sessions opened here end; the data stays."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @abc.abstractmethod
    async def list(
        self, start: str, end: str, *, limit: int = SCAN_RECORDS_MAX, partition_key: str | None = None
    ) -> list[str]:
        """The keys of a range scan. (Last in the class: its name hides the builtin from annotations.)"""


def directory_of(key: str) -> str:
    """Everything before the last slash; empty at the top."""
    return key.rpartition("/")[0]


def children(directory: str) -> tuple[str, str]:
    """The range of all leaves of `directory`: the one pair of bounds every server orders alike."""
    return f"{directory}/", f"{directory}//"


def validate_key(key: str) -> str:
    """Return `key`, or raise `InvalidKey` naming what is wrong with it."""
    if type(key) is str and len(key) <= KEY_BYTES_MAX and _is_plain_key(key):
        return key
    _check_path(key)
    if "." in key.rpartition("/")[2]:
        raise InvalidKey(
            key, "its last part holds a '.'", hint="some Oxia servers lose such keys; encode the dot"
        )
    return key


def validate_directory(directory: str) -> str:
    """Return `directory`, or raise `InvalidKey`. Dots are fine here: only the last part of a key may not."""
    _check_path(directory)
    return directory


def validate_range(start: str, end: str) -> tuple[str, str]:
    """Return the bounds, or raise `InvalidKey` where they are not of one directory."""
    # The bound just above the longest key, and the end of the longest directory, are longer than a key.
    _check_text(start, KEY_BYTES_MAX + 1)
    _check_text(end, KEY_BYTES_MAX + 2)
    directory = directory_of(start)
    if not directory:
        raise InvalidKey(start, "a range needs a directory", hint="ranges cover the leaves of one directory")
    _check_path(directory)
    if end != f"{directory}//" and directory_of(end) != directory:
        raise InvalidKey(end, f"it is not in the directory {directory!r} of the start")
    return start, end


def validate_value(value: bytes) -> bytes:
    """Return `value`, or raise `LimitExceeded`. Only bytes: a buffer could change while it is written."""
    if not isinstance(value, bytes):
        raise UsageError(f"a value is bytes, not {type(value).__name__}", hint="wrap it in bytes(...)")
    if len(value) > VALUE_BYTES_MAX:
        raise LimitExceeded(
            "VALUE_BYTES_MAX", limit=VALUE_BYTES_MAX, actual=len(value), hint="data belongs into objects"
        )
    return value


def validate_limit(limit: int) -> int:
    """Return the limit of a scan, or raise a `UsageError`."""
    if limit < 1:
        raise UsageError(f"a scan of {limit} records makes no sense", hint="ask for at least 1")
    if limit > SCAN_RECORDS_MAX:
        raise LimitExceeded(
            "SCAN_RECORDS_MAX", limit=SCAN_RECORDS_MAX, actual=limit, hint="use scan_all for more"
        )
    return limit


def validate_timeout_ms(timeout_ms: int) -> int:
    """Return the timeout of a session, or raise a `UsageError`."""
    if not SESSION_TIMEOUT_MS_MIN <= timeout_ms <= SESSION_TIMEOUT_MS_MAX:
        raise UsageError(
            f"a session timeout of {timeout_ms} ms is out of bounds",
            hint=f"take {SESSION_TIMEOUT_MS_MIN} to {SESSION_TIMEOUT_MS_MAX} ms",
        )
    return timeout_ms


def foreign_session() -> UsageError:
    """The error of a put whose session was opened elsewhere."""
    return UsageError(
        "the session belongs to another coordinator", hint="open it on the coordinator that writes"
    )


def validate_partition_key(partition_key: str | None) -> str | None:
    """Return `partition_key`, or raise `InvalidKey`. Any printable text, since it is only hashed."""
    if partition_key is not None:
        _check_text(partition_key)
        if not partition_key:
            raise InvalidKey(partition_key, "a partition key is not empty", hint="leave it out instead")
    return partition_key


def validate_operations(operations: Sequence[Operation]) -> int:
    """Bytes of keys and values. Raises a `UsageError` where any operation is wrong, so that none is tried."""
    if len(operations) > WRITE_OPERATIONS_MAX:
        raise LimitExceeded(
            "WRITE_OPERATIONS_MAX", limit=WRITE_OPERATIONS_MAX, actual=len(operations), hint="write in parts"
        )
    size, last_home = 0, None
    for operation in operations:
        # The common case in one look; whatever it does not know goes the long way, which names what is wrong.
        if (
            type(operation) is Put
            and type(key := operation.key) is str
            and type(value := operation.value) is bytes
            and len(key) <= KEY_BYTES_MAX
            and len(value) <= VALUE_BYTES_MAX
            and ((when := operation.when) is ABSENT or when is ANY or (type(when) is int and when >= 0))
            and ((home := operation.partition_key) is last_home or home is None or _is_plain_home(home))
            and _is_plain_key(key)
        ):
            last_home = home
            size += len(key) + len(value)
        else:
            size += _validate_operation(operation)
    if size > WRITE_BYTES_MAX:
        raise LimitExceeded("WRITE_BYTES_MAX", limit=WRITE_BYTES_MAX, actual=size, hint="write in parts")
    return size


def _is_plain_home(home: str) -> bool:
    return type(home) is str and home.isascii() and 0 < len(home) <= KEY_BYTES_MAX


def _validate_operation(operation: Operation) -> int:
    if isinstance(operation, Put):
        validate_key(operation.key)
        validate_value(operation.value)
        _check_when(operation.when)
        size = len(operation.key) + len(operation.value)
    elif isinstance(operation, Delete):
        validate_key(operation.key)
        _check_when(operation.when)
        size = len(operation.key)
    elif isinstance(operation, DeleteRange):
        validate_range(operation.start, operation.end)
        size = len(operation.start) + len(operation.end)
    else:
        raise UsageError(f"{operation!r:.200} is no operation", hint="use Put, Delete or DeleteRange")
    validate_partition_key(operation.partition_key)
    return size


def _check_when(when: When) -> None:
    if isinstance(when, Condition):
        return
    # A bool is an int, and -1 means "absent" to an Oxia server: both would be conditions nobody meant.
    if type(when) is not int or when < 0:
        raise UsageError(f"{when!r} is no condition of a write", hint="use ANY, ABSENT or a version")


def _check_text(text: str, bytes_max: int = KEY_BYTES_MAX) -> None:
    if not isinstance(text, str):
        raise UsageError(f"a key is text, not {type(text).__name__}", hint="pass a str")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidKey(text, "it is not valid Unicode") from None
    if size > bytes_max:
        raise InvalidKey(text, f"longer than {bytes_max} bytes")


def _check_path(key: str) -> None:
    _check_text(key)
    if not key:
        raise InvalidKey(key, "it is empty")
    if not key.isprintable():
        raise InvalidKey(key, "it holds a control character or one that cannot be printed")
    parts = key.split("/")
    if "" in parts:
        raise InvalidKey(key, "a part is empty", hint="use plain names between single slashes")
    if "." in parts or ".." in parts:
        raise InvalidKey(key, "a part is '.' or '..'", hint="keys are names, not paths: write the whole key")
    if parts[0] == "__oxia":
        raise InvalidKey(key, "'__oxia' belongs to the server")
