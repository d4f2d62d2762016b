"""Watches: one stream of notifications per shard, shared by all watches of a coordinator.

A watch promises to wake after a change and is allowed to wake without one. That makes recovery simple and
safe: after any end of the stream, the normal one too, it is opened anew at the present, and when the server
confirms with its first, empty batch every watch is woken, since something may have happened in between.
Going on from the last known offset instead would spare those wakes, but would sleep through everything
where the server's log is gone, was restored from a copy, or was trimmed.

The streams run from the first watch to the end of the last one.
"""

from __future__ import annotations

import asyncio
import random

import grpc

from forebay.coordination._api import Watch, directory_of
from forebay.coordination._oxia import oxia_pb2 as pb
from forebay.coordination._oxia._assignments import Assignments
from forebay.coordination._oxia._channels import Channels, Service, finish
from forebay.coordination._oxia._deadline import Backoff, Deadline
from forebay.coordination._oxia._errors import Trouble, TroubleKind, diagnose
from forebay.errors import Closed, Unavailable, UsageError
from forebay.kit.clock import Clock

__all__ = ["Notifications", "OxiaWatch"]


class OxiaWatch(Watch):
    """One watched directory. However many changes come while nobody looks, they are one wake."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._dirty = asyncio.Event()
        self._closed = False
        self._waiting = False

    async def changed(self) -> None:
        """Return once something may have changed since the watch began or since the last return."""
        if self._waiting:
            raise UsageError("two tasks wait on one watch", hint="give each task a watch of its own")
        self._waiting = True
        try:
            await self._dirty.wait()
        finally:
            self._waiting = False
        if self._closed:
            raise Closed("the coordinator of this watch is closed", hint="open a new one")
        self._dirty.clear()

    def begin(self) -> None:
        """Forget what came before the watch began."""
        if not self._closed:
            self._dirty.clear()

    def wake(self) -> None:
        """Something may have changed."""
        self._dirty.set()

    def close(self) -> None:
        """Let the one who waits go, with an error."""
        self._closed = True
        self._dirty.set()


class _ShardStream:
    """The notifications of one shard."""

    def __init__(self, shard: int, task: asyncio.Task[None]) -> None:
        self.shard = shard
        self.task = task
        self.confirmed = asyncio.Event()
        """Whether the server has confirmed the present subscription."""
        self.trouble: Trouble | None = None


class Notifications:
    """All watches of one coordinator."""

    def __init__(
        self, assignments: Assignments, channels: Channels, clock: Clock, randomness: random.Random
    ) -> None:
        self._assignments = assignments
        self._channels = channels
        self._clock = clock
        self._random = randomness
        self._watches: dict[str, set[OxiaWatch]] = {}
        self._streams: dict[int, _ShardStream] = {}
        assignments.listeners.append(self._follow_shards)

    async def begin(self, directory: str, deadline: Deadline) -> OxiaWatch:
        """A watch that misses nothing from now on. Raises where the server does not confirm in time."""
        await self._assignments.current(deadline)
        watch = OxiaWatch(directory)
        self._watches.setdefault(directory, set()).add(watch)
        self._follow_shards()
        try:
            for stream in list(self._streams.values()):
                await self._confirmed(stream, deadline)
        except BaseException:
            await self.end(watch)
            raise
        watch.begin()
        return watch

    async def end(self, watch: OxiaWatch) -> None:
        """Stop watching; after the last one, stop listening."""
        watches = self._watches.get(watch.directory, set())
        watches.discard(watch)
        if not watches:
            self._watches.pop(watch.directory, None)
        if not self._watches:
            await self._stop()

    async def close(self) -> None:
        """Let go of all watches."""
        self._assignments.listeners.remove(self._follow_shards)
        for watch in [watch for watches in self._watches.values() for watch in watches]:
            watch.close()
        self._watches.clear()
        await self._stop()

    async def _stop(self) -> None:
        tasks = [stream.task for stream in self._streams.values()]
        self._streams.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _confirmed(self, stream: _ShardStream, deadline: Deadline) -> None:
        try:
            async with asyncio.timeout_at(deadline.at):
                await stream.confirmed.wait()
        except TimeoutError:
            trouble = stream.trouble or Trouble(TroubleKind.TIMEOUT, "no answer in time")
            raise trouble.error(f"watching shard {stream.shard}") from None
        if stream.trouble is not None and not stream.trouble.transient:
            raise stream.trouble.error(f"watching shard {stream.shard}")

    def _follow_shards(self) -> None:
        """Listen to every shard there is, as long as somebody watches."""
        shards = self._assignments.known
        if shards is None or not self._watches:
            return
        for shard in shards.ids:
            if shard not in self._streams:
                task = asyncio.create_task(self._listen(shard), name=f"oxia notifications of shard {shard}")
                self._streams[shard] = _ShardStream(shard, task)
        for shard in [shard for shard in self._streams if shard not in shards.ids]:
            self._streams.pop(shard).task.cancel()

    async def _listen(self, shard: int) -> None:
        backoff = Backoff(self._random)
        while True:
            # The dictionary holds this task's stream by the time the task first runs.
            stream = self._streams[shard]
            try:
                service = self._channels.at(self._assignments.leader(shard))
                stream.trouble = await self._receive(stream, service, backoff)
            except Unavailable as gone:
                stream.trouble = Trouble(TroubleKind.TRANSIENT, gone.message)
            if stream.trouble.transient:
                stream.confirmed.clear()
            else:
                # Those who wait for the confirmation shall see the reason why it will not come.
                stream.confirmed.set()
            await self._clock.sleep(backoff.next_s())

    async def _receive(self, stream: _ShardStream, service: Service, backoff: Backoff) -> Trouble:
        """Report changes until the stream ends; the reason of the end."""
        call = service.notifications(pb.NotificationsRequest(shard=stream.shard))
        confirmed = False
        try:
            async for batch in call:
                if confirmed:
                    self._report(batch)
                else:
                    confirmed = True
                    stream.trouble = None
                    stream.confirmed.set()
                    backoff.reset()
                    self._wake_all()
        except grpc.aio.AioRpcError as error:
            return diagnose(error)
        finally:
            await finish(call)
        return Trouble(TroubleKind.TRANSIENT, "the server ended the stream")

    def _report(self, batch: pb.NotificationBatch) -> None:
        for key, notification in batch.notifications.items():
            if notification.change == pb.KEY_RANGE_DELETED and directory_of(
                notification.key_range_last
            ).rstrip("/") != directory_of(key):
                self._wake_all()
                return
            for watch in self._watches.get(directory_of(key), ()):
                watch.wake()

    def _wake_all(self) -> None:
        for watches in self._watches.values():
            for watch in watches:
                watch.wake()
