"""The local store as plain blocking functions.

    lock stripe -> compare version -> write temp, set version, fsync -> rename -> fsync directory -> unlock

The version is an attribute of the same inode as the data, so a reader opens once and takes both from one
descriptor; they always agree, without a lock. It is random and never comes back, not even after a delete.
fsync and not fdatasync, because the attribute is metadata.

A file that another tool put here has no version. It gets one from inode, time and size, marked as foreign:
good enough to notice a replacement, and as weak as those three are.

Rejected: numbered versions made with link(2). Once an old number is deleted, a stale writer can make it
again and win, and an acknowledged update is lost.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from forebay.errors import ForebayError, NotFound, OutcomeUnknown, PreconditionFailed, Unavailable
from forebay.kit.conditions import ABSENT, ANY, Condition
from forebay.kit.disk_writes import begin_write_out
from forebay.storage._api import DeleteResult, KeyConflict, ObjectInfo, When
from forebay.storage._local._directories import RACES_MAX, Directories
from forebay.storage._local._errors import EFFECT_UNKNOWN, from_os_error, reported
from forebay.storage._local._locks import Held, Stripes
from forebay.storage._source import Source, pieces_of

__all__ = ["NOT_THERE", "READ_FLAGS", "Body", "LocalFiles", "OpenObject", "Turn"]

Body: TypeAlias = Sequence[bytes | memoryview] | Source
"""What becomes an object: parts in memory, or what is read while it is written."""

VERSION_ATTRIBUTE = "user.forebay.version"
FOREIGN = "foreign"
"""How the version of a file begins that another tool wrote."""
# O_NONBLOCK: opening a pipe that somebody put here must not wait for a writer.
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""How an object is opened for reading."""
NOT_THERE = (FileNotFoundError, NotADirectoryError)
"""What opening a key raises under which there is no object."""
PARTS_PER_WRITE = 1024
"""Buffers that the kernel takes in one call."""
PORTION_BYTES = 1024 * 1024
"""Bytes of a larger object that the disk gets at once, while the next are copied: 4 MiB are durable in three
quarters of the time, 64 MiB in little more than half."""


@dataclass(frozen=True, slots=True)
class OpenObject:
    """One inode: whatever is renamed over its name, data and version stay a pair."""

    key: str
    descriptor: int
    size: int
    version: str
    modified_ms: int

    def info(self) -> ObjectInfo:
        """What a head request tells."""
        return ObjectInfo(self.key, self.size, self.version, self.modified_ms)


class Turn:
    """The right to write one key, as long as its block lasts."""

    def __init__(self, files: LocalFiles, key: str, held: Held) -> None:
        self._files = files
        self._key = key
        self._held = held

    @property
    def waited(self) -> bool:
        """Whether others were first, so that the key may have changed since its reader read it."""
        return self._held.waited

    def put(self, body: Body, when: When) -> str:
        """Replace the object durably if `when` holds; the new version."""
        return self._files.replace(self._key, body, when, self._held)


