"""Several instances on one directory: shares, adoption, and eviction that is fair."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import random
import shutil
from pathlib import Path

import pytest
from tests.quiver.harness import SMALL, batch, drain, numbers

from forebay.errors import ForebayError, StorageFull, UsageError
from forebay.kit.clock import SystemClock
from forebay.kit.metrics import MetricsRegistry
from forebay.quiver import DirectoryInUse, QuiverConfig, QuiverCore, QuiverFull, _local_disk
from forebay.quiver._budget import SharedBudget
from forebay.quiver._metrics import QuiverMetrics
from forebay.quiver._retention import RESERVE_BYTES

KEEP = dataclasses.replace(SMALL, segment_open_ms=86_400_000, maintenance_interval_ms=3_600_000)
RESERVE = SMALL.wal_bytes_max + 2 * SMALL.segment_bytes + SMALL.ack_file_bytes + RESERVE_BYTES


async def fill(core: QuiverCore, first: int = 0, count: int = 10_000) -> int:
    """Ingest until refused. How many batches were taken."""
    for number in range(first, first + count):
        try:
            await core.ingest(batch(number, 200))
        except QuiverFull:
            return number - first
    return count


def on_disk(path: Path) -> int:
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file() and each.name != "usage")


def shards(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def test_each_core_must_have_room_for_a_wal_and_two_segments(tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, size_cap_bytes=1 << 18)
    with pytest.raises(UsageError, match="8 cores"):
        QuiverCore(tmp_path, 0, 8, config)
    for core, cores in ((2, 2), (-1, 2), (0, 0), (0, 1_000)):
        with pytest.raises(UsageError):
            QuiverCore(tmp_path, core, cores)


async def test_file_that_cores_share_has_its_space_before_it_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(StorageFull):
            await QuiverCore(tmp_path, 0, 2, sharing="shared").open()
    with (tmp_path / "usage").open("wb") as file:
        file.truncate(64 * 256)  # all of it a hole
    async with QuiverCore(tmp_path, 0, 2, sharing="shared"):
        found = (tmp_path / "usage").stat()
    assert found.st_size == 64 * 256
    assert found.st_blocks * 512 >= found.st_size


async def test_shared_cap_must_hold_every_reserve(tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, size_cap_bytes=1 << 20)
    with pytest.raises(UsageError, match="8 cores"):
        await QuiverCore(tmp_path, 0, 8, config, sharing="shared").open()


async def test_static_share_is_held_whatever_the_others_do(tmp_path: Path) -> None:
    config = dataclasses.replace(KEEP, size_cap_bytes=1 << 19)
    async with QuiverCore(tmp_path, 0, 2, config) as hot, QuiverCore(tmp_path, 1, 2, config) as idle:
        assert await fill(hot) > 10
        assert on_disk(tmp_path / "core_0") <= 1 << 18
        await idle.ingest(batch(1))


async def test_two_instances_of_one_core_are_refused(tmp_path: Path) -> None:
    async with QuiverCore(tmp_path, 0, 2, SMALL):
        with pytest.raises(DirectoryInUse):
            await QuiverCore(tmp_path, 0, 2, SMALL).open()
        async with QuiverCore(tmp_path, 1, 2, SMALL):
            pass


@pytest.mark.parametrize("cores", [1, 2])
async def test_shards_of_cores_that_are_no_more_are_drained_and_removed(tmp_path: Path, cores: int) -> None:
    config = dataclasses.replace(SMALL, size_cap_bytes=1 << 21)
    for number in range(5):
        async with QuiverCore(tmp_path, number, 5, config) as core:
            await core.register("a")
            for each in range(10):
                await core.ingest(batch(number * 100 + each))
    expected = {number * 100 + each for number in range(5) for each in range(10)}
    found: list[int] = []
    for number in range(cores):
        async with QuiverCore(tmp_path, number, cores, config) as core:
            assert core.adopted == [each for each in range(cores, 5) if each % cores == number]
            await core.register("a")
            while (delivery := await core.next("a", 0.5)) is not None:
                found += numbers(delivery)
                await delivery.ack()
            await core.maintain()
            assert core.adopted == []
    assert sorted(found) == sorted(expected)
    assert shards(tmp_path) == [f"core_{each}" for each in range(cores)]


async def test_several_readers_of_adopted_shards_get_everything_and_no_error(tmp_path: Path) -> None:
    config = dataclasses.replace(KEEP, size_cap_bytes=1 << 21)
    for number in range(5):
        async with QuiverCore(tmp_path, number, 5, config) as core:
            await core.register("a")
            for each in range(3):
                await core.ingest(batch(number * 100 + each))
                await core.flush()
    found: list[int] = []

    async def read(core: QuiverCore) -> None:
        while (delivery := await core.next("a", 0.5)) is not None:
            async with delivery:
                found.extend(numbers(delivery))
                await delivery.ack()

    async with QuiverCore(tmp_path, 0, 1, config) as core:
        others = [work(core) for work in (QuiverCore.maintain, QuiverCore.flush, QuiverCore.release_adopted)]
        await asyncio.gather(*(read(core) for _ in range(4)), *others, core.register("b", "latest"))
        await asyncio.gather(*(core.maintain() for _ in range(3)))
        assert core.adopted == []
    assert sorted(found) == [number * 100 + each for number in range(5) for each in range(3)]
    assert shards(tmp_path) == ["core_0"]


async def test_adopted_shards_are_released_by_several_at_once(tmp_path: Path) -> None:
    for number in range(4):
        async with QuiverCore(tmp_path, number, 4, KEEP):
            pass
    async with QuiverCore(tmp_path, 0, 1, KEEP) as core:
        assert core.adopted == [1, 2, 3]
        await asyncio.gather(*(core.release_adopted() for _ in range(3)), core.register("a"))
        assert core.adopted == []


async def test_adopted_shard_keeps_what_nobody_has_read_and_its_dead_letters(tmp_path: Path) -> None:
    async with QuiverCore(tmp_path, 1, 2, KEEP) as core:
        await core.register("a")
        for number in range(2):
            await core.ingest(batch(number))
            await core.flush()
        delivery = await core.next("a")
        assert delivery is not None
        await delivery.reject()
    async with QuiverCore(tmp_path, 0, 1, KEEP) as core:
        await core.maintain()
        assert core.adopted == [1]
    async with QuiverCore(tmp_path, 0, 1, KEEP) as core:
        await core.register("a")
        delivery = await core.next("a")
        assert delivery is not None
        assert numbers(delivery) == [1]
        await delivery.ack()
        await core.maintain()
        assert core.adopted == []
    assert [each.name[:7] for each in (tmp_path / "core_0" / "dead").iterdir()] == ["core_1-"]
    assert not (tmp_path / "core_1").exists()


async def test_adopted_shard_does_not_write_over_the_figures_of_its_adopter(tmp_path: Path) -> None:
    async with QuiverCore(tmp_path, 1, 2, KEEP) as core:
        await core.register("a")
        for number in range(3):
            await core.ingest(batch(number))
            await core.flush()
        delivery = await core.next("a")
        assert delivery is not None
        await delivery.reject()
    registry = MetricsRegistry()
    async with QuiverCore(tmp_path, 0, 1, KEEP, metrics=registry) as core:
        await core.register("a")
        await core.ingest(batch(9))
        await core.flush()
        [adopted] = core._adopted.values()
        for each in (core.own, adopted):
            each._gauge()
        metrics = QuiverMetrics(registry)
        assert metrics.lag.labels("a").value == 1
        assert {key for key, _ in metrics.core_bytes.series()} == {("0",), ("1",)}
        assert len(await drain(core, "a")) == 3  # type: ignore[arg-type]
        await core.maintain()
        assert {key for key, _ in metrics.core_bytes.series()} == {("0",)}
        # What was put aside there counts here now.
        assert core.own.stats().used_bytes == on_disk(tmp_path)


async def test_directories_that_are_made_are_durable_up_to_the_first_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(_local_disk, "sync_directory", synced.append)
    async with QuiverCore(tmp_path / "a" / "b" / "c", 0, 1, KEEP):
        pass
    for made in ("a", "a/b", "a/b/c", "a/b/c/core_0", "a/b/c/core_0/wal"):
        assert (tmp_path / made).parent in synced
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ForebayError):
        await QuiverCore(tmp_path / "file" / "q", 0, 1, KEEP).open()


async def test_damaged_usage_of_cores_that_are_not_there_shuts_nobody_out(tmp_path: Path) -> None:
    config = dataclasses.replace(KEEP, size_cap_bytes=4 * RESERVE)
    async with QuiverCore(tmp_path, 0, 2, config, sharing="shared") as core:
        room = await fill(core)
    usage = tmp_path / "usage"
    usage.write_bytes(random.Random(1).randbytes(usage.stat().st_size))
    shutil.rmtree(tmp_path / "core_0")
    async with QuiverCore(tmp_path, 0, 2, config, sharing="shared") as core:
        # When a segment is finished decides over a batch or two.
        assert await fill(core) >= room * 3 // 4


async def test_shard_that_is_still_in_use_is_left_alone(tmp_path: Path) -> None:
    async with QuiverCore(tmp_path, 1, 2, SMALL), QuiverCore(tmp_path, 0, 1, SMALL) as core:
        assert core.adopted == []


async def test_hot_core_uses_what_idle_cores_do_not_and_leaves_them_their_reserve(tmp_path: Path) -> None:
    config = dataclasses.replace(KEEP, size_cap_bytes=10 * RESERVE)
    async with (
        QuiverCore(tmp_path, 0, 2, config, sharing="shared") as hot,
        QuiverCore(tmp_path, 1, 2, config, sharing="shared") as idle,
    ):
        await fill(hot)
        assert on_disk(tmp_path / "core_0") > 6 * RESERVE
        assert on_disk(tmp_path) <= config.size_cap_bytes
        for number in range(20):
            await idle.ingest(batch(number))
        assert on_disk(tmp_path) <= config.size_cap_bytes


async def test_idle_core_gives_up_processed_segments_when_another_is_refused(tmp_path: Path) -> None:
    config = dataclasses.replace(KEEP, size_cap_bytes=4 * RESERVE, headroom_bytes=RESERVE)
    async with (
        QuiverCore(tmp_path, 0, 2, config, sharing="shared") as hot,
        QuiverCore(tmp_path, 1, 2, config, sharing="shared") as idle,
    ):
        await idle.register("a")
        for number in range(30):
            await idle.ingest(batch(number, 200))
        await idle.flush()
        await drain(idle.own, "a", timeout_s=0.1)
        await idle.maintain()
        kept = on_disk(tmp_path / "core_1" / "segments")
        assert 0 < kept <= RESERVE
        taken = await fill(hot)
        await idle.maintain()
        assert on_disk(tmp_path / "core_1" / "segments") == 0
        assert await fill(hot, taken) > 0
        assert on_disk(tmp_path) <= config.size_cap_bytes


async def test_core_above_its_share_drops_its_own_for_one_below(tmp_path: Path) -> None:
    config = dataclasses.replace(KEEP, size_cap_bytes=4 * RESERVE, size_cap_policy="drop_oldest")
    async with (
        QuiverCore(tmp_path, 0, 2, config, sharing="shared") as hog,
        QuiverCore(tmp_path, 1, 2, config, sharing="shared") as small,
    ):
        for core in (hog, small):
            await core.register("a")
        await fill(hog, count=120)
        await hog.flush()
        before = on_disk(tmp_path / "core_0")
        assert before > 2 * RESERVE
        await fill(small, count=120)
        await hog.maintain()
        assert on_disk(tmp_path / "core_0") <= 2 * RESERVE
        assert await fill(small, 400, 20) == 20
        assert on_disk(tmp_path) <= config.size_cap_bytes + 2 * config.segment_bytes
        assert hog.own.stats().losses["segments.size"] > 0


@pytest.mark.parametrize("seed", range(20))
def test_what_is_granted_never_passes_the_cap(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    cores, cap, reserve = 4, 1_000, 100
    budgets = [
        SharedBudget(
            tmp_path / "usage",
            core=core,
            cores=cores,
            cap_bytes=cap,
            reserve_bytes=reserve,
            clock=SystemClock(),
        )
        for core in range(cores)
    ]
    granted = [0] * cores
    for _ in range(500):
        core = rng.randrange(cores)
        want = max(0, granted[core] + rng.randint(-150, 200))
        if want <= granted[core]:
            budgets[core].publish(want)
            granted[core] = want
        elif not budgets[core].is_over(want):
            granted[core] = want
        else:
            budgets[core].publish(granted[core])
            if rng.random() < 0.2:
                budgets[core].refused()
        assert sum(granted) <= cap
    for core in range(cores):
        budgets[core].publish(0)
    assert not budgets[0].is_over(reserve)
    for each in budgets:
        each.close()


def test_default_settings_fit_as_the_example_says() -> None:
    config = QuiverConfig(size_cap_bytes=500 * 10**9, wal_bytes_max=4 * 10**9, segment_bytes=32 * 10**6)
    QuiverCore("nowhere", 0, 123, config)
    with pytest.raises(UsageError):
        QuiverCore("nowhere", 0, 124, config)
