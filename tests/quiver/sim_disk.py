"""A disk in memory that behaves as badly as a real one may.

What was not synced may be lost, applied in part, or torn in the middle, each write on its own; names that
were made, renamed or removed since the last sync of their directory come back as some earlier state of it.
Any operation can fail, the disk can fill up, and everything can stop before any operation.
"""

from __future__ import annotations

import asyncio
import errno
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from forebay.kit.clock import Clock
from forebay.quiver._disk import Lane, Piece

T = TypeVar("T")
SECTOR_BYTES = 512


class SimCrash(BaseException):
    """Power is gone."""


class _Inode:
    def __init__(self) -> None:
        self.data = bytearray()
        self.durable = b""
        self.pending: list[tuple[int, bytes] | int] = []
        """Writes (offset, data) and truncations (size) since the last sync."""


class SimDisk:
    """See the module. `crash_at` counts operations from 1."""

    def __init__(self, rng: random.Random | None = None, clock: Clock | None = None) -> None:
        self.rng = rng or random.Random(0)
        self.clock = clock
        self.names: dict[str, _Inode] = {}
        self.durable_names: dict[str, _Inode] = {}
        self.pending_names: list[tuple[str, dict[str, _Inode | None]]] = []
        self.directories = {""}
        self.locked = False
        self.operations = 0
        self.crash_at: int | None = None
        self.crashed = False
        self.on_crash: Callable[[], None] = lambda: None
        self.capacity: int | None = None
        self.faults: list[tuple[str, str, int]] = []
        """(operation, part of the name, errno), each used once."""
        self.fail_at: tuple[int, int] | None = None
        """The number of an operation, and the error it fails with."""
        self.history: list[str] = []
        self.lanes: dict[str, asyncio.Lock] = {}
        self.tears_sectors = False
        """Whether each sector of a write survives a loss of power on its own, in any order."""
        self.delays: dict[str, float] = {}
        """Seconds that work in a lane takes longer."""
        self.tasks: set[asyncio.Task[None]] = set()
        self.under_way: Counter[str] = Counter()
        self.lane_counts: Counter[str] = Counter()
        """Jobs that each lane was given."""
        self.run_here_count = 0

    # What the tests do to it.

    def flip(self, name: str, offset: int) -> None:
        inode = self.names[name]
        inode.data[offset] ^= 0x40
        durable = bytearray(inode.durable)
        durable[offset] ^= 0x40
        inode.durable = bytes(durable)

    def files(self, prefix: str = "") -> dict[str, bytes]:
        return {
            name: bytes(each.data) for name, each in sorted(self.names.items()) if name.startswith(prefix)
        }

    @property
    def used_bytes(self) -> int:
        return sum(len(inode.data) for inode in set(self.names.values()))

    def after_crash(self, *, power_loss: bool) -> SimDisk:
        """The disk as the next process finds it."""
        new = SimDisk(self.rng, self.clock)
        new.directories = set(self.directories)
        new.tears_sectors = self.tears_sectors
        names = dict(self.names)
        if power_loss:
            names = dict(self.durable_names)
            by_directory: dict[str, list[dict[str, _Inode | None]]] = {}
            for directory, change in self.pending_names:
                by_directory.setdefault(directory, []).append(change)
            for changes in by_directory.values():
                for change in changes[: self.rng.randint(0, len(changes))]:
                    for name, inode in change.items():
                        if inode is None:
                            names.pop(name, None)
                        else:
                            names[name] = inode
        for name, inode in names.items():
            fresh = _Inode()
            fresh.data = self._surviving(inode) if power_loss else bytearray(inode.data)
            fresh.durable = bytes(fresh.data)
            new.names[name] = fresh
        new.durable_names = dict(new.names)
        return new

    def _surviving(self, inode: _Inode) -> bytearray:
        data = bytearray(inode.durable)
        for each in inode.pending:
            if self.rng.random() < 0.4:
                continue
            if isinstance(each, int):
                del data[each:]
                continue
            offset, piece = each
            if self.tears_sectors:
                share = self.rng.choice([0.5, 0.9, 1.0])
                for at in range(0, len(piece), SECTOR_BYTES):
                    if self.rng.random() < share:
                        _put(data, offset + at, piece[at : at + SECTOR_BYTES])
                continue
            if self.rng.random() < 0.4:
                piece = piece[: self.rng.randint(0, len(piece))]
            _put(data, offset, piece)
        return data

    # The disk.

    def _step(self, operation: str, name: str) -> None:
        if self.crashed:
            raise SimCrash
        self.operations += 1
        if self.operations == self.crash_at:
            self.crashed = True
            self.history.append(f"crash before {operation} {name}")
            self.on_crash()
            raise SimCrash
        self.history.append(f"{operation} {name}")
        if self.fail_at is not None and self.fail_at[0] == self.operations:
            raise OSError(self.fail_at[1], "injected", name)
        for fault in self.faults:
            if fault[0] == operation and fault[1] in name:
                self.faults.remove(fault)
                raise OSError(fault[2], "injected", name)

    def _change(self, name: str, changes: dict[str, _Inode | None]) -> None:
        for each, inode in changes.items():
            if inode is None:
                self.names.pop(each, None)
            else:
                self.names[each] = inode
        self.pending_names.append((name.rpartition("/")[0], changes))

    def open(self, name: str, *, create: bool = False) -> SimFile:
        self._step("open", name)
        if create:
            if name in self.names:
                raise FileExistsError(errno.EEXIST, "exists", name)
            self._change(name, {name: _Inode()})
        if name not in self.names:
            raise FileNotFoundError(errno.ENOENT, "missing", name)
        return SimFile(self, name, self.names[name])

    def read(self, name: str) -> memoryview:
        self._step("read", name)
        if name not in self.names:
            raise FileNotFoundError(errno.ENOENT, "missing", name)
        return memoryview(bytes(self.names[name].data))

    def read_range(self, name: str, offset: int, size: int) -> bytes:
        self._step("read", name)
        if name not in self.names:
            raise FileNotFoundError(errno.ENOENT, "missing", name)
        return bytes(self.names[name].data[offset : offset + size])

    def list(self, directory: str) -> list[tuple[str, int]]:
        self._step("list", directory)
        if directory not in self.directories:
            raise FileNotFoundError(errno.ENOENT, "missing", directory)
        start = f"{directory}/"
        return sorted(
            (name[len(start) :], len(inode.data))
            for name, inode in self.names.items()
            if name.startswith(start)
        )

    def make_directory(self, directory: str) -> None:
        self._step("mkdir", directory)
        self.directories.add(directory)

    def sync_directory(self, directory: str) -> None:
        self._step("sync_directory", directory)
        rest = []
        for where, changes in self.pending_names:
            if where != directory:
                rest.append((where, changes))
                continue
            for name, inode in changes.items():
                if inode is None:
                    self.durable_names.pop(name, None)
                else:
                    self.durable_names[name] = inode
        self.pending_names = rest

    def rename(self, old: str, new: str) -> None:
        self._step("rename", old)
        if old not in self.names:
            raise FileNotFoundError(errno.ENOENT, "missing", old)
        self._change(new, {new: self.names[old], old: None})

    def remove(self, name: str) -> None:
        self._step("remove", name)
        if name in self.names:
            self._change(name, {name: None})

    def protect(self, name: str) -> None:
        self._step("protect", name)

    def lock(self) -> None:
        self._step("lock", "")
        if self.locked:
            raise BlockingIOError(errno.EAGAIN, "locked")
        self.locked = True

    def unlock(self) -> None:
        self.locked = False

    async def run(self, lane: Lane, work: Callable[[], T]) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def answer(result: T | None, problem: BaseException | None) -> None:
            if future.done():
                return
            if problem is None:
                future.set_result(result)  # type: ignore[arg-type]
            else:
                future.set_exception(problem)

        self.submit(lane, work, answer)
        return await future

    def _seconds(self, lane: Lane) -> float:
        return self.rng.random() / 1000 + self.delays.get(lane, 0.0)

    def submit(
        self, lane: Lane, work: Callable[[], T], done: Callable[[T | None, BaseException | None], None]
    ) -> None:
        async def wait() -> None:
            async with self.lanes.setdefault(lane, asyncio.Lock()):
                await (asyncio.sleep(0) if self.clock is None else self.clock.sleep(self._seconds(lane)))
                self.under_way[lane] -= 1
                self._work(work, done)

        self.under_way[lane] += 1
        self.lane_counts[lane] += 1
        task = asyncio.ensure_future(wait())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def run_here(
        self, lane: Lane, work: Callable[[], T], done: Callable[[T | None, BaseException | None], None]
    ) -> None:
        if self.under_way[lane]:
            self.submit(lane, work, done)
        else:
            self.run_here_count += 1
            self._work(work, done)

    def _work(self, work: Callable[[], T], done: Callable[[T | None, BaseException | None], None]) -> None:
        """Nobody lives on after a crash: whoever waits, waits until the test ends it."""
        result, problem = None, None
        try:
            if self.crashed:
                return
            result = work()
        except SimCrash:
            return
        except Exception as error:
            problem = error
        done(result, problem)

    async def close(self) -> None:
        return


