"""The contract of coordination as a plain data structure: what all tenants must look like from outside.

Nothing here waits. Every call takes the lock, drops the sessions whose deadline has passed, does its work and
returns, so that on a virtual clock the outcome depends on the order of calls and on nothing else. The lock is
there because one named state may serve event loops of several threads; with one loop it is never contended.

Shards behave as on an Oxia server: a record lives in the shard of its partition key, or of its own key
without one, and somebody who names the wrong partition key does not find it. The hash is crc32, because the
built-in one differs from process to process. Versions and session ids begin at 0, as they do there, so that a
caller who tests them for truth fails here first.
"""

from __future__ import annotations

import bisect
import heapq
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from forebay.coordination._api import (
    Delete,
    DeleteRange,
    Operation,
    Put,
    Record,
    Session,
    When,
    WriteResult,
    directory_of,
    foreign_session,
)
from forebay.errors import ForebayError, PreconditionFailed, SessionExpired
from forebay.kit.clock import Clock
from forebay.kit.conditions import ABSENT, ANY

__all__ = ["LeaseSession", "MemoryState"]


class _Directory:
    """The leaves of one directory in one shard, by name and in order."""

    __slots__ = ("names", "records")

    def __init__(self) -> None:
        self.names: list[str] = []
        self.records: dict[str, Record] = {}

    def put(self, record: Record) -> None:
        if record.key not in self.records:
            bisect.insort(self.names, record.key)
        self.records[record.key] = record

    def remove(self, key: str) -> None:
        del self.records[key]
        del self.names[bisect.bisect_left(self.names, key)]

    def between(self, start: str, end: str) -> list[str]:
        """The keys of a range. The end of all leaves, `directory//`, sorts below some of them."""
        low = bisect.bisect_left(self.names, start)
        high = len(self.names) if end.endswith("//") else bisect.bisect_left(self.names, end)
        return self.names[low:high]


_Shard = dict[str, _Directory]


@dataclass(slots=True)
class _Lease:
    timeout_s: float
    deadline: float
    keys: set[tuple[int, str]] = field(default_factory=set)
    """Shard and key of every ephemeral record."""


class LeaseSession(Session):
    """A session that is a lease of a `MemoryState`; how it is renewed is up to the tenant."""

    state: MemoryState


