"""The file of the embedded coordinator: finding it, recognising it, opening it, and naming what is wrong.

A file is opened only when it is empty, or when it is a database that carries our application id. Everything
else is somebody's data and is left as it is. sqlite alone would tell too late (it creates tables in any
database) and too vaguely ("unable to open database file").

Writers take turns with a flock on a second file. sqlite's own lock sleeps and retries, and under load one
process can hold it while another gets nothing; the kernel serves a flock in the order of arrival. The turn
file is never removed: two processes could then hold locks on two files of one name.

A flock belongs to everybody who has the open file, and a forked child has it too. The child lets go of it at
once: else it would hold the turn of a parent that was killed, for as long as it lives itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import time
from pathlib import Path

from forebay.errors import (
    AccessDenied,
    NotDone,
    NotFound,
    StorageDamaged,
    StorageFull,
    Unavailable,
    Unsupported,
)

__all__ = [
    "SqliteFile",
    "close_turn",
    "end_turn",
    "is_busy",
    "make_durable_directory",
    "set_patience",
    "sync_directory",
    "take_turn",
    "translate",
    "try_turn",
]

SQLITE_VERSION_MIN = (3, 35, 0)
BUSY_TIMEOUT_S = 30.0
"""How long a statement waits for sqlite's own locks. The turn file keeps this rare."""
OPEN_TIMEOUT_S = 30.0
"""How long opening waits for its turn before it says who might be in the way."""
CHECKPOINT_PAGES = 4000
"""Pages of write-ahead log after which a commit also moves them into the database. The log is then written
from its beginning again, and a sync that need not make a file longer takes half the time. A large commit is
100 pages, and mostly the same ones as the commit before: moved at every thousand, they cost a fifth of its
time. More than 4,062 would give readers a second table to look for every page in."""
LOOP_CHECKPOINT_PAGES = 2 * CHECKPOINT_PAGES
"""The same for commits by an event loop, which asks a thread for it long before that."""
APPLICATION_ID = 0x46424359
"""'FBCY' in the header of the file: this database is ours."""
SCHEMA_VERSION = 1

_HEADER = b"SQLite format 3\0"
_SCHEMA = (
    """create table kv(
        directory text not null, name text not null, value blob not null, version integer not null,
        session integer, primary key (directory, name)) without rowid""",
    "create index kv_session on kv(session) where session is not null",
    """create table session(
        id integer primary key autoincrement, timeout_ms integer not null,
        expires_ms integer not null, boot_id text not null)""",
    # One row. `version` is the last version given out, and grows with every commit that changes a key.
    "create table counter(id integer primary key check (id = 0), version integer not null)",
    "insert into counter values (0, 0)",
)
_NETWORK_FILE_SYSTEMS = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "glusterfs"),
    *("fuse.sshfs", "fuse.s3fs", "fuse.glusterfs", "fuse.rclone", "fuse.gcsfuse"),
}

_open_turns: set[int] = set()
"""Descriptors of turn files of this process."""


class SqliteFile:
    """One database file that is known to be ours, and the turn file beside it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.turn_path = path.with_name(path.name + ".turn")
        if sqlite3.sqlite_version_info < SQLITE_VERSION_MIN:
            raise Unsupported(
                f"sqlite {sqlite3.sqlite_version} is too old",
                hint="use a Python built with sqlite 3.35 or newer",
            )
        try:
            if not path.parent.is_dir():
                raise NotFound(str(path.parent), hint="create the directory first, or give another path")
            _refuse_network(path.parent)
            _refuse_foreign(path)
            self._prepare()
        except OSError as error:
            raise _translate_os(error, path) from error
        except sqlite3.Error as error:
            raise translate(error, path) from error

    def connect(self) -> sqlite3.Connection:
        """A connection in autocommit mode. It may move to another thread, but serves one at a time."""
        connection = sqlite3.connect(
            self.path, isolation_level=None, timeout=BUSY_TIMEOUT_S, check_same_thread=False
        )
        try:
            connection.execute("pragma synchronous = full")
            connection.execute(f"pragma wal_autocheckpoint = {CHECKPOINT_PAGES}")
            # A file that was swapped for a foreign one after we looked must not be written to.
            [(application,)] = connection.execute("pragma application_id").fetchall()
            if application != APPLICATION_ID:
                raise _foreign(self.path, "it is the database of another program")
        except BaseException:
            connection.close()
            raise
        return connection

    def connect_loop(self) -> sqlite3.Connection:
        """A connection for an event loop: it waits for no lock, and leaves checkpoints to others."""
        connection = self.connect()
        connection.execute(f"pragma wal_autocheckpoint = {LOOP_CHECKPOINT_PAGES}")
        set_patience(connection, 0.0)
        return connection

    def open_turn(self) -> int:
        """A descriptor for `turn`, for `close_turn`. Each one takes its turns by itself."""
        descriptor = os.open(self.turn_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        _open_turns.add(descriptor)
        return descriptor

    def _prepare(self) -> None:
        descriptor = self.open_turn()
        try:
            _wait_for_turn(descriptor, self.turn_path)
            try:
                with contextlib.closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
                    self._create_or_check(connection)
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            close_turn(descriptor)

    def _create_or_check(self, connection: sqlite3.Connection) -> None:
        [(application,)] = connection.execute("pragma application_id").fetchall()
        [(version,)] = connection.execute("pragma user_version").fetchall()
        [(tables,)] = connection.execute("select count(*) from sqlite_schema").fetchall()
        if application == APPLICATION_ID:
            if version != SCHEMA_VERSION:
                raise StorageDamaged(
                    f"{self.path} has layout {version}, this release knows {SCHEMA_VERSION}",
                    hint="use the release of Forebay that wrote it",
                )
            connection.execute("select version from counter").fetchall()
            return
        if application != 0 or version != 0 or tables != 0:
            raise _foreign(self.path, "it is the database of another program")
        [(mode,)] = connection.execute("pragma journal_mode = wal").fetchall()
        if mode != "wal":
            raise Unsupported(
                f"{self.path.parent} cannot hold a write-ahead log", hint="use a directory on a local disk"
            )
        connection.execute("pragma synchronous = full")
        connection.execute("begin immediate")
        for statement in _SCHEMA:
            connection.execute(statement)
        connection.execute(f"pragma application_id = {APPLICATION_ID}")
        connection.execute(f"pragma user_version = {SCHEMA_VERSION}")
        connection.execute("commit")
        sync_directory(self.path.parent)


def set_patience(connection: sqlite3.Connection, seconds: float) -> None:
    """How long statements on this connection wait for the locks of sqlite."""
    connection.execute(f"pragma busy_timeout = {int(seconds * 1000)}")


def is_busy(error: sqlite3.Error) -> bool:
    """Whether somebody else held a lock of sqlite."""
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF == sqlite3.SQLITE_BUSY


def take_turn(descriptor: int) -> bool:
    """Wait for our turn to write. Whether we had to; an OSError means that there is no turn."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return True
    return False


