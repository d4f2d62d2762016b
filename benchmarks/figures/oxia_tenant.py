"""The Oxia tenant against a real server: what one round trip for many operations is worth.

Every variant puts values of 100 bytes under a hundred keys of one shard, over and over. The published client
for Python runs beside ours on the same server, in turns: one put after the other, and from 64 threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from benchmarks import peers
from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, CannotMeasure, Figure, Variants, at_least
from benchmarks.harness.timing import async_variant
from benchmarks.peers.environment import peer_python
from benchmarks.peers.process import PeerProcess
from forebay.coordination import Put, open_coordinator
from forebay.testing.servers import OxiaServer, ServerUnavailable

__all__ = ["oxia_tenant"]

PINS = ("oxia==0.2.1", "betterproto2<0.10", "betterproto2-compiler<0.10", "xxhash<4")
PROGRAM = Path(peers.__file__).with_name("oxia_published.py")
VALUE = bytes(100)
KEYS = [f"bench/ours/{index:03d}" for index in range(100)]
IN_FLIGHT = 64


@suite.benchmark(
    "oxia",
    "Writes to Oxia are paid by the round trip, not by the operation.",
    Figure("100 puts in one write", of="write of 100", against="single puts", target=at_least(10)),
    Figure("64 puts in flight", of="64 in flight", against="published client", target=at_least(3)),
    Figure("single puts", of="single puts", against="published client"),
    Figure("64 in flight, against 64 threads", of="64 in flight", against="published client, 64 threads"),
)
def oxia_tenant(bench: Bench) -> Iterator[Variants]:
    """One server with one shard, our client on one loop, the published one in its own process."""
    python = peer_python("oxia-client-0.2.1", PINS, bench.say)
    bench.say("starting Oxia")
    try:
        server = OxiaServer(directory=bench.directory)
    except ServerUnavailable as error:
        raise CannotMeasure(error.message) from error
    with (
        server,
        PeerProcess(python, PROGRAM, server.address) as published,
        asyncio.Runner() as runner,
    ):
        coordinator = open_coordinator(server.url())
        numbers = count()

        async def single() -> int:
            await coordinator.put(KEYS[next(numbers) % len(KEYS)], VALUE)
            return 1

        async def in_flight() -> int:
            # Each sends its next put as soon as its last one is answered: 64 in flight all the time.
            async def lane(key: str) -> None:
                for _ in range(10):
                    await coordinator.put(key, VALUE)

            await asyncio.gather(*[lane(key) for key in KEYS[:IN_FLIGHT]])
            return 10 * IN_FLIGHT

        async def hundred() -> int:
            for result in await coordinator.write([Put(key, VALUE) for key in KEYS]):
                result.unwrap()
            return len(KEYS)

        yield {
            "published client": published.variant("puts/s", threads=1),
            "single puts": async_variant(runner, single, "puts/s"),
            "64 in flight": async_variant(runner, in_flight, "puts/s"),
            "write of 100": async_variant(runner, hundred, "puts/s"),
            "published client, 64 threads": published.variant("puts/s", threads=IN_FLIGHT),
        }
        runner.run(coordinator.close())
