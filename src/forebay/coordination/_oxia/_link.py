"""What all coordinators of one event loop share towards one namespace: connections, assignments, write
streams.

There must be one write stream per shard and process, since servers before 0.14.2 stop taking writes when
two race. A process easily opens two coordinators on the same address, one for each of its parts, so the
streams belong to the link and not to the coordinator. The link ends with its last coordinator. (Loops in
other threads have links of their own; one process should use one loop for one namespace.)
"""

from __future__ import annotations

import asyncio
import os
import random
import weakref
from contextlib import AbstractAsyncContextManager

from forebay.coordination._oxia._assignments import Assignments
from forebay.coordination._oxia._calls import Caller
from forebay.coordination._oxia._channels import Channels
from forebay.coordination._oxia._config import OxiaConfig
from forebay.coordination._oxia._deadline import Backoff, Deadline
from forebay.coordination._oxia._write_stream import WriteStream
from forebay.kit.clock import Clock

__all__ = ["Link"]

_Key = tuple[int, int, str, str, bool]
_links: weakref.WeakValueDictionary[_Key, Link] = weakref.WeakValueDictionary()


class Link:
    """Everything on the way to one namespace. Use `Link.join`."""

    def __init__(self, config: OxiaConfig, clock: Clock, randomness: random.Random) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.get_running_loop()
        self.channels = Channels(config.tls)
        self.assignments = Assignments(config, self.channels, clock, Backoff(randomness))
        self.caller = Caller(self.assignments, self.channels, clock, randomness)
        self._config = config
        self._clock = clock
        self._random = randomness
        self._streams: dict[int, WriteStream] = {}
        self._users = 0

    @classmethod
    def join(cls, config: OxiaConfig, clock: Clock, randomness: random.Random) -> Link:
        """The link to a namespace, made by the first who asks. Its `requests_in_flight` and clock count."""
        loop = asyncio.get_running_loop()
        key = (os.getpid(), id(loop), config.address, config.namespace, config.tls)
        link = _links.get(key)
        # The id of a loop that is gone may have been given to a new one.
        if link is None or link.loop is not loop or link._users == 0:
            link = _links[key] = cls(config, clock, randomness)
        link._users += 1
        return link

    async def leave(self, deadline: Deadline) -> None:
        """One user less. The last one ends it."""
        self._users -= 1
        if self._users == 0:
            await asyncio.gather(*[stream.close(deadline) for stream in self._streams.values()])
            await self.assignments.close()
            await self.channels.close()

    def stream(self, shard: int) -> WriteStream:
        """The one writer of a shard."""
        stream = self._streams.get(shard)
        if stream is None:
            stream = self._streams[shard] = WriteStream(
                shard, self._config, self.assignments, self.channels, self._clock, Backoff(self._random)
            )
        return stream

    def quiet(self, shard: int, deadline: Deadline) -> AbstractAsyncContextManager[None]:
        """A moment without writes of ours under way on a shard."""
        return self.stream(shard).quiet(deadline)
