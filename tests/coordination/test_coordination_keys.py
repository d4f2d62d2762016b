"""The contract of single keys and of `write`, for every tenant."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from forebay.coordination import (
    ABSENT,
    ANY,
    KEY_BYTES_MAX,
    VALUE_BYTES_MAX,
    WRITE_BYTES_MAX,
    WRITE_OPERATIONS_MAX,
    Coordinator,
    Delete,
    DeleteRange,
    Put,
    _api,
    children,
)
from forebay.errors import Closed, InvalidKey, LimitExceeded, NotDone, PreconditionFailed, UsageError


async def test_what_was_put_is_read_back(coordinator: Coordinator, directory: str) -> None:
    version = await coordinator.put(f"{directory}/a", b"alpha")
    record = await coordinator.get(f"{directory}/a")
    assert record is not None
    assert (record.key, record.value, record.version, record.session_id) == (
        f"{directory}/a",
        b"alpha",
        version,
        None,
    )


async def test_missing_key_is_none(coordinator: Coordinator, directory: str) -> None:
    assert await coordinator.get(f"{directory}/nothing") is None


async def test_many_keys_are_read_in_the_order_asked_for(coordinator: Coordinator, directory: str) -> None:
    homes = [f"home-{number % 3}" if number % 4 else None for number in range(40)]
    keys = [(f"{directory}/{number % 5}/k{number}", home) for number, home in enumerate(homes)]
    await coordinator.write(
        [Put(key, key.encode(), partition_key=home) for key, home in keys if not key.endswith("7")]
    )
    asked = list(reversed(keys))
    found = await coordinator.get_many(asked)
    assert [None if record is None else record.value.decode() for record in found] == [
        None if key.endswith("7") else key for key, _ in asked
    ]
    assert list(await coordinator.get_many([])) == []


async def test_one_key_and_the_next_above_another_are_read_together(
    coordinator: Coordinator, directory: str
) -> None:
    home = "together"

    async def look(key: str, start: str) -> tuple[str | None, str | None]:
        found = await coordinator.get_and_ceiling(
            f"{directory}/meta/{key}", f"{directory}/index/{start}", partition_key=home
        )
        first, second = (None if record is None else record.value.decode() for record in found)
        return first, second

    assert await look("control", "1") == (None, None)
    await coordinator.write(
        [
            Put(f"{directory}/meta/control", b"control", partition_key=home),
            *(Put(f"{directory}/index/{number}", b"%d" % number, partition_key=home) for number in (3, 5)),
            # Neither a deeper directory nor the one that follows is an answer.
            Put(f"{directory}/index/6/deeper", b"deeper", partition_key=home),
            Put(f"{directory}/zzz/7", b"elsewhere", partition_key=home),
        ]
    )
    assert await look("control", "1") == ("control", "3")
    assert await look("control", "3") == ("control", "3")
    assert await look("control", "4") == ("control", "5")
    assert await look("nothing", "6") == (None, None)


@pytest.mark.parametrize("value", [b"", b"\0", bytes(range(256)), b"x" * VALUE_BYTES_MAX])
async def test_any_bytes_up_to_the_limit_are_kept(
    coordinator: Coordinator, directory: str, value: bytes
) -> None:
    await coordinator.put(f"{directory}/a", value)
    record = await coordinator.get(f"{directory}/a")
    assert record is not None and record.value == value


async def test_longest_key_and_strange_letters_are_kept(coordinator: Coordinator, directory: str) -> None:
    longest = f"{directory}/".ljust(KEY_BYTES_MAX, "k")
    keys = sorted([longest, f"{directory}/ä 😀%?#&=+'\"\\", f"{directory}/~", f"{directory}/-"])
    for key in keys:
        await coordinator.put(key, key.encode())
    assert [record.value.decode() for record in await coordinator.range_scan(*children(directory))] == keys
    assert [record.key async for record in coordinator.scan_all(*children(directory))] == keys


async def test_put_if_absent_succeeds_once(coordinator: Coordinator, directory: str) -> None:
    version = await coordinator.put(f"{directory}/a", b"first", ABSENT)
    with pytest.raises(PreconditionFailed):
        await coordinator.put(f"{directory}/a", b"second", ABSENT)
    record = await coordinator.get(f"{directory}/a")
    assert record is not None and (record.value, record.version) == (b"first", version)


async def test_put_if_version_succeeds_only_on_that_version(coordinator: Coordinator, directory: str) -> None:
    key = f"{directory}/a"
    first = await coordinator.put(key, b"1")
    second = await coordinator.put(key, b"2", first)
    assert second > first
    with pytest.raises(PreconditionFailed):
        await coordinator.put(key, b"3", first)
    record = await coordinator.get(key)
    assert record is not None and record.value == b"2"


async def test_put_if_version_of_missing_key_is_refused(coordinator: Coordinator, directory: str) -> None:
    with pytest.raises(PreconditionFailed):
        await coordinator.put(f"{directory}/a", b"", 0)
    assert await coordinator.get(f"{directory}/a") is None


async def test_put_any_overwrites(coordinator: Coordinator, directory: str) -> None:
    first = await coordinator.put(f"{directory}/a", b"1", ANY)
    assert await coordinator.put(f"{directory}/a", b"2", ANY) > first


async def test_a_version_beyond_all_versions_is_refused(coordinator: Coordinator, directory: str) -> None:
    key = f"{directory}/far"
    await coordinator.put(key, b"1")
    with pytest.raises(PreconditionFailed):
        await coordinator.put(key, b"2", 1 << 80)
    with pytest.raises(PreconditionFailed):
        await coordinator.delete(key, 1 << 80)


async def test_versions_never_come_back_after_delete(coordinator: Coordinator, directory: str) -> None:
    key = f"{directory}/a"
    seen: list[int] = []
    for _ in range(3):
        seen.append(await coordinator.put(key, b"", ABSENT))
        seen.append(await coordinator.put(key, b"", seen[-1]))
        await coordinator.delete(key, seen[-1])
        seen.append(await coordinator.put(key, b"", ABSENT))
        await coordinator.delete_range(*children(directory))
    assert seen == sorted(set(seen))
    for old in seen:
        with pytest.raises(PreconditionFailed):
            await coordinator.put(key, b"", old)


async def test_delete_removes_under_its_condition(coordinator: Coordinator, directory: str) -> None:
    key = f"{directory}/a"
    version = await coordinator.put(key, b"")
    with pytest.raises(PreconditionFailed):
        await coordinator.delete(key, version + 1)
    assert await coordinator.get(key) is not None
    await coordinator.delete(key, version)
    assert await coordinator.get(key) is None


async def test_deleting_nothing_succeeds_under_any_only(coordinator: Coordinator, directory: str) -> None:
    await coordinator.delete(f"{directory}/a")
    with pytest.raises(PreconditionFailed):
        await coordinator.delete(f"{directory}/a", 7)


async def test_refusal_is_certain_and_names_key_and_remedy(coordinator: Coordinator, directory: str) -> None:
    await coordinator.put(f"{directory}/a", b"")
    with pytest.raises(NotDone) as caught:
        await coordinator.put(f"{directory}/a", b"", ABSENT)
    assert isinstance(caught.value, PreconditionFailed)
    assert caught.value.key == f"{directory}/a" and caught.value.expected is ABSENT and caught.value.hint


async def test_write_answers_every_operation_by_itself(coordinator: Coordinator, directory: str) -> None:
    there = await coordinator.put(f"{directory}/there", b"old")
    results = await coordinator.write(
        [
            Put(f"{directory}/new", b"1", ABSENT),
            Put(f"{directory}/there", b"2", ABSENT),
            Delete(f"{directory}/gone"),
            Put(f"{directory}/there", b"3", there),
            Delete(f"{directory}/gone", 5),
            DeleteRange(f"{directory}/x", f"{directory}/y"),
        ]
    )
    assert [isinstance(result.error, PreconditionFailed) for result in results] == [
        *(False, True, False),
        *(False, True, False),
    ]
    assert [result.version is None for result in results] == [False, True, True, False, True, True]
    assert results[3].unwrap() == results[3].version
    with pytest.raises(PreconditionFailed):
        results[1].unwrap()
    record = await coordinator.get(f"{directory}/there")
    assert record is not None and (record.value, record.version) == (b"3", results[3].version)


async def test_write_does_puts_then_deletes_then_range_deletes(
    coordinator: Coordinator, directory: str
) -> None:
    key, other = f"{directory}/a", f"{directory}/b"
    results = await coordinator.write(
        [
            DeleteRange(*children(directory), partition_key="p"),
            Delete(key, partition_key="p"),
            Put(key, b"", ABSENT, partition_key="p"),
            Put(other, b"", ABSENT, partition_key="p"),
        ]
    )
    assert [result.error for result in results] == [None] * 4
    assert await coordinator.list(*children(directory)) == []
    await coordinator.put(key, b"", partition_key="p")
    results = await coordinator.write(
        [Delete(key, partition_key="p"), Put(key, b"", ABSENT, partition_key="p")]
    )
    assert results[0].error is None and isinstance(results[1].error, PreconditionFailed)
    assert await coordinator.get(key, partition_key="p") is None


async def test_later_operations_of_a_write_see_earlier_ones(coordinator: Coordinator, directory: str) -> None:
    key = f"{directory}/a"
    results = await coordinator.write([Put(key, b"1", ABSENT), Put(key, b"2", ABSENT), Put(key, b"3")])
    assert [result.error is None for result in results] == [True, False, True]
    assert results[0].version is not None and results[2].version is not None
    assert results[2].version > results[0].version
    record = await coordinator.get(key)
    assert record is not None and record.value == b"3"


async def test_empty_write_does_nothing(coordinator: Coordinator) -> None:
    assert await coordinator.write([]) == []


async def test_hundreds_of_operations_keep_their_order(coordinator: Coordinator, directory: str) -> None:
    keys = [f"{directory}/{number % 500:04d}" for number in range(1500)]
    operations = [Put(key, str(index).encode()) for index, key in enumerate(keys)]
    results = await coordinator.write(operations)
    assert len({result.unwrap() for result in results}) > 0
    found = {record.key: record async for record in coordinator.scan_all(*children(directory))}
    assert len(found) == 500
    for index in range(1000, 1500):
        record = found[keys[index]]
        assert (record.value, record.version) == (str(index).encode(), results[index].version)


async def test_concurrent_compare_and_sets_lose_nothing(coordinator: Coordinator, directory: str) -> None:
    key = f"{directory}/counter"
    await coordinator.put(key, b"0", ABSENT)

    async def increment() -> None:
        while True:
            record = await coordinator.get(key)
            assert record is not None
            try:
                await coordinator.put(key, str(int(record.value) + 1).encode(), record.version)
                return
            except PreconditionFailed:
                await asyncio.sleep(0)

    await asyncio.gather(*[increment() for _ in range(20)])
    record = await coordinator.get(key)
    assert record is not None and record.value == b"20"


async def test_keys_with_a_partition_key_are_found_with_it(coordinator: Coordinator, directory: str) -> None:
    await coordinator.write(
        [Put(f"{directory}/{name}", b"", partition_key="together") for name in ("a", "b", "c")]
    )
    record = await coordinator.get(f"{directory}/b", partition_key="together")
    assert record is not None
    listed = await coordinator.list(*children(directory), partition_key="together")
    assert listed == [f"{directory}/{name}" for name in ("a", "b", "c")]
    above = await coordinator.higher(f"{directory}/a", partition_key="together")
    assert above is not None and above.key == f"{directory}/b"
    with pytest.raises(PreconditionFailed):
        await coordinator.put(f"{directory}/a", b"", ABSENT, partition_key="together")
    await coordinator.delete(f"{directory}/a", partition_key="together")
    await coordinator.delete_range(f"{directory}/b", f"{directory}/c", partition_key="together")
    assert await coordinator.list(*children(directory), partition_key="together") == [f"{directory}/c"]


BAD_KEYS = [
    *(
        "",
        "/",
        "/a",
        "a/",
        "a//b",
        "a/../b",
        "../a",
        "./a",
        "a/b.c",
        "a/\n",
        "a/\0",
        "a/\ud800",
        "__oxia/x",
        "a/\u202eb",
    ),
    "k" * (KEY_BYTES_MAX + 1),
    "ä" * (KEY_BYTES_MAX // 2 + 1),
]


@pytest.mark.parametrize("key", BAD_KEYS)
async def test_bad_keys_are_refused_everywhere(coordinator: Coordinator, key: str) -> None:
    calls = [
        coordinator.get(key),
        coordinator.put(key, b""),
        coordinator.delete(key),
        coordinator.ceiling(key),
        coordinator.floor(key),
        coordinator.higher(key),
        coordinator.lower(key),
    ]
    for call in calls:
        with pytest.raises(InvalidKey):
            await call


async def test_one_wrong_operation_stops_the_whole_write_beforehand(
    coordinator: Coordinator, directory: str
) -> None:
    good = Put(f"{directory}/a", b"")
    wrong: list[Any] = [
        Put(f"{directory}/b.c", b""),
        Put(f"{directory}/b", b"x" * (VALUE_BYTES_MAX + 1)),
        Put(f"{directory}/b", "text"),  # type: ignore[arg-type]
        Put(f"{directory}/b", bytearray(b"x")),  # type: ignore[arg-type]
        Put(f"{directory}/b", b"", -1),
        Put(f"{directory}/b", b"", True),
        Put(f"{directory}/b", b"", None),  # type: ignore[arg-type]
        Put(b"bytes/key", b""),  # type: ignore[arg-type]
        Put(f"{directory}/b", b"", partition_key=""),
        Delete(f"{directory}/b", -1),
        DeleteRange(f"{directory}/a", "elsewhere/b"),
        "put a b",
    ]
    for operation in wrong:
        with pytest.raises(UsageError):
            await coordinator.write([good, operation])
    assert await coordinator.get(f"{directory}/a") is None


async def test_limits_of_a_write_have_names(coordinator: Coordinator, directory: str) -> None:
    with pytest.raises(LimitExceeded) as caught:
        await coordinator.write([Delete(f"{directory}/a")] * (WRITE_OPERATIONS_MAX + 1))
    assert caught.value.name == "WRITE_OPERATIONS_MAX"
    value = b"x" * VALUE_BYTES_MAX
    with pytest.raises(LimitExceeded) as caught:
        await coordinator.write([Put(f"{directory}/a", value)] * (WRITE_BYTES_MAX // VALUE_BYTES_MAX + 1))
    assert caught.value.name == "WRITE_BYTES_MAX"


async def test_use_after_close_is_refused_and_close_repeats(coordinator: Coordinator, directory: str) -> None:
    await coordinator.put(f"{directory}/a", b"")
    await coordinator.close()
    await coordinator.close()
    for call in (
        coordinator.get(f"{directory}/a"),
        coordinator.put(f"{directory}/a", b""),
        coordinator.list(*children(directory)),
        coordinator.open_session(),
    ):
        with pytest.raises(Closed):
            await call


async def test_data_outlives_the_client(tenant: Any, directory: str) -> None:
    async with tenant.open() as first:
        version = await first.put(f"{directory}/a", b"kept")
    record = await tenant.open().get(f"{directory}/a")
    assert record is not None and (record.value, record.version) == (b"kept", version)


def test_the_quick_look_at_a_key_accepts_nothing_that_the_long_one_refuses() -> None:
    letters = [
        "a",
        "Z",
        "0",
        "/",
        ".",
        "-",
        " ",
        "~",
        "_",
        "\\",
        "\t",
        "\n",
        "\0",
        "\x7f",
        "\xa0",
        "ä",
        "\ud800",
    ]
    stems = ["", "__oxia", "__oxia/", "__oxi", "a/__oxia", "d/", "../", "./", "..a/", "a/../"]
    tails = ["".join(pair) for length in range(4) for pair in itertools.product(letters, repeat=length)]
    accepted = 0
    for key in (stem + tail for stem in stems for tail in tails):
        if _api._is_plain_key(key):
            accepted += 1
            _api._check_path(key)
            assert "." not in key.rpartition("/")[2]
    assert accepted > 1_000


@pytest.mark.parametrize("key", ["__oxia", "__oxia/a", "/a", "a/", "a//b", "a\n", "a/b.c", "", "a" * 1025])
async def test_wrong_keys_are_refused_by_reads_and_writes(coordinator: Coordinator, key: str) -> None:
    with pytest.raises(InvalidKey):
        await coordinator.get(key)
    with pytest.raises(InvalidKey):
        await coordinator.write([Put("d/a", b""), Put(key, b"")])


async def test_plain_and_conditional_puts_of_one_write_see_each_other_in_order(
    coordinator: Coordinator, directory: str
) -> None:
    key = f"{directory}/a"
    first = await coordinator.put(key, b"0", partition_key=directory)
    results = await coordinator.write(
        [
            Put(key, b"1", first, partition_key=directory),
            Put(key, b"2", partition_key=directory),
            Put(key, b"3", first, partition_key=directory),
            Put(key, b"4", partition_key=directory),
            Put(key, b"5", ABSENT, partition_key=directory),
            Put(f"{directory}/b", b"6", partition_key=directory),
            Put(f"{directory}/b", b"7", ABSENT, partition_key=directory),
        ]
    )
    assert [result.error is None for result in results] == [True, True, False, True, False, True, False]
    versions = [result.version for result in results if result.version is not None]
    assert versions == sorted(set(versions)) and versions[0] > first
    record = await coordinator.get(key, partition_key=directory)
    assert record is not None
    assert (record.value, record.version) == (b"4", results[3].version)


@pytest.mark.parametrize("count", [24, 25, 26, 50, 77])
async def test_every_put_of_a_long_write_is_kept_and_of_one_key_the_last(
    coordinator: Coordinator, directory: str, count: int
) -> None:
    puts = [Put(f"{directory}/{index % 60:03d}", b"%d" % index) for index in range(count)]
    versions = [result.unwrap() for result in await coordinator.write(puts)]
    last = {put.key: (put.value, version) for put, version in zip(puts, versions, strict=True)}
    found = await coordinator.range_scan(*children(directory))
    assert {record.key: (record.value, record.version) for record in found} == last
