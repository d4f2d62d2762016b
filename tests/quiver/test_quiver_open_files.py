"""A process without a file descriptor to spare: callers are refused, and the store goes on afterwards."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from tests.quiver.harness import SMALL, batch, drain

from forebay.errors import Unavailable
from forebay.quiver import Quiver

CONFIG = dataclasses.replace(SMALL, segment_open_ms=20, wal_spare_files=0)


class Scarce:
    """`os.open`, with an end."""

    def __init__(self, *, directories_only: bool) -> None:
        self.open = os.open
        self.directories_only = directories_only
        self.is_over = False

    def __call__(self, path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if self.is_over and (flags & os.O_DIRECTORY or not self.directories_only):
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        return self.open(path, flags, *rest, **named)


async def test_no_sync_of_a_directory_needs_a_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce = Scarce(directories_only=True)
    monkeypatch.setattr(os, "open", scarce)
    async with Quiver(tmp_path / "q", CONFIG) as quiver:
        await quiver.register("a")
        scarce.is_over = True
        for number in range(30):
            await quiver.ingest(batch(number, 60))
        await quiver.flush()
        assert await drain(quiver, "a") == list(range(30))


async def test_store_without_descriptors_refuses_and_goes_on_when_there_are_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce = Scarce(directories_only=False)
    monkeypatch.setattr(os, "open", scarce)
    durable = []
    async with Quiver(tmp_path / "q", CONFIG) as quiver:
        await quiver.register("a")
        scarce.is_over = True
        with pytest.raises(Unavailable, match="Too many open files") as caught:
            for number in range(100):
                await quiver.ingest(batch(number, 60))
                durable.append(number)
        assert "ulimit" in caught.value.hint
        scarce.is_over = False
        await quiver.ingest(batch(1_000))
        await quiver.flush()
        assert await drain(quiver, "a") == [*durable, 1_000]


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_descriptors_are_given_back(tmp_path: Path) -> None:
    before = open_files()
    for _ in range(3):
        async with Quiver(tmp_path / "q", CONFIG) as quiver:
            await quiver.ingest(batch(1))
    assert open_files() <= before
