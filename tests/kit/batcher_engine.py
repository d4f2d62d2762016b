"""An engine for the tests of the Batcher: its uploads and commits end when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from forebay.errors import Unavailable
from forebay.kit.batcher import Batcher, BatcherConfig, Outcome
from forebay.kit.clock import SystemClock

NEVER_MS = 3_600_000


class Engine:
    """An engine whose uploads and commits end when the test says so."""

    def __init__(self, *, hold_uploads: bool = False, hold_commits: bool = False) -> None:
        self.hold_uploads, self.hold_commits = hold_uploads, hold_commits
        self.uploads: list[list[str]] = []
        self.upload_gates: list[asyncio.Future[None]] = []
        self.commits: list[list[list[str]]] = []
        self.commit_gates: list[asyncio.Future[None]] = []
        self.uploads_running = self.uploads_running_max = self.commits_running = 0

    async def upload(self, items: Sequence[str]) -> list[str]:
        self.uploads.append(list(items))
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.upload_gates.append(gate)
        self.uploads_running += 1
        self.uploads_running_max = max(self.uploads_running_max, self.uploads_running)
        try:
            if self.hold_uploads:
                await gate
            if "bad upload" in items:
                raise Unavailable("the store is down")
        finally:
            self.uploads_running -= 1
        return list(items)

    async def commit(self, uploads: Sequence[list[str]]) -> Sequence[Outcome[str]]:
        assert self.commits_running == 0, "two commits at once"
        self.commits_running += 1
        self.commits.append([list(upload) for upload in uploads])
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.commit_gates.append(gate)
        try:
            if self.hold_commits:
                await gate
        finally:
            self.commits_running -= 1
        return [[f"durable {item}" for item in upload] for upload in uploads]

    def batcher(self, **config: Any) -> Batcher[str, list[str], str]:
        return Batcher(
            self.upload,
            self.commit,
            config=BatcherConfig(**{"age_ms": NEVER_MS, **config}),
            clock=SystemClock(),
        )


async def settle() -> None:
    """Let every task that can run do so until nothing moves: the engine has no timers in these tests."""
    for _ in range(50):
        await asyncio.sleep(0)
