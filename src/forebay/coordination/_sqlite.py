"""Coordination for all processes of one machine: versioned keys and sessions in one SQLite file.

The write-ahead log with full sync gives one fdatasync per commit, visible to others only once it is durable;
versions come from one counter of the whole store. Reading happens on the event loop itself: one indexed
lookup takes about as long as a quarter of the hop to a thread and back would, and a scan is bounded. The
connection it uses belongs to the loop, so no statement of another thread shares its snapshot. A lone small
write is done there too; all others are the business of one thread (see `_sqlite_writer`).

Lookups of a directory are ranges of the primary key (directory, name), so they never see a subdirectory.
There is one shard: a partition key is checked and otherwise has nothing to decide.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from forebay.coordination._api import (
    SCAN_RECORDS_MAX,
    Coordinator,
    Operation,
    Put,
    Record,
    Session,
    Watch,
    WriteResult,
    directory_of,
    foreign_session,
    validate_directory,
    validate_key,
    validate_limit,
    validate_operations,
    validate_partition_key,
    validate_range,
    validate_timeout_ms,
)
from forebay.coordination._sqlite_file import (
    BUSY_TIMEOUT_S,
    SqliteFile,
    is_busy,
    set_patience,
    translate,
)
from forebay.coordination._sqlite_session import SqliteSession, boot_id, boottime_ms
from forebay.coordination._sqlite_transaction import range_condition
from forebay.coordination._sqlite_watch import Poller, SqliteWatch
from forebay.coordination._sqlite_writer import Writer
from forebay.errors import Closed, UsageError

__all__ = ["SqliteCoordinator"]

_SELECT = "select name, value, version, session from kv where"


class SqliteCoordinator(Coordinator):
    """Versioned keys in a SQLite file. For one event loop of one process; open one per loop.

    `now_ms` and `boot` replace the machine's clock and boot id in tests; all who share a file must agree.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        url: str | None = None,
        now_ms: Callable[[], int] = boottime_ms,
        boot: str | None = None,
    ) -> None:
        self.path = Path(path).absolute()
        self.url = url or f"sqlite://{self.path}"
        self._now_ms = now_ms
        self._boot_id = boot or boot_id()
        self._pid = os.getpid()
        self._file = SqliteFile(self.path)
        self._reader = self._connect()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writer: Writer | None = None
        self._poller = Poller(lambda: self._number("pragma data_version"))
        self._sessions: dict[int, SqliteSession] = {}
        self._closed = False

    # -- reads

    async def get(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """The record, or None."""
        await self._bind().breathe()
        return self._lookup("name = ?", key, partition_key)

    async def ceiling(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """The lowest record at or above `key` in its directory."""
        await self._bind().breathe()
        return self._lookup("name >= ? order by name limit 1", key, partition_key)

    async def floor(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """The highest record at or below `key` in its directory."""
        await self._bind().breathe()
        return self._lookup("name <= ? order by name desc limit 1", key, partition_key)

    async def higher(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """The lowest record above `key` in its directory."""
        await self._bind().breathe()
        return self._lookup("name > ? order by name limit 1", key, partition_key)

    async def lower(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """The highest record below `key` in its directory."""
        await self._bind().breathe()
        return self._lookup("name < ? order by name desc limit 1", key, partition_key)

    async def range_scan(
        self, start: str, end: str, *, limit: int = SCAN_RECORDS_MAX, partition_key: str | None = None
    ) -> list[Record]:
        """The first `limit` records of one directory with start <= key < end, from one snapshot."""
        await self._bind().breathe()
        rows = self._scan("name, value, version, session", start, end, limit, partition_key)
        prefix = start.rpartition("/")[0] + "/"
        return [Record(prefix + name, value, version, session) for name, value, version, session in rows]

    def _lookup(self, condition: str, key: str, partition_key: str | None) -> Record | None:
        validate_key(key)
        validate_partition_key(partition_key)
        self._bind()
        directory, slash, name = key.rpartition("/")
        rows = self._read(f"{_SELECT} directory = ? and {condition}", directory, name)
        if not rows:
            return None
        name, value, version, session = rows[0]
        return Record(directory + slash + name, value, version, session)

    def _scan(self, columns: str, start: str, end: str, limit: int, partition_key: str | None) -> Any:
        validate_range(start, end)
        validate_limit(limit)
        validate_partition_key(partition_key)
        self._bind()
        condition, bounds = range_condition(start, end)
        query = f"select {columns} from kv where {condition} order by name limit ?"
        return self._read(query, directory_of(start), *bounds, limit)

    # -- writes

    async def write(self, operations: Sequence[Operation]) -> list[WriteResult]:
        """Apply many operations in one transaction, shared with whoever else writes at that moment."""
        operations = tuple(operations)
        size = validate_operations(operations)
        session_ids = {
            place: self._session_id(operation.session)
            for place, operation in enumerate(operations)
            if isinstance(operation, Put) and operation.session is not None
        }
        writer = self._bind()
        put = operations[0] if len(operations) == 1 and not session_ids else None
        results: list[WriteResult] = await writer.submit(
            lambda transaction: transaction.write(operations, session_ids),
            operations=len(operations),
            size=size,
            put=put if isinstance(put, Put) else None,
        )
        return results

    # -- sessions

    async def open_session(self, timeout_ms: int = 15_000) -> Session:
        """Begin a session. Its renewal belongs to the running event loop."""
        validate_timeout_ms(timeout_ms)
        writer = self._bind()
        opened_ms = self._now_ms()
        session_id: int = await writer.submit(lambda transaction: transaction.open_session(timeout_ms))
        session = SqliteSession(
            session_id,
            timeout_ms,
            opened_ms=opened_ms,
            now_ms=self._now_ms,
            renew=self._renew_session,
            end=self._end_session,
        )
        self._sessions[session_id] = session
        return session

    async def _renew_session(self, session_id: int) -> None:
        await self._bind().submit(lambda transaction: transaction.renew_session(session_id))

    async def _end_session(self, session_id: int) -> None:
        self._sessions.pop(session_id, None)
        await self._bind().submit(lambda transaction: transaction.end_sessions([session_id]))

    def _session_id(self, session: Session) -> int:
        if not isinstance(session, SqliteSession) or not session.belongs_to(self._end_session):
            raise foreign_session()
        return session.id

    # -- watches

    def watch(self, directory: str) -> AbstractAsyncContextManager[Watch]:
        """Watch from the moment the block is entered. Wakes for changes in other directories too."""
        validate_directory(directory)
        return self._watching()

    @asynccontextmanager
    async def _watching(self) -> AsyncIterator[Watch]:
        self._bind()
        watch = SqliteWatch(lambda: self._number("select version from counter"))
        self._poller.add(watch)
        try:
            yield watch
        finally:
            self._poller.discard(watch)

    # -- the rest

    async def close(self) -> None:
        """Finish what is queued, end the sessions, let go of thread and file. Twice is fine."""
        if self._closed:
            return
        if self._loop is not None:
            writer = self._bind()
            self._closed = True
            ended = [session.id for session in list(self._sessions.values()) if session.stop()]
            try:
                if ended:
                    await writer.submit(lambda transaction: transaction.end_sessions(ended))
            finally:
                writer.stop()
                await writer.join()
        self._closed = True
        self._poller.wake()
        self._reader.close()

    def _bind(self) -> Writer:
        """The writer of the one event loop this coordinator serves; made when it is first used."""
        if os.getpid() != self._pid:
            raise UsageError(
                f"{self.path} was opened before a fork",
                hint="open the coordinator in the child process itself",
            )
        if self._closed:
            raise Closed(f"the coordinator {self.url} is closed", hint="open a new one")
        loop = asyncio.get_running_loop()
        if self._writer is None:
            self._loop = loop
            self._writer = Writer(
                self._file,
                loop,
                self._reader,
                now_ms=self._now_ms,
                boot_id=self._boot_id,
                on_commit=self._poller.wake,
            )
            weakref.finalize(self, self._writer.stop)
        elif self._loop is not loop:
            raise UsageError(
                f"the coordinator {self.url} serves another event loop", hint="open one per event loop"
            )
        return self._writer

    def _connect(self) -> sqlite3.Connection:
        try:
            return self._file.connect_loop()
        except sqlite3.Error as error:
            raise translate(error, self.path) from error

    def _read(self, query: str, *parameters: object) -> Any:
        if self._closed:
            raise Closed(f"the coordinator {self.url} is closed", hint="open a new one")
        try:
            return self._reader.execute(query, parameters).fetchall()
        except sqlite3.Error as error:
            if is_busy(error):
                return self._read_patiently(query, parameters)
            raise translate(error, self.path) from error

    def _read_patiently(self, query: str, parameters: Sequence[object]) -> Any:
        """Readers are in nobody's way, but while the database is recovered or closed they must wait."""
        try:
            set_patience(self._reader, BUSY_TIMEOUT_S)
            try:
                return self._reader.execute(query, parameters).fetchall()
            finally:
                set_patience(self._reader, 0.0)
        except sqlite3.Error as error:
            raise translate(error, self.path) from error

    def _number(self, query: str) -> int:
        [(number,)] = self._read(query)
        return int(number)

    async def list(
        self, start: str, end: str, *, limit: int = SCAN_RECORDS_MAX, partition_key: str | None = None
    ) -> list[str]:
        """The keys of a range scan; their values are not read."""
        await self._bind().breathe()
        rows = self._scan("name", start, end, limit, partition_key)
        prefix = start.rpartition("/")[0] + "/"
        return [prefix + name for (name,) in rows]
