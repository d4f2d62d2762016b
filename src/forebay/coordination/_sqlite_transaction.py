"""What one write transaction of the embedded coordinator does to the tables.

Everything runs on the writer's connection between BEGIN IMMEDIATE and COMMIT, so it sees the state as of its
turn, and time is read there too: nobody can slip in between the check of a session and the write it allows.
Puts go to sqlite many at once: those that nothing can refuse, and those under a condition, which is part of
their statement. If all were done, as nearly always, the number of rows says so. Else each one is looked at by
itself, to see whether it was done, and if not, why. A record of a session that is over does not refuse
anything: the session is expired on the spot.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence

from forebay.coordination._api import Delete, DeleteRange, Operation, Put, When, WriteResult, directory_of
from forebay.errors import PreconditionFailed, SessionExpired
from forebay.kit.conditions import ABSENT, ANY, Condition

__all__ = ["Transaction", "expired", "plain_refusal", "range_condition"]

_PUT = "insert or replace into kv values (?, ?, ?, ?, ?)"
_CREATE = "insert into kv values (?, ?, ?, ?, ?) on conflict do nothing"
_REPLACE = (
    "update kv set value = ?, version = ?, session = ? where directory = ? and name = ? and version = ?"
)
_CREATE_PLAIN = "insert into kv values (?, ?, ?, ?, null) on conflict do nothing"
_REPLACE_PLAIN = (
    "update kv set value = ?, version = ?, session = null where directory = ? and name = ? and version = ?"
)
_FIND = "select version, session from kv where directory = ? and name = ?"
_DELETE = "delete from kv where directory = ? and name = ?"
_DONE = WriteResult()
_ROW_FIELDS = 4
_STATEMENT_ROWS = 50
"""Rows of one statement. One statement per row would take twice as long, and more rows gain nothing."""
_OVER = " on conflict do update set value = excluded.value, version = excluded.version, session = null"
_PUT_PLAIN = "insert into kv values (?, ?, ?, ?, null)" + _OVER
_PUT_ROWS = "insert into kv values " + ", ".join(["(?, ?, ?, ?, null)"] * _STATEMENT_ROWS) + _OVER
_VERSION_MAX = 2**63 - 1
_DEAD = "from session where expires_ms <= ? or boot_id <> ?"


class Transaction:
    """The open transaction. `version` is the last version given out; `changed` tells whether it moved."""

    def __init__(self, connection: sqlite3.Connection, now_ms: int, boot_id: str) -> None:
        self._connection = connection
        self._now_ms = now_ms
        self._boot_id = boot_id
        self._alive: dict[int, bool] = {}
        [(version,)] = connection.execute("select version from counter").fetchall()
        self.first_version = int(version)
        self.version = int(version)

    @property
    def changed(self) -> bool:
        """Whether any key changed."""
        return self.version != self.first_version

    def finish(self) -> None:
        """Store the counter, as the last statement before the commit."""
        if self.changed:
            self._connection.execute("update counter set version = ?", (self.version,))

    # -- keys

    def write(self, operations: Sequence[Operation], session_ids: Mapping[int, int]) -> list[WriteResult]:
        """Puts, then deletes, then range deletes, each answered by itself. `session_ids` are by place."""
        results = [_DONE] * len(operations)
        rest = self._put_all(operations, session_ids, results)
        for index in rest:
            operation = operations[index]
            if isinstance(operation, Delete):
                results[index] = self._delete(operation)
        for index in rest:
            operation = operations[index]
            if isinstance(operation, DeleteRange):
                self._delete_range(operation)
        return results

    def _put_all(
        self,
        operations: Sequence[Operation],
        session_ids: Mapping[int, int],
        results: list[WriteResult],
    ) -> list[int]:
        """Do the puts; the places of what is none. Those without a session go to sqlite together."""
        rest: list[int] = []
        rows: list[str | bytes | int] = []
        conditional: dict[str, tuple[int, Put]] = {}
        for index, operation in enumerate(operations):
            if not isinstance(operation, Put):
                rest.append(index)
            elif index in session_ids:
                self._put_rows(rows)
                self._put_conditional(conditional, results)
                results[index] = self._put(operation, session_ids[index])
            elif operation.when is ANY:
                self._put_conditional(conditional, results)
                self.version += 1
                directory, _, name = operation.key.rpartition("/")
                rows += (directory, name, operation.value, self.version)
                results[index] = WriteResult(self.version)
            else:
                if rows:
                    self._put_rows(rows)
                if operation.key in conditional:
                    self._put_conditional(conditional, results)
                conditional[operation.key] = index, operation
        self._put_rows(rows)
        self._put_conditional(conditional, results)
        return rest

    def _put_conditional(self, puts: dict[str, tuple[int, Put]], results: list[WriteResult]) -> None:
        """Do puts of different keys under conditions, given with their places, and forget them."""
        if not puts:
            return
        version = first = self.version
        creates, changes = [], []
        for key, (_, put) in puts.items():
            version += 1
            directory, _, name = key.rpartition("/")
            if isinstance(put.when, int):
                changes.append((put.value, version, directory, name, min(put.when, _VERSION_MAX)))
            else:
                creates.append((directory, name, put.value, version))
        done = self._connection.executemany(_CREATE_PLAIN, creates).rowcount if creates else 0
        done += self._connection.executemany(_REPLACE_PLAIN, changes).rowcount if changes else 0
        # Without a change the counter stays where it is: then nothing has to be synced.
        self.version = version if done else first
        all_done = done == len(puts)
        for version, (index, put) in enumerate(puts.values(), first + 1):
            if all_done or (done and self._has_version(put.key, version)):
                results[index] = WriteResult(version)
            else:
                results[index] = self._put(put, None)
        puts.clear()

    def _has_version(self, key: str, version: int) -> bool:
        found = self._find(key)
        return found is not None and found[0] == version

    def _put_rows(self, rows: list[str | bytes | int]) -> None:
        """Write the rows, given as one list of all their fields, and forget them."""
        step = _ROW_FIELDS * _STATEMENT_ROWS
        whole = len(rows) // step * step
        for start in range(0, whole, step):
            self._connection.execute(_PUT_ROWS, rows[start : start + step])
        for start in range(whole, len(rows), _ROW_FIELDS):
            self._connection.execute(_PUT_PLAIN, rows[start : start + _ROW_FIELDS])
        rows.clear()

    def _put(self, put: Put, session_id: int | None) -> WriteResult:
        if session_id is not None and not self._session_alive(session_id):
            return WriteResult(error=expired(session_id, f"{put.key!r} was not written"))
        while not self._try_put(put, session_id):
            if (refusal := self._refusal(put)) is not None:
                return WriteResult(error=refusal)
        self.version += 1
        return WriteResult(version=self.version)

    def _try_put(self, put: Put, session_id: int | None) -> bool:
        directory, _, name = put.key.rpartition("/")
        version = self.version + 1
        if put.when is ANY or put.when is ABSENT:
            statement = _PUT if put.when is ANY else _CREATE
            row = (directory, name, put.value, version, session_id)
            return self._connection.execute(statement, row).rowcount == 1
        change = (put.value, version, session_id, directory, name, _bindable(put.when))
        return self._connection.execute(_REPLACE, change).rowcount == 1

    def _delete(self, delete: Delete) -> WriteResult:
        while not self._try_delete(delete):
            if (refusal := self._refusal(delete)) is not None:
                return WriteResult(error=refusal)
        return WriteResult()

    def _try_delete(self, delete: Delete) -> bool:
        if delete.when is ABSENT:
            return self._find(delete.key) is None
        directory, _, name = delete.key.rpartition("/")
        if delete.when is ANY:
            self._count(self._connection.execute(_DELETE, (directory, name)).rowcount)
            return True
        cursor = self._connection.execute(
            f"{_DELETE} and version = ?", (directory, name, _bindable(delete.when))
        )
        return self._count(cursor.rowcount)

    def _delete_range(self, delete: DeleteRange) -> None:
        directory = directory_of(delete.start)
        query, bounds = range_condition(delete.start, delete.end)
        self._count(self._connection.execute(f"delete from kv where {query}", (directory, *bounds)).rowcount)

    def _count(self, rows: int) -> bool:
        """Deletes move the counter too, so that it names the commit: watches and recovery go by it."""
        self.version += rows > 0
        return rows > 0

    def _find(self, key: str) -> tuple[int, int | None] | None:
        directory, _, name = key.rpartition("/")
        rows: list[tuple[int, int | None]] = self._connection.execute(_FIND, (directory, name)).fetchall()
        return rows[0] if rows else None

    def _refusal(self, operation: Put | Delete) -> PreconditionFailed | None:
        """Why the condition does not hold; None where that was a record of a session that is over."""
        found = self._find(operation.key)
        if found is None:
            return PreconditionFailed(operation.key, expected=operation.when, actual=ABSENT)
        version, session_id = found
        if session_id is None or self._session_alive(session_id):
            return PreconditionFailed(operation.key, expected=operation.when, actual=version)
        self.end_sessions([session_id])
        return None

    # -- sessions

    def open_session(self, timeout_ms: int) -> int:
        """Begin a session; its id is never used again."""
        row = (timeout_ms, self._now_ms + timeout_ms, self._boot_id)
        cursor = self._connection.execute(
            "insert into session(timeout_ms, expires_ms, boot_id) values (?, ?, ?)", row
        )
        session_id = cursor.lastrowid
        assert session_id is not None
        return session_id

    def renew_session(self, session_id: int) -> None:
        """Give a living session its full timeout again. Raises `SessionExpired`."""
        if not self._session_alive(session_id):
            raise expired(session_id, "it can no longer be renewed")
        self._connection.execute(
            "update session set expires_ms = ? + timeout_ms where id = ?", (self._now_ms, session_id)
        )

    def end_sessions(self, session_ids: Sequence[int]) -> None:
        """Drop sessions with their keys. Silent where they are over already."""
        for session_id in session_ids:
            self._alive[session_id] = False
            self._connection.execute("delete from session where id = ?", (session_id,))
            cursor = self._connection.execute("delete from kv where session = ?", (session_id,))
            self._count(cursor.rowcount)

    def expire_sessions(self) -> None:
        """Drop every session whose time is over, or that another boot of the machine has left."""
        dead = self._connection.execute(f"select id {_DEAD}", (self._now_ms, self._boot_id)).fetchall()
        self.end_sessions([session_id for (session_id,) in dead])

    def _session_alive(self, session_id: int) -> bool:
        alive = self._alive.get(session_id)
        if alive is None:
            query = "select 1 from session where id = ? and expires_ms > ? and boot_id = ?"
            row = (session_id, self._now_ms, self._boot_id)
            alive = self._alive[session_id] = bool(self._connection.execute(query, row).fetchall())
        return alive


def _bindable(when: When) -> When:
    """No record has a version that sqlite cannot hold: the highest one it can refuses as well."""
    return when if isinstance(when, Condition) else min(when, _VERSION_MAX)


def plain_refusal(connection: sqlite3.Connection, put: Put) -> PreconditionFailed | None:
    """Why the version that `put` names is not there, by one read outside of a transaction.

    The caller holds the turn, so what is read stays true until it lets go. None also where only a transaction
    can tell: other conditions, and records of a session that may be over.
    """
    if isinstance(put.when, Condition):
        return None
    directory, _, name = put.key.rpartition("/")
    rows = connection.execute(_FIND, (directory, name)).fetchall()
    if not rows:
        return PreconditionFailed(put.key, expected=put.when, actual=ABSENT)
    [(version, session_id)] = rows
    if version == put.when or session_id is not None:
        return None
    return PreconditionFailed(put.key, expected=put.when, actual=version)


def range_condition(start: str, end: str) -> tuple[str, tuple[str, ...]]:
    """The condition for the leaves of a range; its parameters follow that of the directory."""
    low = start.rpartition("/")[2]
    if end.endswith("//"):
        return "directory = ? and name >= ?", (low,)
    return "directory = ? and name >= ? and name < ?", (low, end.rpartition("/")[2])


def expired(session_id: int, consequence: str) -> SessionExpired:
    """The error for a session that is over."""
    return SessionExpired(
        f"session {session_id} is over, {consequence}", hint="open a new session, claim again"
    )
