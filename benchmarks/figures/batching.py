"""The batcher without anything to wait for: what its bookkeeping costs per item.

The plain side is the least that can answer every caller by itself: a list, a future per item, and a loop that
answers them. It knows no bounds, ages, order or failures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, Figure, Variants
from benchmarks.harness.timing import async_variant
from forebay.kit import Batcher, BatcherConfig, Outcome, SystemClock

__all__ = ["batcher"]

ITEMS = 5_000
"""Items per batch."""
ITEM = bytes(100)


async def _plain() -> int:
    loop = asyncio.get_running_loop()
    items: list[bytes] = []
    futures: list[asyncio.Future[int]] = []
    for _ in range(ITEMS):
        items.append(ITEM)
        futures.append(loop.create_future())
    for index, future in enumerate(futures):
        future.set_result(index)
    await futures[-1]
    return len(items)


async def _upload(items: Sequence[bytes]) -> int:
    return len(items)


async def _commit(uploads: Sequence[int]) -> Sequence[Outcome[int]]:
    return [range(count) for count in uploads]


@suite.benchmark(
    "batcher",
    "An item that goes through the batcher costs a small multiple of a list entry and a future.",
    Figure("add", of="add", against="list and futures"),
    Figure("add_nowait", of="add_nowait", against="list and futures"),
)
def batcher(bench: Bench) -> Iterator[Variants]:
    """Batches of equal size on both sides; uploads and commits return at once."""
    config = BatcherConfig(batch_items=ITEMS, age_ms=1_000)
    with asyncio.Runner() as runner:

        async def make() -> Batcher[bytes, int, int]:
            return Batcher(_upload, _commit, config=config, clock=SystemClock())

        ours = runner.run(make())

        async def add() -> int:
            for _ in range(ITEMS):
                ticket = await ours.add(ITEM, len(ITEM))
            await ticket
            return ITEMS

        async def add_nowait() -> int:
            for _ in range(ITEMS):
                ticket = ours.add_nowait(ITEM, len(ITEM))
            await ticket
            return ITEMS

        yield {
            "list and futures": async_variant(runner, _plain, "items/s"),
            "add": async_variant(runner, add, "items/s"),
            "add_nowait": async_variant(runner, add_nowait, "items/s"),
        }
        runner.run(ours.close())
