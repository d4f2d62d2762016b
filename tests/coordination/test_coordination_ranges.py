"""The contract of ranges and neighbour lookups: order among the leaves of one directory, and nothing else."""

from __future__ import annotations

import pytest

from forebay.coordination import SCAN_RECORDS_MAX, Coordinator, Put, children
from forebay.errors import InvalidKey, LimitExceeded, UsageError

NAMES = ["", "-", "0", "00", "1", "10", "9", "A", "a", "aa", "b", "z", "~", "é", "😀"]


async def _fill(coordinator: Coordinator, directory: str) -> list[str]:
    """Leaves, and around them everything that must not be taken for one."""
    leaves = [f"{directory}/{name}" for name in NAMES if name]
    around = [
        f"{directory}/0/deep",
        f"{directory}/m/deep",
        f"{directory}/zz/deep/deeper",
        f"{directory}-sibling/a",
        f"{directory}0/a",
        f"{directory}",
        f"{directory}~",
    ]
    results = await coordinator.write([Put(key, key.encode()) for key in [*reversed(leaves), *around]])
    assert all(result.error is None for result in results)
    return sorted(leaves)


async def test_scan_of_a_directory_gives_its_leaves_in_order(
    coordinator: Coordinator, directory: str
) -> None:
    leaves = await _fill(coordinator, directory)
    records = await coordinator.range_scan(*children(directory))
    assert [record.key for record in records] == leaves
    assert [record.value.decode() for record in records] == leaves
    assert await coordinator.list(*children(directory)) == leaves


async def test_scan_is_half_open(coordinator: Coordinator, directory: str) -> None:
    leaves = await _fill(coordinator, directory)
    for start, end in [(leaves[2], leaves[7]), (leaves[0], leaves[0]), (leaves[5], leaves[1])]:
        expected = [key for key in leaves if start <= key < end]
        assert await coordinator.list(start, end) == expected
        assert [record.key for record in await coordinator.range_scan(start, end)] == expected
    assert await coordinator.list(leaves[3], children(directory)[1]) == leaves[3:]
    assert await coordinator.list(children(directory)[0], leaves[3]) == leaves[:3]
    assert await coordinator.list(f"{leaves[3]}\0", children(directory)[1]) == leaves[4:]


async def test_scan_stops_at_its_limit(coordinator: Coordinator, directory: str) -> None:
    leaves = await _fill(coordinator, directory)
    for limit in (1, 3, len(leaves), len(leaves) + 1, SCAN_RECORDS_MAX):
        assert await coordinator.list(*children(directory), limit=limit) == leaves[:limit]
        records = await coordinator.range_scan(*children(directory), limit=limit)
        assert [record.key for record in records] == leaves[:limit]


async def test_scan_all_goes_past_the_limit_of_one_scan(coordinator: Coordinator, directory: str) -> None:
    keys = [f"{directory}/{number:05d}" for number in range(SCAN_RECORDS_MAX + 5)]
    await coordinator.write([Put(key, b"") for key in keys])
    assert len(await coordinator.range_scan(*children(directory))) == SCAN_RECORDS_MAX
    assert [record.key async for record in coordinator.scan_all(*children(directory))] == keys


async def test_empty_directory_has_nothing(coordinator: Coordinator, directory: str) -> None:
    await coordinator.put(f"{directory}/sub/a", b"")
    await coordinator.put(f"{directory}0/a", b"")
    assert await coordinator.range_scan(*children(directory)) == []
    assert await coordinator.list(*children(directory)) == []
    for lookup in (coordinator.ceiling, coordinator.floor, coordinator.higher, coordinator.lower):
        assert await lookup(f"{directory}/m") is None
    await coordinator.delete_range(*children(directory))


async def test_lookups_find_the_neighbour_in_the_directory(coordinator: Coordinator, directory: str) -> None:
    leaves = await _fill(coordinator, directory)
    probes = [*leaves, *[f"{directory}/{name}" for name in (" ", "!", "05", "B", "ab", "m", "zz", "😁")]]
    for probe in probes:
        above = [key for key in leaves if key > probe]
        below = [key for key in leaves if key < probe]
        equal = [probe] if probe in leaves else []
        found = {
            "ceiling": await coordinator.ceiling(probe),
            "higher": await coordinator.higher(probe),
            "floor": await coordinator.floor(probe),
            "lower": await coordinator.lower(probe),
        }
        assert {name: record and record.key for name, record in found.items()} == {
            "ceiling": next(iter(equal + above), None),
            "higher": next(iter(above), None),
            "floor": next(iter(equal or below[-1:]), None),
            "lower": next(iter(below[-1:]), None),
        }
        assert all(record is None or record.value == record.key.encode() for record in found.values())


async def test_range_delete_takes_leaves_of_its_range_only(coordinator: Coordinator, directory: str) -> None:
    leaves = await _fill(coordinator, directory)
    await coordinator.delete_range(leaves[2], leaves[5])
    assert await coordinator.list(*children(directory)) == leaves[:2] + leaves[5:]
    await coordinator.delete_range(leaves[6], leaves[5])
    await coordinator.delete_range(leaves[6], leaves[6])
    assert await coordinator.list(*children(directory)) == leaves[:2] + leaves[5:]
    await coordinator.delete_range(*children(directory))
    assert await coordinator.list(*children(directory)) == []
    for key in (directory, f"{directory}/0/deep", f"{directory}/zz/deep/deeper", f"{directory}0/a"):
        assert await coordinator.get(key) is not None


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("", ""),
        ("a", "b"),
        ("a/b", "c/d"),
        ("a/b", "a/c/d"),
        ("a/b", "a"),
        ("a/b", "b//"),
        ("/b", "/c"),
        ("a//b", "a//c"),
        ("__oxia/a", "__oxia/b"),
        ("a/b", "a/\ud800"),
    ],
)
async def test_ranges_across_directories_are_refused(coordinator: Coordinator, start: str, end: str) -> None:
    for call in (
        coordinator.range_scan(start, end),
        coordinator.list(start, end),
        coordinator.delete_range(start, end),
    ):
        with pytest.raises(InvalidKey):
            await call


async def test_scan_limits_are_checked(coordinator: Coordinator, directory: str) -> None:
    for limit in (0, -1):
        with pytest.raises(UsageError):
            await coordinator.range_scan(*children(directory), limit=limit)
        with pytest.raises(UsageError):
            await coordinator.list(*children(directory), limit=limit)
    with pytest.raises(LimitExceeded):
        await coordinator.range_scan(*children(directory), limit=SCAN_RECORDS_MAX + 1)
