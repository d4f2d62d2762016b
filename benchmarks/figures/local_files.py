"""Objects as local files: what durability costs, and what a read costs beyond the system call."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

from benchmarks.figures._disk import RawReplace
from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, Figure, Measure, Sample, Variant, Variants, at_least
from benchmarks.harness.timing import async_variant, timed, variant
from forebay.storage import ObjectStore, open_store

__all__ = ["local_put", "local_range"]

MIB = 1024 * 1024
OBJECT_BYTES = 8 * MIB
SMALL, LARGE = 64 * 1024, MIB


@suite.benchmark(
    "local-put",
    "A durable put of 1 MiB costs what its two syncs cost.",
    Figure("against write, fsync, rename, fsync", of="put", against="raw replace", target=at_least(0.5)),
    Figure("4 at once", of="4 puts at once", against="raw replace"),
    Figure("against write, rename, no sync", of="put", against="plain replace"),
)
def local_put(bench: Bench) -> Iterator[Variants]:
    """The same bytes, with and without us, with and without syncs."""
    data = os.urandom(MIB)
    raw = RawReplace(bench.directory / "raw", "object", data)
    plain = RawReplace(bench.directory / "plain", "object", data, durable=False)
    with asyncio.Runner() as runner:
        store = open_store(bench.directory / "store")

        async def put() -> int:
            await store.put("objects/one", data)
            return 1

        async def put_four() -> int:
            await asyncio.gather(*[store.put(f"objects/{index}", data) for index in range(4)])
            return 4

        def plain_then_settle(seconds: float) -> Sample:
            sample = timed(plain.step, seconds)
            plain.settle()
            return sample

        yield {
            "plain replace": Variant(plain_then_settle, "MiB/s"),
            "raw replace": variant(raw.step, "MiB/s"),
            "put": async_variant(runner, put, "MiB/s"),
            "4 puts at once": async_variant(runner, put_four, "MiB/s"),
        }
        runner.run(store.close())


@suite.benchmark(
    "local-range",
    "A range of a local object costs little more than pread.",
    Figure("time of 64 KiB against open, pread", of="64 KiB", against="64 KiB pread", measure=Measure.TIME),
    Figure("time of 1 MiB against open, pread", of="1 MiB", against="1 MiB pread", measure=Measure.TIME),
    Figure("time of 1 MiB against memcpy", of="1 MiB", against="1 MiB memcpy", measure=Measure.TIME),
)
def local_range(bench: Bench) -> Iterator[Variants]:
    """Ranges of one warm object. The raw side opens the file each time too, since any reader of keys must."""
    data = os.urandom(OBJECT_BYTES)
    path = bench.directory / "store" / "objects" / "one"
    with asyncio.Runner() as runner:
        store = open_store(bench.directory / "store")
        runner.run(store.put("objects/one", data))
        view, place = memoryview(data), memoryview(bytearray(LARGE))

        def pread(length: int) -> int:
            file = os.open(path, os.O_RDONLY)
            try:
                return len(os.pread(file, length, MIB)) // length
            finally:
                os.close(file)

        def copy() -> int:
            place[:] = view[MIB : MIB + LARGE]
            return 1

        async def range_of(store: ObjectStore, length: int) -> int:
            return len(await store.get_range("objects/one", MIB, length)) // length

        yield {
            "64 KiB pread": variant(lambda: pread(SMALL), "/s"),
            "64 KiB": async_variant(runner, lambda: range_of(store, SMALL), "/s"),
            "1 MiB pread": variant(lambda: pread(LARGE), "/s"),
            "1 MiB": async_variant(runner, lambda: range_of(store, LARGE), "/s"),
            "1 MiB memcpy": variant(copy, "/s"),
        }
        runner.run(store.close())
