"""Calls to the leader of a shard, repeated until they work or the deadline is over.

Only for calls that may be repeated: reads, and the opening, renewing and closing of sessions. Writes go
through `_write_stream` and are never repeated once sent.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from forebay.coordination._oxia._assignments import Assignments
from forebay.coordination._oxia._channels import Channels, Service, closed_meanwhile
from forebay.coordination._oxia._deadline import Backoff, Deadline
from forebay.coordination._oxia._errors import Trouble, TroubleKind, diagnose
from forebay.kit.clock import Clock

__all__ = ["Caller"]

T = TypeVar("T")


class Caller:
    """Finds the leader, calls it, tries again where that helps."""

    def __init__(
        self, assignments: Assignments, channels: Channels, clock: Clock, randomness: random.Random
    ) -> None:
        self.assignments = assignments
        self._channels = channels
        self._clock = clock
        self._random = randomness

    async def on_leader(
        self, shard: int, deadline: Deadline, call: Callable[[Service, float], Awaitable[T]]
    ) -> T:
        """The result of `call(service, seconds left)`. Raises the last `Trouble` where it never worked."""
        backoff = Backoff(self._random)
        last: Trouble | None = None
        while True:
            left = deadline.left_s()
            if left <= 0:
                raise last or Trouble(TroubleKind.TIMEOUT, "the deadline is over")
            service = self._channels.at(self.assignments.leader(shard))
            try:
                async with asyncio.timeout_at(deadline.at):
                    return await call(service, left)
            except TimeoutError:
                raise Trouble(TroubleKind.TIMEOUT, "no answer in time") from None
            except grpc.aio.AioRpcError as error:
                last = diagnose(error)
            except asyncio.CancelledError:
                # gRPC reports a closed channel as if the caller had been cancelled.
                if self._channels.closed and not _cancelled():
                    raise closed_meanwhile() from None
                raise
            if not last.transient:
                raise last
            await self._clock.sleep(min(backoff.next_s(), max(0.0, deadline.left_s())))


def _cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
