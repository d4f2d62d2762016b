"""The directory where data is or would be: rights, attributes, space, and how long durability takes.

Two rates matter, because they are what an acknowledgement waits for. An append followed by fdatasync is one
commit of the embedded coordinator. Writing a new file, syncing it, renaming it and syncing the directory is
one put of the local store. Both are measured for a fraction of a second by one writer with nothing else going
on; the figures say what this disk allows, not what Forebay reaches.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from forebay.cli.doctor.check import Check, Status
from forebay.kit.limits import format_bytes

__all__ = ["examine_disk"]

MEASURE_SECONDS = 0.4
"""Seconds each of the two rates is measured."""
MEASURE_ROUNDS_MAX = 2_000
"""Most synced writes of one measurement, where the disk is fast."""
BLOCK_BYTES = 4096
RATE_LOW = 100
"""Synced writes a second below which a disk is called slow."""
RATE_UNLIKELY = 20_000
"""Synced writes a second above which nothing waits for a medium: memory, or a disk that ignores sync."""
FREE_BYTES_LOW = 1 << 30
CLOCK_STEP_SECONDS_MAX = 2.0
"""Seconds by which the time of a new file may differ from the clock; network file systems have their own."""


def examine_disk(directory: Path, *, named: bool) -> list[Check]:
    """Examine `directory`, or its nearest parent that exists. `named`: the user wants data there."""
    place = _existing(directory)
    bad = Status.FAILED if named else Status.WARN
    try:
        with _room(place) as room:
            return [
                Check("directory", Status.OK, _described(directory, place)),
                _attributes(room, bad),
                *_rates(room),
                _free(place),
                _clock(room),
            ]
    except OSError as error:
        detail = f"{place}: {error.strerror}"
        return [Check("directory", bad, detail, "choose a directory you may write to with --data DIR")]


def _existing(directory: Path) -> Path:
    directory = directory.absolute()
    return next((path for path in (directory, *directory.parents) if path.is_dir()), directory)


def _described(directory: Path, place: Path) -> str:
    return f"{place} is writable" + (
        "" if directory.absolute() == place else f" ({directory} is not there yet)"
    )


@contextmanager
def _room(place: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=".forebay-doctor-", dir=place) as room:
        yield Path(room)


def _attributes(room: Path, bad: Status) -> Check:
    file = room / "attributes"
    file.touch()
    try:
        os.setxattr(file, "user.forebay.doctor", b"1")
        os.getxattr(file, "user.forebay.doctor")
    except OSError as error:
        hint = "the local store keeps versions in user attributes: use ext4, xfs or btrfs"
        return Check("user attributes", bad, f"not supported here: {error.strerror}", hint)
    return Check("user attributes", Status.OK, "supported")


def _rates(room: Path) -> list[Check]:
    with (room / "appends").open("wb", buffering=0) as file:
        block = b"\0" * BLOCK_BYTES

        def append() -> None:
            file.write(block)
            os.fdatasync(file.fileno())

        appends = _rate(append)
    directory = os.open(room, os.O_RDONLY | os.O_DIRECTORY)
    try:
        puts = _rate(lambda: _put(room, directory))
    finally:
        os.close(directory)
    return [
        _judge("append + fdatasync", appends, "commits a second of one writer of the embedded coordinator"),
        _judge("create + rename + sync", puts, "puts a second of one writer of the local store"),
    ]


def _put(room: Path, directory: int) -> None:
    temporary = room / "put.part"
    with temporary.open("wb", buffering=0) as file:
        file.write(b"\0" * BLOCK_BYTES)
        os.fsync(file.fileno())
    temporary.rename(room / "put")
    os.fsync(directory)


def _rate(once: Callable[[], None]) -> float:
    began = time.monotonic()
    passed, rounds = 0.0, 0
    while passed < MEASURE_SECONDS and rounds < MEASURE_ROUNDS_MAX:
        once()
        rounds += 1
        passed = time.monotonic() - began
    return rounds / max(passed, 1e-9)


def _judge(name: str, rate: float, meaning: str) -> Check:
    detail = f"{rate:,.0f}/s, at most so many {meaning}"
    if rate < RATE_LOW:
        return Check(name, Status.WARN, detail, "slow: batch more per commit, or use a local SSD")
    if rate > RATE_UNLIKELY:
        return Check(name, Status.WARN, detail, "too fast for a medium: memory, or a disk that ignores sync")
    return Check(name, Status.OK, detail)


def _free(place: Path) -> Check:
    free = shutil.disk_usage(place).free
    detail = f"{format_bytes(free)} free"
    if free < FREE_BYTES_LOW:
        return Check("space", Status.WARN, detail, "make room before writing: a full disk refuses every put")
    return Check("space", Status.OK, detail)


def _clock(room: Path) -> Check:
    """Ids and retention trust the clock: it must not lie before this code, nor differ from the files."""
    now = time.time()
    file = room / "clock"
    file.touch()
    off = abs(file.stat().st_mtime - now)
    shown = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(now))
    if now < Path(__file__).stat().st_mtime:
        return Check(
            "clock", Status.WARN, f"{shown} lies before Forebay was installed", "set the clock (NTP)"
        )
    if off > CLOCK_STEP_SECONDS_MAX:
        return Check(
            "clock", Status.WARN, f"{shown}, {off:.1f} s off the file system's", "synchronise both (NTP)"
        )
    return Check("clock", Status.OK, f"{shown}, agrees with the file system")