class LocalFiles:
    """Objects as files under one root."""

    def __init__(self, root: Path, new_version: Callable[[], str]) -> None:
        self.root = root
        self._base = f"{root}/"
        self._new_version = new_version
        self._directories = Directories(root)
        self._stripes = Stripes(root, self._directories)

    def path(self, key: str) -> str:
        """The file of an object."""
        return self._base + key

    @contextmanager
    def opened(self, key: str) -> Iterator[OpenObject]:
        """The object under `key`, open for reading. Raises `NotFound`."""
        with reported(f"reading {key!r}"):
            try:
                descriptor = os.open(self._base + key, READ_FLAGS)
            except NOT_THERE:
                raise NotFound(key) from None
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENXIO):
                    raise NotFound(key, hint="something else than a plain file lies there") from None
                raise
            try:
                yield _inspect(key, descriptor)
            finally:
                os.close(descriptor)

    @contextmanager
    def turn(self, key: str) -> Iterator[Turn]:
        """The turn to write `key`: until the block ends nobody else can."""
        with reported(f"writing {key!r}"), self._stripes.locked(key) as held:
            yield Turn(self, key, held)

    def replace(self, key: str, body: Body, when: When, held: Held) -> str:
        """Replace the object durably if `when` holds; the new version."""
        found = self._found(key, when)
        if when is not ANY and when != found:
            raise PreconditionFailed(key, expected=when, actual=found)
        version = self._new_version()
        self._write_and_rename(key, held.temps + version, body, version)
        return version

    def delete(self, keys: Sequence[str]) -> list[DeleteResult]:
        """Delete directory by directory, so that each of them is synced once."""
        errors: dict[str, ForebayError | None] = {}
        by_directory: dict[str, list[str]] = {}
        for key in dict.fromkeys(keys):
            by_directory.setdefault(key.rpartition("/")[0], []).append(key)
        for directory, members in by_directory.items():
            errors.update(self._delete_in(directory, members))
        return [DeleteResult(key, errors[key]) for key in keys]

    def sweep(self, *, wait: bool) -> int:
        """Remove what killed writers left; how many files it was."""
        with reported(f"sweeping {str(self.root)!r}"):
            return self._stripes.sweep(wait=wait)

    def _found(self, key: str, when: When) -> str | Condition:
        """The version that lies under `key`, or ABSENT. Raises where no object can be put.

        Under ANY the version is not read: what is there will be replaced.
        """
        for _ in range(RACES_MAX):
            if when is not ANY:
                with suppress(NotFound), self.opened(key) as found:
                    return found.version
            try:
                mode = os.lstat(self._base + key).st_mode
            except NOT_THERE:
                return ABSENT
            if stat.S_ISREG(mode):
                if when is ANY:
                    return ANY
                continue  # It was put there after we looked.
            if not isinstance(when, Condition):
                return ABSENT
            if not stat.S_ISDIR(mode):
                raise KeyConflict(key, "something else than a plain file lies there")
            self._clear_directory(key)
        raise Unavailable(f"{key!r} keeps changing between file and directory", hint="try again")

    def _clear_directory(self, key: str) -> None:
        try:
            self._directories.remove_empty_tree(key)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise KeyConflict(key, "it is a directory of other keys") from None
            raise

    def _write_and_rename(self, key: str, temp: str, body: Body, version: str) -> None:
        directory, _, name = key.rpartition("/")
        try:
            try:
                _write_durably(key, temp, body, version)
            except FileNotFoundError:
                self._stripes.make_temps()
                _write_durably(key, temp, body, version)
            self._rename(key, temp, directory, name)
        except BaseException:
            with suppress(OSError):
                os.unlink(temp)  # noqa: PTH108 - the path is text on purpose
            self._directories.prune(directory)
            raise

    def _rename(self, key: str, temp: str, directory: str, name: str) -> None:
        for _ in range(RACES_MAX):
            try:
                with self._directories.opened(directory) as descriptor:
                    os.rename(temp, name, dst_dir_fd=descriptor)
                    _sync_after_change(descriptor, f"writing {key!r}")
                return
            except FileNotFoundError:
                continue  # The directory was removed, being empty, after we opened it.
            except IsADirectoryError:
                self._clear_directory(key)
            except NotADirectoryError:
                raise KeyConflict(key, "it would lie below another object") from None
            except OSError as error:
                if error.errno in EFFECT_UNKNOWN:
                    raise OutcomeUnknown(f"writing {key!r}", reason=str(error.strerror)) from error
                raise
        raise Unavailable(f"writing {key!r}: its directory keeps vanishing", hint="try again")

    def _delete_in(self, directory: str, keys: list[str]) -> dict[str, ForebayError | None]:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            descriptor = os.open(self.root / directory, flags)
        except NOT_THERE:
            return dict.fromkeys(keys)
        except OSError as error:
            return dict.fromkeys(keys, from_os_error(error, f"deleting in {directory!r}"))
        try:
            results = {key: self._unlink(key, descriptor) for key in keys}
            _sync_after_change(descriptor, f"deleting in {directory!r}")
        except OutcomeUnknown as unknown:
            results = {key: error or unknown for key, error in results.items()}
        finally:
            os.close(descriptor)
        self._directories.prune(directory)
        return results

    def _unlink(self, key: str, descriptor: int) -> ForebayError | None:
        name = key.rpartition("/")[2]
        operation = f"deleting {key!r}"
        try:
            if not _is_object(name, descriptor):
                return None
            with self._stripes.locked(key):
                if _is_object(name, descriptor):
                    os.unlink(name, dir_fd=descriptor)
        except ForebayError as error:
            return error
        except OSError as error:
            if error.errno in EFFECT_UNKNOWN:
                return OutcomeUnknown(operation, reason=str(error.strerror))
            return from_os_error(error, operation)
        return None


