"""All streams below one directory, tiered side by side: the sidecar of a broker.

The directory is either one stream, with segment files in it, or the `stream` directory of a broker, with one
directory per stream. Streams that appear later are taken up, those that vanish are let go; nothing in the
bucket is removed because a directory is gone.

Each stream fails by itself: its error is kept and reported, and it is tried again after a growing wait. A
stream that was deleted or taken over by a newer writer is left alone. Nor does one wait for another: a turn
that takes long goes on while the others have their next ones. Memory stays bounded all the same, since all
streams together have a bound on uploads, too.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forebay.coordination import Coordinator
from forebay.errors import UsageError
from forebay.kit.clock import Clock
from forebay.kit.metrics import MetricsRegistry
from forebay.storage import ObjectStore
from forebay.stream._config import TierConfig
from forebay.stream._errors import Deposed, StreamDeleted
from forebay.stream._keys import stream_of_directory
from forebay.stream._tier import StreamTier

__all__ = ["Sidecar", "stream_directories"]

STREAMS_AT_ONCE = 4
"""Streams that may have all their uploads under way at once: the bound on memory, and a few may hang."""
SETTLE_S_MAX = 5.0
"""Longest time that a stop takes for the last roots, in seconds."""
PAUSE_MS_MAX = 60_000
"""Longest wait of a stream that fails again and again, in milliseconds."""


def stream_directories(root: Path) -> list[Path]:
    """The directories with segment files: `root` itself, or those directly in it."""
    if not root.is_dir():
        raise UsageError(f"{str(root)!r} is no directory", hint="name a stream's directory, or the one above")
    if _has_segments(root):
        return [root]
    return sorted(Path(entry.path) for entry in os.scandir(root) if _has_segments(entry))


def _has_segments(path: os.PathLike[str]) -> bool:
    try:
        return any(file.suffix == ".segment" for file in Path(path).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False


@dataclass(slots=True)
class _Member:
    tier: StreamTier
    error: Exception | None = None
    failures: int = 0
    not_before: float = 0.0
    over: bool = False
    turn: asyncio.Task[None] | None = None


class Sidecar:
    """Tiers every stream of a directory."""

    def __init__(
        self,
        root: Path,
        store: ObjectStore,
        *,
        coordinator: Coordinator | None = None,
        config: TierConfig | None = None,
        clock: Clock,
        randomness: random.Random,
        metrics: MetricsRegistry | None = None,
    ) -> None:
        self._root = root
        self._store = store
        self._coordinator = coordinator
        self._config = config or TierConfig()
        self._clock = clock
        self._random = randomness
        self._metrics = metrics or MetricsRegistry()
        self._members: dict[Path, _Member] = {}
        self._room = asyncio.Semaphore(self._config.uploads_max * STREAMS_AT_ONCE)

    @property
    def tiers(self) -> list[StreamTier]:
        """The streams known so far."""
        return [member.tier for member in self._members.values()]

    @property
    def errors(self) -> dict[str, Exception]:
        """What is wrong with which stream right now."""
        return {one.tier.stream: one.error for one in self._members.values() if one.error is not None}

    def discover(self) -> None:
        """Look for directories that came or went."""
        found = stream_directories(self._root)
        _check_apart(found)
        for path in found:
            if path not in self._members:
                tier = StreamTier(
                    path,
                    self._store,
                    coordinator=self._coordinator,
                    config=self._config,
                    clock=self._clock,
                    randomness=self._random,
                    metrics=self._metrics,
                    room=self._room,
                )
                self._members[path] = _Member(tier)
        for path in self._members.keys() - set(found):
            _cancel(self._members.pop(path))
        self._members = {path: self._members[path] for path in found}

    async def run_once(self) -> None:
        """Tier everything that is there; the first error is raised after all streams had their turn."""
        self.discover()
        for member in self._members.values():
            await self._turn(member, once=True)
        for member in self._members.values():
            if member.error is not None:
                raise member.error

    async def follow(self, report: Callable[[Sidecar], None] | None = None) -> None:
        """Keep up with all of them until cancelled; `report` is called after every round."""
        poll_s = self._config.poll_interval_ms / 1000
        try:
            while True:
                self.discover()
                turns = [turn for member in self._members.values() if (turn := self._under_way(member))]
                if turns:
                    # Those that are not done by then go on beside the next round.
                    await asyncio.wait(turns, timeout=poll_s)
                if report is not None:
                    report(self)
                await self._clock.sleep(poll_s)
        finally:
            await self._let_go()

    async def settle(self) -> None:
        """Before a stop: make roots of what is uploaded, as far as that is possible in a moment."""
        tiers = [member.tier for member in self._members.values() if not member.over]
        waits = [asyncio.wait_for(tier.settle(), SETTLE_S_MAX) for tier in tiers]
        await asyncio.gather(*waits, return_exceptions=True)

    def _under_way(self, member: _Member) -> asyncio.Task[None] | None:
        """The turn of a stream: the one that it still has, or a new one if it may have one now."""
        if member.turn is not None and not member.turn.done():
            return member.turn
        if member.over or self._clock.monotonic() < member.not_before:
            return None
        member.turn = asyncio.create_task(self._turn(member, once=False))
        return member.turn

    async def _let_go(self) -> None:
        turns = [turn for member in self._members.values() if (turn := _cancel(member))]
        await asyncio.gather(*turns, return_exceptions=True)

    async def _turn(self, member: _Member, *, once: bool) -> None:
        try:
            await (member.tier.run_once() if once else member.tier.catch_up())
        except Exception as error:
            # A defect, too, stops one stream only and is told.
            member.error = error
            member.failures += 1
            member.over = isinstance(error, Deposed | StreamDeleted)
            wait_ms = min(self._config.poll_interval_ms << min(member.failures, 20), PAUSE_MS_MAX)
            member.not_before = self._clock.monotonic() + wait_ms * self._random.uniform(0.5, 1) / 1000
        else:
            member.error, member.failures = None, 0


def _check_apart(paths: list[Path]) -> None:
    """No two directories may go into one stream. A broker's never do: its names are ids already."""
    seen: dict[str, Path] = {}
    for path in paths:
        other = seen.setdefault(stream_of_directory(path), path)
        if other != path:
            raise UsageError(
                f"{other.name!r} and {path.name!r} would be the same stream", hint="rename one directory"
            )


def _cancel(member: _Member) -> asyncio.Task[None] | None:
    if member.turn is not None:
        member.turn.cancel()
    return member.turn
