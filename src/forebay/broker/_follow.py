"""Who waits for which record: one eye on every partition, whatever the number of waiting requests.

A request that waits at the end of a partition must cost nothing while nothing happens. So waiting requests
do not look themselves: the first one for a partition starts a follower, which watches the partition's
records in the coordinator; further ones are entries in a dictionary. What moves the known end of a partition,
wherever it is noticed, wakes exactly those who wait for it:

    own append    the writer tells the tail cache, which is wrapped here
    a read        the reader tells the cache what a control record says
    a neighbour   the shared directory of tails beats, which one task looks at for all
    anybody else  the coordinator's watch fires, and the follower reads the control record once

A follower whose last waiter has left stays for `linger_ms`, so that a client that polls again and again costs
no request either: as long as a partition is followed and nothing has changed, its end is known.

Invariant: `end` of a follower that is `fresh` is the end of the log at some moment after the last change that
the watch has told of. The watch begins before the first look, so no append falls between them. Where the
follower fails, everybody waiting is woken, looks for himself and meets the same error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from forebay.broker._http import Gone
from forebay.coordination import Coordinator
from forebay.errors import ForebayError
from forebay.formats.bytes_batch import BytesBatch
from forebay.formats.encoded_batch import EncodedBatch
from forebay.kit.clock import Clock
from forebay.log import Fetched, LogReader, ReadRequest, TailCache
from forebay.log._keys import PartitionKeys

__all__ = ["Followers", "HeardTail", "Place"]

FOLLOWED_MAX: Final = 50_000
"""Partitions followed at once. Above it a waiting request is answered at once, with what there is."""

Place: TypeAlias = tuple[str, int]
"""Topic and partition."""


class HeardTail(TailCache):
    """A tail cache that passes on how far each partition has come."""

    def __init__(self, inner: TailCache) -> None:
        self.inner = inner
        self.followers: Followers | None = None
        self._earliest: dict[Place, int] = {}

    def committed(
        self, topic: str, partition: int, start_offset: int, batch: BytesBatch | EncodedBatch, time_ms: int
    ) -> None:
        """As the cache inside."""
        self.inner.committed(topic, partition, start_offset, batch, time_ms)
        if self.followers is not None:
            self.followers.moved((topic, partition), start_offset + len(batch))

    def read(self, request: ReadRequest, bytes_max: int) -> Fetched | None:
        """As the cache inside."""
        return self.inner.read(request, bytes_max)

    def known_next(self, topic: str, partition: int) -> int | None:
        """As the cache inside."""
        return self.inner.known_next(topic, partition)

    def saw_control(
        self, topic: str, partition: int, earliest: int, next_offset: int, asked_at: float
    ) -> None:
        """As the cache inside."""
        self.inner.saw_control(topic, partition, earliest, next_offset, asked_at)
        self._earliest[topic, partition] = earliest
        if self.followers is not None:
            self.followers.moved((topic, partition), next_offset)

    def forget(self, topic: str, partition: int | None = None) -> None:
        """As the cache inside."""
        self.inner.forget(topic, partition)

    def known_earliest(self, topic: str, partition: int) -> int:
        """The start of the partition by the last control record that was read."""
        return self._earliest.get((topic, partition), 1)

    async def wait(self) -> None:
        """As the cache inside."""
        await self.inner.wait()


class _Follower:
    """One partition that somebody waits for, or waited a moment ago."""

    __slots__ = ("end", "fresh", "left_at", "task", "turn", "waiters")

    def __init__(self) -> None:
        self.end = 0
        """One past the last record, as far as known."""
        self.fresh = False
        """Whether `end` was looked at after the last change."""
        self.waiters: dict[asyncio.Future[None], int] = {}
        """The offset that each waits for."""
        self.task: asyncio.Task[None] | None = None
        self.turn: asyncio.Event = asyncio.Event()
        """Set where a waiter came while `end` was not fresh."""
        self.left_at = 0.0


class Followers:
    """All partitions that are followed."""

    def __init__(
        self,
        coordinator: Coordinator,
        reader: LogReader,
        tail: HeardTail,
        *,
        clock: Clock,
        linger_ms: int,
        shared: bool,
    ) -> None:
        """`shared`: whether other processes put into the tail cache."""
        self._coordinator = coordinator
        self._reader = reader
        self._tail = tail
        self._clock = clock
        self._linger_s = linger_ms / 1000
        self._shared = shared
        self._followed: dict[Place, _Follower] = {}
        self._chores: list[asyncio.Task[None]] = []
        self.waiting = 0
        """Requests that wait now."""
        tail.followers = self

    @property
    def followed(self) -> int:
        """Partitions that are followed now."""
        return len(self._followed)

    def is_at_end(self, place: Place, offset: int) -> bool:
        """Whether the offset is known to be the end of its partition, without asking anybody."""
        follower = self._followed.get(place)
        return follower is not None and follower.fresh and follower.end == offset

    def moved(self, place: Place, end: int) -> None:
        """The partition has come so far: wake who waits for it."""
        follower = self._followed.get(place)
        if follower is None or end <= follower.end:
            return
        follower.end = end
        for waiter, offset in follower.waiters.items():
            if offset < end:
                _ring(waiter)

    async def wait(self, wanted: Mapping[Place, int], *, timeout_s: float, gone: Gone) -> Sequence[Place]:
        """Wait until one of the offsets is written, the time is up, or nobody listens any more.

        The places that moved. Nothing is sent while nothing changes.
        """
        if len(self._followed) + len(wanted) > FOLLOWED_MAX or timeout_s <= 0 or gone:
            return []
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        followers = {place: self._follow(place) for place in wanted}
        leave = gone.future()
        leave.add_done_callback(lambda _: _ring(waiter))
        timer = asyncio.get_running_loop().call_later(timeout_s, _ring, waiter)
        self.waiting += 1
        try:
            for place, offset in wanted.items():
                followers[place].waiters[waiter] = offset
                if followers[place].end > offset:
                    return [place]
                if not followers[place].fresh:
                    followers[place].turn.set()
            await waiter
            return [place for place, offset in wanted.items() if followers[place].end > offset]
        finally:
            self.waiting -= 1
            timer.cancel()
            gone.forget(leave)
            now = self._clock.monotonic()
            for follower in followers.values():
                follower.waiters.pop(waiter, None)
                follower.left_at = now

    # -- following

    def _follow(self, place: Place) -> _Follower:
        follower = self._followed.get(place)
        if follower is None:
            follower = self._followed[place] = _Follower()
            loop = asyncio.get_running_loop()
            follower.task = loop.create_task(self._watch(place, follower), name="forebay follower")
            if not self._chores:
                self._chores = [loop.create_task(self._let_go(), name="forebay followers")]
                if self._shared:
                    self._chores.append(loop.create_task(self._hear(), name="forebay shared tail"))
        return follower

    async def _watch(self, place: Place, follower: _Follower) -> None:
        """Look once after every change, as soon as somebody wants to know."""
        try:
            async with self._coordinator.watch(f"{PartitionKeys(*place).root}/meta") as watch:
                while True:
                    follower.turn.clear()
                    self.moved(place, (await self._reader.offsets(*place)).next)
                    # A change since that look is told by the watch, now or in a moment.
                    follower.fresh = True
                    await watch.changed()
                    follower.fresh = False
                    if not follower.waiters:
                        await follower.turn.wait()
        except ForebayError:
            follower.fresh = False
            self._followed.pop(place, None)
            for waiter in follower.waiters:
                _ring(waiter)

    async def _let_go(self) -> None:
        """End followers that nobody has needed for a while, and itself with the last one."""
        while self._followed:
            await self._clock.sleep(max(self._linger_s / 4, 0.05))
            oldest = self._clock.monotonic() - self._linger_s
            for place, follower in list(self._followed.items()):
                if not follower.waiters and follower.left_at < oldest:
                    del self._followed[place]
                    if follower.task is not None:
                        follower.task.cancel()
        chores, self._chores = self._chores, []
        for chore in chores[1:]:
            chore.cancel()

    async def _hear(self) -> None:
        """Pass on what other processes of this machine append."""
        while True:
            await self._tail.wait()
            for place, follower in list(self._followed.items()):
                if follower.waiters and (known := self._tail.known_next(*place)) is not None:
                    self.moved(place, known)

    async def close(self) -> None:
        """End everything; who waits is woken."""
        tasks = [*self._chores, *(each.task for each in self._followed.values() if each.task is not None)]
        for follower in self._followed.values():
            for waiter in follower.waiters:
                _ring(waiter)
        self._followed.clear()
        self._chores = []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _ring(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
