"""A process that forks stores and kills them, one after the other, on one directory.

    python -m tests.quiver.crash_nursery DIRECTORY SEED KILLS [held]

Starting an interpreter takes a second, a fork some milliseconds, and this process has no threads when it
forks. A first life writes down every *named point*: an operation on a kind of file, before it and after it.
Each further life dies by SIGKILL at one of them, or at a random moment, until all points had their turn and
KILLS lives are over. Then a last one reads everything. The answer is one line of JSON with the problems.

With `held`, subscribers that keep up get segments before they are files.

Lives tell over a pipe what they did, a line of at most a few bytes at a time, which the kernel writes whole:
`i N` ingest of N begins, `d N` it is durable; `g S N` subscriber S gets N, `a S N` its ack returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.quiver.harness import batch, numbers

from forebay.quiver import LocalDisk, Quiver, QuiverConfig
from forebay.quiver._disk import DiskFile, Piece

CONFIG = QuiverConfig(
    segment_bytes=6_000,
    segment_open_ms=5,
    wal_bytes_max=131_072,
    wal_file_bytes=8_192,
    size_cap_bytes=1 << 26,
    ack_file_bytes=4_096,
    checkpoint_interval_ms=100,
    maintenance_interval_ms=5,
    retry_base_ms=1,
    retry_cap_ms=2,
)
SUBSCRIBERS = ("a", "b")
LIFE_S = 20.0
"""A life that has not met its point by then is killed where it is."""


def kind(operation: str, name: str) -> str:
    """The name of a point: what is done, in which directory, to which kind of file."""
    directory, _, file = name.partition("/")
    return f"{operation} {directory} {file.partition('.')[2]}".strip()


class KillerDisk(LocalDisk):
    """Dies before or after the `hit`-th operation of a kind; `seen` counts them."""

    def __init__(self, path: Path, point: str = "", when: str = "", hit: int = 0) -> None:
        super().__init__(path)
        self.point, self.when, self.hit = point, when, hit
        self.seen: dict[str, int] = {}

    @contextlib.contextmanager
    def around(self, operation: str, name: str) -> Any:
        point = kind(operation, name)
        count = self.seen[point] = self.seen.get(point, 0) + 1
        mine = point == self.point and count == self.hit
        if mine and self.when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        yield
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)

    def open(self, name: str, *, create: bool = False) -> DiskFile:
        with self.around("create" if create else "open", name):
            return KillerFile(self, name, super().open(name, create=create))

    def rename(self, old: str, new: str) -> None:
        with self.around("rename", old):
            super().rename(old, new)

    def remove(self, name: str) -> None:
        with self.around("remove", name):
            super().remove(name)

    def sync_directory(self, directory: str) -> None:
        with self.around("sync_directory", directory):
            super().sync_directory(directory)


class KillerFile:
    def __init__(self, disk: KillerDisk, name: str, file: DiskFile) -> None:
        self.disk, self.name, self.file = disk, name, file

    def write(self, offset: int, pieces: Sequence[Piece]) -> None:
        with self.disk.around("write", self.name):
            data = b"".join(pieces)
            if kind("tear", self.name) == self.disk.point:
                with self.disk.around("tear", self.name):
                    self.file.write(offset, [data[: len(data) // 2]])
            self.file.write(offset, [data])

    def write_aside(self, offset: int, pieces: Iterable[Piece]) -> None:
        self.write(offset, list(pieces))

    def truncate(self, size: int) -> None:
        self.file.truncate(size)

    def sync(self) -> None:
        with self.disk.around("sync", self.name):
            self.file.sync()

    def close(self) -> None:
        self.file.close()


class Life:
    """What runs in a fork."""

    def __init__(self, disk: KillerDisk, pipe: int, first: int, *, held: bool) -> None:
        self.disk, self.pipe, self.next, self.is_held = disk, pipe, first, held

    def say(self, *words: object) -> None:
        os.write(self.pipe, (" ".join(map(str, words)) + "\n").encode())

    async def run(self, rounds: int) -> None:
        config = dataclasses.replace(CONFIG, segment_hold_ms=20) if self.is_held else CONFIG
        async with Quiver(self.disk, config, randomness=random.Random(1)) as quiver:
            if not quiver.report.is_clean:
                self.say("p", f"not-clean:{quiver.report}".replace(" ", ""))
            for name in SUBSCRIBERS:
                await quiver.register(name)
            readers = [asyncio.create_task(self.read(quiver, name, 0.05)) for name in SUBSCRIBERS]
            for _ in range(rounds):
                await asyncio.gather(*(self.produce(quiver) for _ in range(3)))
                if self.is_held:
                    # Time for a segment to come of age, and for subscribers to keep up.
                    await asyncio.sleep(0.01)
            await quiver.flush()
            await asyncio.gather(*readers)
            if not rounds:
                # Everything is in segments now, and retries take milliseconds.
                for name in SUBSCRIBERS:
                    await self.read(quiver, name, 1.0)

    async def produce(self, quiver: Quiver) -> None:
        number = self.next
        self.next += 1
        self.say("i", number)
        await quiver.ingest(batch(number, 20, plain=self.is_held))
        self.say("d", number)

    async def read(self, quiver: Quiver, name: str, patience_s: float) -> None:
        while (delivery := await quiver.next(name, patience_s)) is not None:
            found = numbers(delivery)
            for number in found:
                self.say("g", name, number)
            if delivery.segment % 5 == 1 and delivery.attempt == 1:
                await delivery.nack()
            elif await delivery.ack():
                for number in found:
                    self.say("a", name, number)


class Nursery:
    """What is known over all lives."""

    def __init__(self, path: Path, seed: int, *, held: bool) -> None:
        self.path, self.rng, self.is_held = path, random.Random(seed), held
        self.next = 1
        self.durable: set[int] = set()
        self.got: dict[str, set[int]] = {name: set() for name in SUBSCRIBERS}
        self.resolved: dict[str, set[int]] = {name: set() for name in SUBSCRIBERS}
        self.problems: list[str] = []
        self.points: dict[str, int] = {}
        self.killed = 0

    def live(
        self, point: str = "", when: str = "", hit: int = 0, after_s: float = LIFE_S, rounds: int = 8
    ) -> bool:
        """One life. Whether it was killed."""
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(receive)
            self._child(send, KillerDisk(self.path, point, when, hit), rounds)
        os.close(send)
        end = time.monotonic() + after_s
        lines = self._listen(receive, child, end)
        _, status = os.waitpid(child, 0)
        os.close(receive)
        self._learn(lines)
        died = os.WIFSIGNALED(status)
        self.killed += died
        if not died and os.WEXITSTATUS(status):
            self.problems.append(f"a life ended by itself with {os.WEXITSTATUS(status)}")
        return died

    def _child(self, send: int, disk: KillerDisk, rounds: int) -> None:
        code = 1
        try:
            asyncio.run(Life(disk, send, self.next, held=self.is_held).run(rounds))
            os.write(send, b"s " + json.dumps(disk.seen).replace(" ", "\t").encode() + b"\n")
            code = 0
        except BaseException as error:
            os.write(send, f"p {type(error).__name__}:{str(error).replace(' ', '_')}\n".encode())
        finally:
            os._exit(code)

    def _listen(self, receive: int, child: int, end: float) -> list[str]:
        os.set_blocking(receive, False)
        data = b""
        while True:
            try:
                piece = os.read(receive, 1 << 16)
            except BlockingIOError:
                left = end - time.monotonic()
                if left <= 0:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
                    end += LIFE_S
                time.sleep(0.0005)
                continue
            if not piece:
                return data.decode().splitlines()
            data += piece

    def _learn(self, lines: list[str]) -> None:
        for line in lines:
            match line.split(" "):
                case ["i", number]:
                    self.next = max(self.next, int(number) + 1)
                case ["d", number]:
                    self.durable.add(int(number))
                case ["g", name, number]:
                    if int(number) in self.resolved[name]:
                        self.problems.append(f"{name} got {number} again after its ack was durable")
                    self.got[name].add(int(number))
                case ["a", name, number]:
                    self.resolved[name].add(int(number))
                case ["s", seen]:
                    self.points = json.loads(seen.replace("\t", " "))
                case other:
                    self.problems.append(" ".join(other))

    def live_anew(self, point: str, when: str) -> bool:
        """Some points are passed at the first opening of a directory alone."""
        path = self.path.with_name(f"{self.path.name}-{self.killed}")
        other = Nursery(path, 0, held=self.is_held)
        if not other.live(point, when, 1):
            return False
        other.finish()
        self.problems += other.problems
        self.killed += other.killed
        return True

    def finish(self) -> None:
        """A life that reads everything, and what must be true then."""
        self.live(after_s=10 * LIFE_S, rounds=0)
        for name in SUBSCRIBERS:
            if lost := self.durable - self.got[name]:
                self.problems.append(f"{name} never got {sorted(lost)[:10]}")

    def run(self, kills: int) -> dict[str, Any]:
        self.live()
        points = [(point, when) for point in sorted(self.points) for when in ("before", "after")]
        points += [(f"tear {point[6:]}", "after") for point in sorted(self.points) if point[:6] == "write "]
        missed = []
        for point, when in points:
            usual = self.points.get(point, self.points.get(f"write {point[5:]}", 1))
            # How often a point is passed differs from life to life; the first time is always there.
            tries = [self.rng.randint(1, max(1, usual // 2)), 1]
            if not any(self.live(point, when, hit) for hit in tries) and not self.live_anew(point, when):
                missed.append(f"{when} {point}")
        while self.killed < kills:
            self.live(after_s=self.rng.uniform(0.01, 0.15))
        self.finish()
        return {
            "killed": self.killed,
            "points": len(points),
            "missed": missed,
            "durable": len(self.durable),
            "problems": self.problems[:20],
        }


if __name__ == "__main__":
    nursery = Nursery(Path(sys.argv[1]), int(sys.argv[2]), held=sys.argv[4:] == ["held"])
    sys.stdout.write(json.dumps(nursery.run(int(sys.argv[3]))) + "\n")
