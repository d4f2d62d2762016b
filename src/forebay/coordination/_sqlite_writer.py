"""The writing half of the embedded coordinator: one thread, one connection, one transaction per turn.

Requests wait in a queue while the thread syncs the previous commit; when it comes back it takes everything
that is there into one transaction. Batches therefore follow the load without a timer: alone, a request pays
one fdatasync; a thousand of them pay about the same. All results of a batch go back to the event loop in one
wake-up, since the hop between threads costs as much as several statements.

Whoever waited for a turn and was refused keeps it for a moment (`forebay.kit.second_tries` says why). One
write only: with several per turn a fight costs half the processor time, but on a busy machine those who are
late for their further tries get a quarter of what the others get. All other answers go out only after the
turn ended: the next process is at work while this one hands them over.

A commit that fails is not simply rolled back. Its frames may have reached the log file and could come to life
after a crash, as long as nobody writes over them. The thread therefore tries to commit a step of the counter
on a new connection. It goes through: the failed commit can no longer come back, `NotDone`; or the counter
shows that the commit did happen; or neither can be learned, `OutcomeUnknown`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sqlite3
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forebay.coordination._api import Put, WriteResult
from forebay.coordination._sqlite_file import SqliteFile, translate, turn
from forebay.coordination._sqlite_transaction import Transaction, plain_refusal
from forebay.errors import Closed, ForebayError, OutcomeUnknown, PreconditionFailed, Unavailable
from forebay.kit.second_tries import SECOND_TRY_S, SecondTries

__all__ = ["Writer"]

BATCH_OPERATIONS_MAX = 1_000
"""Operations after which a transaction takes no further request, so that other processes get their turn."""
QUEUE_OPERATIONS_MAX = 50_000
QUEUE_BYTES_MAX = 64 * 1024 * 1024
"""Bounds of what waits for the thread; callers over it wait in line on the event loop."""
EXPIRY_INTERVAL_S = 0.25
"""How often an idle thread looks for sessions that are over."""
_WRITE_FAILED = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)


@dataclass(slots=True, eq=False)
class _Request:
    apply: Callable[[Transaction], Any]
    future: asyncio.Future[Any]
    operations: int
    size: int
    put: Put | None
    result: Any = None
    error: BaseException | None = None


class Writer:
    """The thread and its queue. Made on the event loop that will use it."""

    def __init__(
        self,
        file: SqliteFile,
        loop: asyncio.AbstractEventLoop,
        *,
        now_ms: Callable[[], int],
        boot_id: str,
        on_commit: Callable[[], None],
    ) -> None:
        self._file = file
        self._loop = loop
        self._now_ms = now_ms
        self._boot_id = boot_id
        self._second_tries = SecondTries()
        # Weak, so that the thread does not keep a coordinator alive that nobody closed.
        self._on_commit = weakref.WeakMethod(on_commit)
        self._queue: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._operations = 0
        self._size = 0
        self._room = asyncio.Event()
        self._room.set()
        self._stopping = False
        self._ended = asyncio.Event()
        self._descriptor = file.open_turn()
        self._connection = file.connect()
        self._thread = threading.Thread(target=self._run, name=f"forebay {file.path.name}", daemon=True)
        self._thread.start()

    async def submit(
        self,
        apply: Callable[[Transaction], Any],
        *,
        operations: int = 1,
        size: int = 0,
        put: Put | None = None,
    ) -> Any:
        """Run `apply` in the next transaction and return its result once that is durable.

        `put` says that this is all it does, so that it can be refused without a transaction.
        """
        while self._operations >= QUEUE_OPERATIONS_MAX or self._size >= QUEUE_BYTES_MAX:
            self._room.clear()
            await self._room.wait()
        if self._stopping:
            raise Closed(f"the coordinator on {self._file.path} is closed", hint="open a new one")
        request = _Request(apply, self._loop.create_future(), operations, size, put)
        self._operations += operations
        self._size += size
        self._queue.put(request)
        return await request.future

    def stop(self) -> None:
        """Let the thread end after what is queued. Safe from any thread."""
        self._stopping = True
        self._queue.put(None)

    async def join(self) -> None:
        """Return when the thread has let go of everything."""
        await self._ended.wait()
        self._thread.join()

    # -- on the event loop

    def _deliver(self, batch: list[_Request]) -> None:
        for request in batch:
            self._operations -= request.operations
            self._size -= request.size
            if request.future.done():
                continue
            if request.error is not None:
                request.future.set_exception(request.error)
            else:
                request.future.set_result(request.result)
        self._room.set()
        self._committed()

    def _committed(self) -> None:
        on_commit = self._on_commit()
        if on_commit is not None:
            on_commit()

    # -- in the thread

    def _run(self) -> None:
        try:
            while (batch := self._take()) is not None:
                if batch:
                    self._serve(batch)
                else:
                    self._expire()
        finally:
            self._connection.close()
            os.close(self._descriptor)
            self._call(self._ended.set)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        # The loop may be gone when its owner never closed the coordinator; then nobody waits either.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _take(self) -> list[_Request] | None:
        """What is queued, up to the bound. Empty when it is time to look for expired sessions."""
        return self._take_within(EXPIRY_INTERVAL_S)

    def _take_within(self, seconds: float) -> list[_Request] | None:
        try:
            first = self._queue.get(timeout=seconds)
        except queue.Empty:
            return []
        if first is None:
            return None
        batch = [first]
        operations = first.operations
        while operations < BATCH_OPERATIONS_MAX and not self._queue.empty():
            request = self._queue.get()
            if request is None:
                # Nothing is queued after the sentinel: serve what came before it, then meet it again.
                self._queue.put(None)
                break
            batch.append(request)
            operations += request.operations
        return batch

    def _serve(self, batch: list[_Request]) -> None:
        try:
            batch = self._take_turn(batch)
        except OSError as error:
            # The lock itself failed, so nothing was begun.
            _fail(batch, Unavailable(f"{self._file.turn_path}: {error.strerror}", hint="see the system log"))
        if batch:
            self._call(self._deliver, batch)

    def _take_turn(self, batch: list[_Request]) -> list[_Request]:
        """Do the batch in our turn, and its second try if it was refused. What is still to be delivered."""
        with turn(self._descriptor) as waited:
            # Only after a wait: without others there is nobody who could have come between.
            if not (waited and self._refuse(batch)):
                self._commit(batch)
            if waited and all(_refused(request) for request in batch) and self._second_tries.is_due():
                batch = self._answer_and_wait(batch)
                if batch:
                    self._commit(batch)
            return batch

    def _answer_and_wait(self, batch: list[_Request]) -> list[_Request]:
        """Keep the turn while the callers get their answers; what they come back with."""
        self._call(self._deliver, batch)
        again = self._take_within(SECOND_TRY_S)
        if again:
            self._second_tries.used()
            return again
        if again is None:
            self._queue.put(None)
        self._second_tries.unused()
        return []

    def _refuse(self, batch: list[_Request]) -> bool:
        """Refuse a lone put by one read, within our turn. Whatever is not plain takes a transaction."""
        [request, *others] = batch
        if others or request.put is None:
            return False
        try:
            refusal = plain_refusal(self._connection, request.put)
        except sqlite3.Error:
            return False
        if refusal is None:
            return False
        request.result = [WriteResult(error=refusal)]
        return True

    def _commit(self, batch: list[_Request]) -> None:
        """Do the batch in one transaction, within our turn."""
        try:
            self._connection.execute("begin immediate")
            transaction = Transaction(self._connection, self._now_ms(), self._boot_id)
            for request in batch:
                _apply(request, transaction)
            transaction.finish()
            try:
                self._connection.execute("commit")
            except sqlite3.Error as error:
                # Still in our turn: nobody else has moved the counter since.
                self._settle(batch, transaction, error)
        except sqlite3.Error as error:
            self._rollback()
            _fail(batch, translate(error, self._file.path))
        except Exception as error:
            self._rollback()
            _fail(batch, Unavailable(f"{self._file.path}: {error!r}", hint="nothing was written; try again"))

    def _settle(self, batch: list[_Request], transaction: Transaction, error: sqlite3.Error) -> None:
        """Find out what became of a commit that failed, and answer accordingly."""
        self._rollback()
        reason = translate(error, self._file.path)
        # The frame that makes a commit is the last one written: if writing failed, it is not there.
        happened = (
            False
            if getattr(error, "sqlite_errorcode", None) in _WRITE_FAILED
            else self._happened(transaction)
        )
        if happened is None:
            _fail(batch, OutcomeUnknown("a commit", reason=reason.message, hint="read back what was written"))
        elif not happened:
            _fail(batch, reason)

    def _happened(self, transaction: Transaction) -> bool | None:
        try:
            with contextlib.closing(self._file.connect()) as connection:
                connection.execute("begin immediate")
                [(version,)] = connection.execute("select version from counter").fetchall()
                if transaction.changed and version == transaction.version:
                    connection.execute("rollback")
                    return True
                connection.execute("update counter set version = ?", (transaction.version + 1,))
                connection.execute("commit")
                return False
        except (sqlite3.Error, ForebayError):
            return None

    def _rollback(self) -> None:
        # A failed statement may have ended the transaction by itself.
        with contextlib.suppress(sqlite3.Error):
            if self._connection.in_transaction:
                self._connection.execute("rollback")

    def _expire(self) -> None:
        """Drop sessions that are over. Looks without a lock first: mostly there is nothing to do."""
        try:
            query = "select 1 from session where expires_ms <= ? or boot_id <> ? limit 1"
            if not self._connection.execute(query, (self._now_ms(), self._boot_id)).fetchall():
                return
            with turn(self._descriptor):
                self._connection.execute("begin immediate")
                transaction = Transaction(self._connection, self._now_ms(), self._boot_id)
                transaction.expire_sessions()
                transaction.finish()
                self._connection.execute("commit")
        except (sqlite3.Error, OSError):
            # Another process or the next round will do it; a disk that stays broken shows in every write.
            self._rollback()
        else:
            self._call(self._committed)


def _apply(request: _Request, transaction: Transaction) -> None:
    try:
        request.result = request.apply(transaction)
    except ForebayError as error:
        request.error = error


def _refused(request: _Request) -> bool:
    results = request.result
    return (
        bool(results)
        and isinstance(results, list)
        and all(isinstance(r.error, PreconditionFailed) for r in results)
    )


def _fail(batch: list[_Request], error: ForebayError) -> None:
    for request in batch:
        request.error = error
