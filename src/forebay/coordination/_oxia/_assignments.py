"""Who leads which shard, as the service tells it, kept up to date by one stream.

The stream is subscribed to again after every end. A server that shuts down ends it without an error, so the
normal end is the one that must not be overlooked: a client that stops listening there never hears of a
leader again. What was known stays in use meanwhile; a call to a wrong leader is refused and tried again.

A standalone 0.14 server opens its port a moment before it can answer this one call, and a call in that
moment kills it. Since we are always back quickly after a restart, we let a connection stand for a while
first.

A standalone server names as leader whatever address it was called by, which is the service address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from forebay.coordination._oxia import oxia_pb2 as pb
from forebay.coordination._oxia._channels import Channels, finish
from forebay.coordination._oxia._config import OxiaConfig
from forebay.coordination._oxia._deadline import Backoff, Deadline
from forebay.coordination._oxia._errors import Trouble, TroubleKind, diagnose
from forebay.coordination._oxia._shard import Shard, ShardMap
from forebay.errors import Unavailable
from forebay.kit.clock import Clock

__all__ = ["Assignments"]

STARTUP_PAUSE_S = 0.1
"""Seconds between a connection and the question for the assignments."""


class Assignments:
    """The current map of shards."""

    def __init__(self, config: OxiaConfig, channels: Channels, clock: Clock, backoff: Backoff) -> None:
        self._config = config
        self._channels = channels
        self._clock = clock
        self._backoff = backoff
        self._map: ShardMap | None = None
        self._trouble: Trouble | None = None
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.listeners: list[Callable[[], None]] = []
        """Called after every message of the service."""

    @property
    def known(self) -> ShardMap | None:
        """The map, if there is one yet."""
        return self._map

    async def current(self, deadline: Deadline) -> ShardMap:
        """The map; waits for the first one. Raises a `NotDone` error after the deadline."""
        if self._map is not None:
            return self._map
        if self._task is None:
            self._task = asyncio.create_task(self._follow(), name="oxia assignments")
        doing = f"Oxia at {self._config.address}"
        while self._map is None:
            try:
                async with asyncio.timeout_at(deadline.at):
                    await self._news.wait()
            except TimeoutError:
                trouble = self._trouble or Trouble(TroubleKind.TIMEOUT, "no answer in time")
                raise trouble.error(doing) from None
            if self._trouble is not None and not self._trouble.transient:
                raise self._trouble.error(doing)
        return self._map

    def leader(self, shard: int) -> str:
        """The address of a shard's leader by what is known now."""
        address = None if self._map is None else self._map.leader(shard)
        if address is None:
            raise Unavailable(f"Oxia has no shard {shard} any more", hint="try again: the key has moved")
        return address

    async def close(self) -> None:
        """Stop listening."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            await self._channels.connect(self._config.address, self._no_connection)
            await self._clock.sleep(STARTUP_PAUSE_S)
            service = self._channels.at(self._config.address)
            call = service.assignments(pb.AssignmentsRequest(namespace=self._config.namespace))
            try:
                async for message in call:
                    self._take(message)
            except grpc.aio.AioRpcError as error:
                self._tell(diagnose(error))
            except Trouble as trouble:
                self._tell(trouble)
            finally:
                await finish(call)
            await self._clock.sleep(self._backoff.next_s())

    def _no_connection(self) -> None:
        self._tell(Trouble(TroubleKind.TRANSIENT, "cannot connect"))

    def _take(self, message: pb.Assignments) -> None:
        self._map = self._parse(message)
        self._backoff.reset()
        self._tell(None)

    def _parse(self, message: pb.Assignments) -> ShardMap:
        if self._config.namespace not in message.namespaces:
            raise Trouble(TroubleKind.NO_NAMESPACE, f"there is no namespace {self._config.namespace!r}")
        namespace = message.namespaces[self._config.namespace]
        if namespace.router != pb.XXHASH3:
            raise Trouble(
                TroubleKind.OTHER, f"keys are routed by method {namespace.router}, which we do not know"
            )
        try:
            return ShardMap(
                [
                    Shard(
                        item.shard,
                        item.leader or self._config.address,
                        item.hash_range.first,
                        item.hash_range.last,
                    )
                    for item in namespace.assignments
                ]
            )
        except ValueError as error:
            # A map with a hole is one of a cluster that is just being changed: the next one is whole.
            raise Trouble(TroubleKind.TRANSIENT, str(error)) from None

    def _tell(self, trouble: Trouble | None) -> None:
        """Wake those who wait for a map, with one or with the reason why there is none."""
        self._trouble = trouble
        self._news.set()
        if self._map is None:
            self._news = asyncio.Event()
        for listener in self.listeners:
            listener()