class SimFile:
    def __init__(self, disk: SimDisk, name: str, inode: _Inode) -> None:
        self.disk, self.name, self.inode = disk, name, inode

    def write(self, offset: int, pieces: Sequence[Piece]) -> None:
        data = b"".join(pieces)
        try:
            self.disk._step("write", self.name)
        except OSError:
            self._put(offset, data[: self.disk.rng.randint(0, len(data))])
            raise
        room = None
        if self.disk.capacity is not None:
            grows = offset + len(data) - len(self.inode.data)
            room = max(0, self.disk.capacity - self.disk.used_bytes)
            if grows > room:
                self._put(offset, data[: max(0, len(data) - (grows - room))])
                raise OSError(errno.ENOSPC, "full", self.name)
        self._put(offset, data)

    def write_aside(self, offset: int, pieces: Iterable[Piece]) -> None:
        self.write(offset, list(pieces))

    def _put(self, offset: int, data: bytes) -> None:
        _put(self.inode.data, offset, data)
        self.inode.pending.append((offset, data))

    def truncate(self, size: int) -> None:
        self.disk._step("truncate", self.name)
        del self.inode.data[size:]
        self.inode.pending.append(size)

    def sync(self) -> None:
        self.disk._step("sync", self.name)
        self.inode.durable = bytes(self.inode.data)
        self.inode.pending = []

    def close(self) -> None:
        return


def _put(data: bytearray, offset: int, piece: bytes) -> None:
    if len(data) < offset:
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(piece)] = piece