def _inspect(key: str, descriptor: int) -> OpenObject:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise NotFound(key)
    try:
        version = os.getxattr(descriptor, VERSION_ATTRIBUTE).decode("ascii", "replace")
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.ENOTSUP):
            raise
        version = f"{FOREIGN}-{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"
    return OpenObject(key, descriptor, status.st_size, version, status.st_mtime_ns // 1_000_000)


def _is_object(name: str, descriptor: int) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode)
    except NOT_THERE:
        return False


def _write_durably(key: str, temp: str, body: Body, version: str) -> None:
    descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        # First, so that a file system without attributes is found out before the data is on its way.
        os.setxattr(descriptor, VERSION_ATTRIBUTE, version.encode())
        if isinstance(body, Source):
            # Through our memory and not by copy_file_range: a source has checked exactly these bytes.
            end = 0
            for piece in pieces_of(key, body):
                end = _write_ahead(descriptor, end, [memoryview(piece)])
        else:
            _write_ahead(descriptor, 0, body)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_ahead(descriptor: int, end: int, parts: Sequence[bytes | memoryview]) -> int:
    """Write parts behind `end`, and let the disk begin with every portion that is whole. Where they end."""
    for portion in _portions(parts, PORTION_BYTES - end % PORTION_BYTES):
        _write_all(descriptor, portion)
        begun, end = end - end % PORTION_BYTES, end + sum([len(part) for part in portion])
        if end - begun >= PORTION_BYTES:
            begin_write_out(descriptor, begun, end - begun)
    return end


def _portions(parts: Sequence[bytes | memoryview], room: int) -> Iterator[Sequence[bytes | memoryview]]:
    """Parts cut and put together into portions: the first has `room` bytes, and none has more parts than the
    kernel takes."""
    if len(parts) <= PARTS_PER_WRITE and sum([len(part) for part in parts]) <= room:
        yield parts
        return
    portion: list[bytes | memoryview] = []
    for part in parts:
        left = memoryview(part)
        while left:
            piece, left = left[:room], left[room:]
            portion.append(piece)
            room -= len(piece)
            if not room or len(portion) == PARTS_PER_WRITE:
                yield portion
                portion = []
                room = room or PORTION_BYTES
    if portion:
        yield portion


def _write_all(descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
    if len(parts) == 1:
        _write_rest(descriptor, memoryview(parts[0]))
        return
    written = os.writev(descriptor, parts)
    if written < sum([len(part) for part in parts]):
        # Cut short: by a full disk, mostly, which the next write names.
        _write_rest(descriptor, memoryview(b"".join(parts))[written:])


def _write_rest(descriptor: int, rest: memoryview) -> None:
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _sync_after_change(descriptor: int, operation: str) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OutcomeUnknown(
            operation,
            reason=f"done, but the directory could not be synced: {error.strerror}",
            hint="it is visible now and may be undone by a power cut; check the disk, then write it again",
        ) from error