class MemoryState:
    """Records, sessions and listeners, shared by the coordinators that were opened on it."""

    def __init__(self, clock: Clock, shards: int = 1) -> None:
        if shards < 1:
            raise ValueError(f"{shards} shards cannot hold anything")
        self.clock = clock
        self._lock = threading.RLock()
        self._shards: list[_Shard] = [{} for _ in range(shards)]
        self._next_version = 0
        self._next_session = 0
        self._leases: dict[int, _Lease] = {}
        self._listeners: dict[str, dict[object, Callable[[bool], None]]] = {}

    # -- reads

    def get(self, key: str, partition_key: str | None) -> Record | None:
        """The record of exactly this key in the shard where the caller looks for it."""
        with self._lock:
            self.expire()
            return self._find(self._shard_of(partition_key or key), key)

    def scan(self, start: str, end: str, limit: int, partition_key: str | None) -> list[Record]:
        """The first records of a range, of one shard or merged from all."""
        with self._lock:
            self.expire()
            parts = [
                [directory.records[key] for key in directory.between(start, end)[:limit]]
                for directory in self._directories(directory_of(start), partition_key)
            ]
            return list(heapq.merge(*parts, key=lambda record: record.key))[:limit]

    def neighbour(self, key: str, partition_key: str | None, *, up: bool, equal: bool) -> Record | None:
        """The nearest record in one direction, `key` itself included or not."""
        with self._lock:
            self.expire()
            found: list[Record] = []
            for directory in self._directories(directory_of(key), partition_key):
                side = bisect.bisect_left if up == equal else bisect.bisect_right
                index = side(directory.names, key) - (0 if up else 1)
                if 0 <= index < len(directory.names):
                    found.append(directory.records[directory.names[index]])
            choose = min if up else max
            return choose(found, key=lambda record: record.key, default=None)

    # -- writes

    def write(self, operations: Sequence[Operation], session_ids: Sequence[int | None]) -> list[WriteResult]:
        """Puts, then deletes, then range deletes. `session_ids` holds one entry per operation."""
        results = [WriteResult()] * len(operations)
        with self._lock:
            self.expire()
            for kind in (Put, Delete, DeleteRange):
                for index, operation in enumerate(operations):
                    if isinstance(operation, kind):
                        results[index] = self._apply(operation, session_ids[index])
        return results

    def _apply(self, operation: Operation, session_id: int | None) -> WriteResult:
        try:
            if isinstance(operation, Put):
                return WriteResult(version=self._put(operation, session_id))
            if isinstance(operation, Delete):
                self._delete(operation)
            else:
                self._delete_range(operation)
        except ForebayError as error:
            return WriteResult(error=error)
        return WriteResult()

    def _put(self, put: Put, session_id: int | None) -> int:
        shard = self._shard_of(put.partition_key or put.key)
        current = self._find(shard, put.key)
        if session_id is not None and session_id not in self._leases:
            raise SessionExpired(
                f"session {session_id} is over, {put.key!r} was not written", hint="open a new session"
            )
        _check(put.key, put.when, current)
        if current is not None:
            self._disown(shard, current)
        version = self._next_version
        self._next_version += 1
        record = Record(put.key, put.value, version, session_id)
        self._shards[shard].setdefault(directory_of(put.key), _Directory()).put(record)
        if session_id is not None:
            self._leases[session_id].keys.add((shard, put.key))
        self._notify(directory_of(put.key))
        return version

    def _delete(self, delete: Delete) -> None:
        shard = self._shard_of(delete.partition_key or delete.key)
        current = self._find(shard, delete.key)
        _check(delete.key, delete.when, current)
        if current is not None:
            self._remove(shard, current)

    def _delete_range(self, delete: DeleteRange) -> None:
        name = directory_of(delete.start)
        for shard in self._shards_of(delete.partition_key):
            directory = self._shards[shard].get(name)
            for key in directory.between(delete.start, delete.end) if directory else ():
                record = self._find(shard, key)
                assert record is not None
                self._remove(shard, record)

    # -- sessions

    def open_session(self, timeout_s: float) -> int:
        """Begin a session. Listeners look up again, because the next deadline may be nearer now."""
        with self._lock:
            session_id = self._next_session
            self._next_session += 1
            self._leases[session_id] = _Lease(timeout_s, self.clock.monotonic() + timeout_s)
            for listeners in list(self._listeners.values()):
                for wake in list(listeners.values()):
                    wake(False)
            return session_id

    def renew_session(self, session_id: int) -> bool:
        """Whether the session lives; if so, for its full timeout again."""
        with self._lock:
            self.expire()
            lease = self._leases.get(session_id)
            if lease is not None:
                lease.deadline = self.clock.monotonic() + lease.timeout_s
            return lease is not None

    def session_of(self, operation: Operation, kind: type[LeaseSession]) -> int | None:
        """Id of the session that an operation belongs to.

        Raises `UsageError` where it is none of ours, or not of the kind that the tenant renews.
        """
        session = operation.session if isinstance(operation, Put) else None
        if session is None:
            return None
        if not isinstance(session, kind) or session.state is not self:
            raise foreign_session()
        return session.id

    def session_alive(self, session_id: int) -> bool:
        """Whether the session still has time."""
        with self._lock:
            lease = self._leases.get(session_id)
            return lease is not None and self.clock.monotonic() < lease.deadline

    def end_session(self, session_id: int) -> None:
        """Drop a session and its keys. Silent where it is over already."""
        with self._lock:
            lease = self._leases.pop(session_id, None)
            for shard, key in sorted(lease.keys) if lease else ():
                record = self._find(shard, key)
                assert record is not None
                self._remove(shard, record)

    def expire(self) -> None:
        """Drop every session whose deadline has passed."""
        with self._lock:
            now = self.clock.monotonic()
            for session_id in [number for number, lease in self._leases.items() if lease.deadline <= now]:
                self.end_session(session_id)

    def next_deadline(self) -> float | None:
        """When the next session would end if nobody renewed it."""
        with self._lock:
            return min((lease.deadline for lease in self._leases.values()), default=None)

    # -- listeners

    def listen(self, directory: str, token: object, wake: Callable[[bool], None]) -> None:
        """Call `wake(True)` after a change in `directory`, `wake(False)` when a session begins anywhere."""
        with self._lock:
            self._listeners.setdefault(directory, {})[token] = wake

    def unlisten(self, directory: str, token: object) -> None:
        """Stop calling. Silent where it was stopped already."""
        with self._lock:
            listeners = self._listeners.get(directory, {})
            listeners.pop(token, None)
            if not listeners:
                self._listeners.pop(directory, None)

    # -- inner parts

    def _shard_of(self, text: str) -> int:
        return zlib.crc32(text.encode()) % len(self._shards)

    def _shards_of(self, partition_key: str | None) -> Iterable[int]:
        return range(len(self._shards)) if partition_key is None else [self._shard_of(partition_key)]

    def _directories(self, name: str, partition_key: str | None) -> list[_Directory]:
        found = [self._shards[shard].get(name) for shard in self._shards_of(partition_key)]
        return [directory for directory in found if directory is not None]

    def _find(self, shard: int, key: str) -> Record | None:
        directory = self._shards[shard].get(directory_of(key))
        return directory.records.get(key) if directory else None

    def _remove(self, shard: int, record: Record) -> None:
        name = directory_of(record.key)
        self._disown(shard, record)
        directory = self._shards[shard][name]
        directory.remove(record.key)
        if not directory.names:
            del self._shards[shard][name]
        self._notify(name)

    def _disown(self, shard: int, record: Record) -> None:
        lease = self._leases.get(record.session_id) if record.session_id is not None else None
        if lease is not None:
            lease.keys.discard((shard, record.key))

    def _notify(self, directory: str) -> None:
        for wake in list(self._listeners.get(directory, {}).values()):
            wake(True)


def _check(key: str, when: When, current: Record | None) -> None:
    if when is ANY:
        return
    actual = ABSENT if current is None else current.version
    if when != actual:
        raise PreconditionFailed(key, expected=when, actual=actual)
