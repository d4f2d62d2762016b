"""A small cap leaves room for data, whatever the other settings are."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Literal

import pytest
from tests.quiver.harness import SMALL, batch, drain, simulate, store
from tests.quiver.sim_disk import SimDisk
from tests.quiver.test_quiver_cores import KEEP

from forebay.quiver import QuiverConfig, QuiverCore
from forebay.testing.world import World

TIGHT = QuiverConfig(
    segment_bytes=4_096,
    segment_open_ms=50,
    wal_bytes_max=65_536,
    wal_file_bytes=8_192,
    size_cap_bytes=1 << 18,
)
"""Everything else as it comes: ack.log files of 4 MiB, 64 MiB of dead letters."""


@pytest.mark.parametrize("policy", ["backpressure", "drop_oldest"])
def test_smallest_cap_takes_data_beside_settings_made_for_larger_ones(
    policy: Literal["backpressure", "drop_oldest"],
) -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, dataclasses.replace(TIGHT, size_cap_policy=policy)) as quiver:
            await quiver.register("a")
            for number in range(100):
                await quiver.ingest(batch(number))
                await quiver.flush()
                assert await drain(quiver, "a") == [number]
                assert disk.used_bytes <= TIGHT.size_cap_bytes

    simulate(scenario)


def test_rejected_segments_shut_no_data_out() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        config = dataclasses.replace(SMALL, size_cap_bytes=1 << 18, dead_letter_bytes_max=1 << 26)
        async with store(world, disk, config) as quiver:
            await quiver.register("a")
            for number in range(150):
                await quiver.ingest(batch(number, 100))
                await quiver.flush()
                assert (delivery := await quiver.next("a", 1)) is not None
                assert await delivery.reject()
            dead = disk.files("dead/")
            assert sum(map(len, dead.values())) <= config.size_cap_bytes // 4
            assert max(dead).startswith("dead/0000000000000150"), "the oldest have gone"

    simulate(scenario)


def dead_bytes(path: Path) -> int:
    return sum(each.stat().st_size for each in path.glob("core_*/dead/*"))


async def test_dead_letters_of_all_cores_together_leave_room(tmp_path: Path) -> None:
    config = dataclasses.replace(KEEP, size_cap_bytes=1 << 20, dead_letter_bytes_max=1 << 26)
    cores = [QuiverCore(tmp_path, each, 3, config, sharing="shared") for each in range(3)]
    for core in cores:
        await core.open()
        await core.register("a")
    for number in range(20):
        for core in cores:
            await core.ingest(batch(number, 200))
            await core.flush()
            assert (delivery := await core.next("a", 10)) is not None
            assert await delivery.reject()
            await core.maintain()
    aside = dead_bytes(tmp_path)
    assert 0 < aside <= config.size_cap_bytes // 4
    await asyncio.gather(*(core.close() for core in cores))
