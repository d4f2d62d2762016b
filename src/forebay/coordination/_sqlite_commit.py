"""One commit of the embedded coordinator: a batch of requests in one transaction, and what became of it.

Whoever calls holds the turn (see `_sqlite_file`), so nobody else moves the counter meanwhile. Answers are put
into the requests; handing them to their callers is somebody else's business.

A commit that fails is not simply rolled back. Its frames may have reached the log file and could come to life
after a crash, as long as nobody writes over them. We therefore try to commit a step of the counter on a new
connection. It goes through: the failed commit can no longer come back, `NotDone`; or the counter shows that
the commit did happen; or neither can be learned, `OutcomeUnknown`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.coordination._api import Put, WriteResult
from forebay.coordination._sqlite_file import SqliteFile, translate
from forebay.coordination._sqlite_transaction import Transaction, plain_refusal
from forebay.errors import ForebayError, OutcomeUnknown, PreconditionFailed, Unavailable

__all__ = ["Committer", "Request", "fail"]

CHECKPOINT_VERSIONS = 256
"""Versions after which the log is due to be moved into the database: with one key per commit, soon enough
for it to be written from its beginning again before it has grown past a few MiB."""
_WRITE_FAILED = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)


@dataclass(slots=True, eq=False)
class Request:
    """What a caller wants to be done in the next transaction, and later its answer."""

    apply: Callable[[Transaction], Any]
    operations: int
    size: int
    put: Put | None
    """Says that this is all it does, so that it can be refused without a transaction."""
    future: asyncio.Future[Any] | None = None
    """Who waits for it; None where nobody had to wait."""
    result: Any = None
    error: BaseException | None = None

    def refused(self) -> bool:
        """Whether its conditions, and nothing else, were in the way of all it wanted."""
        results = self.result
        return (
            bool(results)
            and isinstance(results, list)
            and all(isinstance(result.error, PreconditionFailed) for result in results)
        )

    def unwrap(self) -> Any:
        """The result; raises the error."""
        if self.error is None:
            return self.result
        try:
            raise self.error
        finally:
            # The traceback of the error holds this frame, and `self` the error: a ring until a collection.
            del self


class Committer:
    """Writes through one connection. For one thread at a time, which holds the turn."""

    def __init__(
        self, file: SqliteFile, connection: sqlite3.Connection, *, now_ms: Callable[[], int], boot_id: str
    ) -> None:
        self._file = file
        self._connection = connection
        self._now_ms = now_ms
        self._boot_id = boot_id
        self.checkpoint_due = False
        """Whether the log has grown since the last checkpoint; whoever does one takes this back."""

    def begin(self) -> None:
        """Open the transaction. Raises what sqlite raises, and then nothing was begun."""
        self._connection.execute("begin immediate")

    def commit(self, batch: Sequence[Request]) -> None:
        """Do the batch in one transaction."""
        try:
            self.begin()
        except sqlite3.Error as error:
            self._rollback()
            fail(batch, translate(error, self._file.path))
        else:
            self.finish(batch)

    def finish(self, batch: Sequence[Request]) -> None:
        """Do the batch in the transaction that was begun, and end it."""
        ending = False
        try:
            transaction = self._transaction()
            for request in batch:
                _apply(request, transaction)
            transaction.finish()
            ending = True
            try:
                self._connection.execute("commit")
            except sqlite3.Error as error:
                self._settle(batch, transaction, error)
            first, last = transaction.first_version, transaction.version
            if first // CHECKPOINT_VERSIONS != last // CHECKPOINT_VERSIONS:
                self.checkpoint_due = True
        except sqlite3.Error as error:
            self._rollback()
            fail(batch, translate(error, self._file.path))
        except Exception as error:
            self._rollback()
            # The handler of a signal may raise anywhere on the main thread, also behind the commit.
            if ending:
                fail(batch, OutcomeUnknown("a commit", reason=repr(error), hint="read back what was written"))
            else:
                fail(
                    batch, Unavailable(f"{self._file.path}: {error!r}", hint="nothing was written; try again")
                )
        except BaseException:
            # An interrupt on the loop's own thread: left open, the transaction would keep everybody out.
            self._rollback()
            raise

    def refuse(self, batch: Sequence[Request]) -> bool:
        """Refuse a lone put by one read. Whatever is not plain takes a transaction."""
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

    def has_expired(self) -> bool:
        """Whether a session is over. Needs no turn; raises what sqlite raises."""
        query = "select 1 from session where expires_ms <= ? or boot_id <> ? limit 1"
        return bool(self._connection.execute(query, (self._now_ms(), self._boot_id)).fetchall())

    def expire(self) -> None:
        """Drop sessions that are over. Where it fails, another process or the next round will do it: a disk
        that stays broken shows in every write."""
        try:
            self.begin()
            transaction = self._transaction()
            transaction.expire_sessions()
            transaction.finish()
            self._connection.execute("commit")
        except sqlite3.Error:
            self._rollback()

    def checkpoint(self) -> None:
        """Move the log into the database, so that the next commit writes it from its beginning."""
        # What stands in the way (a reader, a full disk) is met by the next one, or named by a commit.
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute("pragma wal_checkpoint(passive)").fetchall()

    def close(self) -> None:
        """Let go of the connection."""
        self._connection.close()

    def _transaction(self) -> Transaction:
        return Transaction(self._connection, self._now_ms(), self._boot_id)

    def _settle(self, batch: Sequence[Request], transaction: Transaction, error: sqlite3.Error) -> None:
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
            fail(batch, OutcomeUnknown("a commit", reason=reason.message, hint="read back what was written"))
        elif not happened:
            fail(batch, reason)

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


def _apply(request: Request, transaction: Transaction) -> None:
    try:
        request.result = request.apply(transaction)
    except ForebayError as error:
        request.error = error


def fail(batch: Sequence[Request], error: ForebayError) -> None:
    """Answer every request with the same error."""
    for request in batch:
        request.error = error