def try_turn(descriptor: int) -> bool:
    """Take the turn if it is to be had at once."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def end_turn(descriptor: int) -> None:
    """Let the next one in."""
    # What was committed is committed: a lock that cannot be let go shows when the next turn is asked for.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def close_turn(descriptor: int) -> None:
    """Let go of what `open_turn` gave, and of the turn."""
    _open_turns.discard(descriptor)
    os.close(descriptor)


def _close_turns_after_fork() -> None:
    while _open_turns:
        with contextlib.suppress(OSError):
            os.close(_open_turns.pop())


os.register_at_fork(after_in_child=_close_turns_after_fork)


def make_durable_directory(path: Path) -> None:
    """Create `path` and its parents so that they survive a power failure."""
    try:
        missing = [part for part in (path, *path.parents) if not part.exists()]
        for part in reversed(missing):
            part.mkdir(exist_ok=True)
            sync_directory(part.parent)
    except OSError as error:
        raise _translate_os(error, path) from error
    if not path.is_dir():
        raise StorageDamaged(f"{path} is not a directory", hint="give another path, or move the file away")


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def translate(error: sqlite3.Error, path: Path) -> NotDone:
    """The error of ours that says what sqlite's means and what to do about it."""
    code = getattr(error, "sqlite_errorcode", None)
    primary = code & 0xFF if code is not None else None
    where = f"{path}: {error}"
    if primary == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE:
        return StorageFull(where, hint="free some space on that disk, then try again")
    if primary in (
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_AUTH,
    ):
        return AccessDenied(where, hint="the file and its directory must be writable for this user")
    if primary == sqlite3.SQLITE_NOTADB:
        return _foreign(path, "it is not a database")
    if primary == sqlite3.SQLITE_CORRUPT or (isinstance(error, sqlite3.DatabaseError) and code is None):
        return StorageDamaged(
            where, hint="restore the file from a backup, or move it away to begin with an empty one"
        )
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Unavailable(where, hint="another program holds the database; close it and try again")
    if primary == sqlite3.SQLITE_ERROR and "no such table" in str(error):
        return StorageDamaged(where, hint="the file was emptied or replaced while in use; open it again")
    return Unavailable(where, hint="the disk may be failing or full; see the system log")


def _translate_os(error: OSError, path: Path) -> NotDone:
    where = f"{error.filename or path}: {error.strerror}"
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return AccessDenied(where, hint="the file and its directory must be writable for this user")
    if error.errno in (errno.EFBIG, errno.ENOSPC, errno.EDQUOT):
        return StorageFull(where, hint="free some space on that disk, then try again")
    if isinstance(error, IsADirectoryError | NotADirectoryError | FileExistsError):
        return StorageDamaged(where, hint="something else lies at that path; give another one")
    return Unavailable(where, hint="the disk may be failing; see the system log")


def _foreign(path: Path, reason: str) -> StorageDamaged:
    return StorageDamaged(
        f"{path} cannot be used: {reason}", hint="it was left as it is; give another path, or move it away"
    )


def _refuse_foreign(path: Path) -> None:
    try:
        with path.open("rb") as file:
            header = file.read(len(_HEADER))
    except FileNotFoundError:
        return
    if header and header != _HEADER:
        raise _foreign(path, "it is not a database")


def _refuse_network(directory: Path) -> None:
    kind = _file_system(directory)
    if kind in _NETWORK_FILE_SYSTEMS:
        raise Unsupported(
            f"{directory} is on a network file system ({kind})",
            hint="put it on a local disk, or use an oxia:// coordinator for several machines",
        )


def _file_system(directory: Path) -> str | None:
    """The type of the file system that holds `directory`, where the kernel tells."""
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) > 2 and fields[2] == number and after:
            return after.split()[0]
    return None


def _wait_for_turn(descriptor: int, path: Path) -> None:
    """Take the turn without waiting for ever: opening may run on an event loop."""
    deadline = time.monotonic() + OPEN_TIMEOUT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"{path} is held by another process that does not let go",
                    hint="find the process (lsof or fuser on that file); it may be stopped",
                ) from None
        time.sleep(0.002)
