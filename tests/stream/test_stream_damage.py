"""What a damaged or half-lost bucket is told to be, and what can still be had of it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.stream.logs import STREAM, expected, read_all, reader_of, tier_of, write_log

from forebay.errors import FormatError, NotFound, UsageError
from forebay.formats import Corrupt
from forebay.storage import MemoryStore
from forebay.stream import ReaderConfig, StreamMissing, TierConfig, restore_stream, verify_stream
from forebay.stream._errors import FragmentMissing, RecordMissing
from forebay.stream._keys import StreamKeys
from forebay.stream._local import LocalLog

KEYS = StreamKeys(STREAM)


async def tiered(path: Path, chunks: int = 60) -> MemoryStore:
    """A log in a tree of several heights."""
    write_log(path, chunks, per_segment=20)
    store = MemoryStore()
    await tier_of(path, store, config={"branching": 2}).run_once()
    return store


async def keys_of(store: MemoryStore, ending: str) -> list[str]:
    return [info.key async for info in store.list() if info.key.endswith(ending)]


async def flip(store: MemoryStore, key: str, at: int) -> None:
    data = bytearray((await store.get(key)).data)
    data[at] ^= 1
    await store.put(key, data)


@pytest.mark.parametrize("record", [b"{}", b'{"epoch":3}', b'{"revision":1,"uid":"-5"}', b"", b"x", b"[]"])
async def test_a_record_that_says_nothing_is_damage_and_not_an_empty_stream(
    tmp_path: Path, record: bytes
) -> None:
    store = await tiered(tmp_path / "log")
    await store.put(KEYS.current, record)
    with pytest.raises(FormatError):
        await read_all(reader_of(store))
    with pytest.raises(FormatError):
        await tier_of(tmp_path / "log", store).run_once()
    assert (await restore_stream(reader_of(store).remote, tmp_path / "back")).next_offset > 0


async def test_a_lost_record_is_told_from_a_stream_that_never_was(tmp_path: Path) -> None:
    store = await tiered(tmp_path / "log")
    await store.delete([KEYS.current])
    with pytest.raises(RecordMissing, match="no record"):
        await read_all(reader_of(store))
    with pytest.raises(StreamMissing, match="not in the remote tier") as missing:
        await read_all(reader_of(MemoryStore()))
    assert not isinstance(missing.value, RecordMissing)
    tier = tier_of(tmp_path / "log", store)
    await tier.run_once()
    assert await read_all(reader_of(store)) == expected(0, tier.log.next_offset)


@pytest.mark.parametrize("loss", ["damaged", "missing"])
@pytest.mark.parametrize("seed", range(4))
async def test_a_group_that_cannot_be_read_keeps_no_restore_from_the_fragments(
    tmp_path: Path, loss: str, seed: int
) -> None:
    store = await tiered(tmp_path / "log")
    groups = [key for kind in (".group", ".kgroup", ".mgroup") for key in await keys_of(store, kind)]
    assert len(groups) > 5
    key = random.Random(seed).choice(groups)
    if loss == "missing":
        await store.delete([key])
    else:
        await flip(store, key, 40)
    assert not (await verify_stream(reader_of(store).remote)).ok
    await restore_stream(reader_of(store).remote, tmp_path / "back")
    for path in (tmp_path / "log").iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("group", ["there", "lost"])
async def test_a_fragment_that_is_gone_is_never_left_out_of_a_restore(tmp_path: Path, group: str) -> None:
    store = await tiered(tmp_path / "log")
    await store.delete([(await keys_of(store, ".fragment"))[7]])
    if group == "lost":
        await store.delete(await keys_of(store, ".group"))
    with pytest.raises((NotFound, FragmentMissing)):
        await restore_stream(reader_of(store).remote, tmp_path / "back")
    assert not (tmp_path / "back").exists()


async def test_damage_is_named_by_object_and_place(tmp_path: Path) -> None:
    store = await tiered(tmp_path / "log")
    key = (await keys_of(store, ".fragment"))[3]
    await flip(store, key, 8 + 48 + 4)
    with pytest.raises(Corrupt) as remote:
        await read_all(reader_of(store))
    assert (remote.value.what, remote.value.position) == (key, 8 + 32)
    segment = min((tmp_path / "log").glob("*.segment"))
    data = bytearray(segment.read_bytes())
    data[8 + 48 + 4] ^= 1
    segment.write_bytes(data)
    with pytest.raises(Corrupt) as local:
        await read_all(reader_of(store, tmp_path / "log"))
    assert (local.value.what, local.value.position) == (segment.name, 8 + 32)


def test_a_setting_out_of_its_range_is_named() -> None:
    with pytest.raises(UsageError, match="fragment_bytes is 0, not 1 to 1,073,741,824"):
        TierConfig(fragment_bytes=0)
    with pytest.raises(UsageError, match="poll_interval_ms is 0, not at least 1"):
        TierConfig(poll_interval_ms=0)
    with pytest.raises(UsageError, match="ahead_bytes is -1"):
        ReaderConfig(ahead_bytes=-1)


async def test_a_declared_gap_is_restored_around_without_the_groups(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 20, per_segment=5)
    store = MemoryStore()
    tier = tier_of(tmp_path / "log", store, config={"branching": 2})
    await tier.run_once()
    end = tier.log.next_offset
    write_log(tmp_path / "log", 20, per_segment=5)
    files = sorted((tmp_path / "log").iterdir())
    kept = [path for path in files if int(path.name[:20]) > end + 10]
    for path in set(files) - set(kept):
        path.unlink()
    await tier_of(tmp_path / "log", store, config={"branching": 2}).run_once()
    await store.delete(await keys_of(store, ".group"))
    done = await restore_stream(reader_of(store).remote, tmp_path / "back")
    assert done.first_offset == 0
    assert {path.name for path in kept} < {path.name for path in (tmp_path / "back").iterdir()}


async def test_what_lies_before_damage_in_the_log_is_tiered_and_can_be_read(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 60, per_segment=20)
    log = LocalLog(tmp_path / "log")
    log.refresh()
    segment, number = log.segments[1], 7
    data = bytearray(segment.path.read_bytes())
    data[int(segment.records["position"][number]) + 50] ^= 1
    segment.path.write_bytes(data)
    store = MemoryStore()
    tier = tier_of(tmp_path / "log", store, config={"fragment_bytes": 1})
    for _ in range(2):
        with pytest.raises(Corrupt, match=segment.path.name):
            await tier.run_once()
    whole = int(segment.records["chunk_id"][number])
    assert await read_all(reader_of(store)) == expected(0, whole)
    assert tier.remote.root_writes <= 3


async def test_records_that_a_power_cut_left_empty_are_no_records(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 7, per_segment=20)
    index = next((tmp_path / "log").glob("*.index"))
    whole = index.read_bytes()
    log = LocalLog(tmp_path / "log")
    for tail in (b"", bytes(29), bytes(29 * 3 + 5)):
        index.write_bytes(whole + tail)
        log.refresh()
        assert len(log.segments[0].records) == 7
        first_look = LocalLog(tmp_path / "log")
        first_look.refresh()
        assert first_look.next_offset == log.next_offset
    index.write_bytes(whole + bytes(29) + whole[-29:])
    with pytest.raises(Corrupt, match=index.name):
        log.refresh()


@pytest.mark.parametrize(("header", "error"), [(b"OSIX\0\0\0\1", Corrupt), (b"OSIL\0\0\0\2", FormatError)])
async def test_a_segment_of_another_kind_is_refused(
    tmp_path: Path, header: bytes, error: type[Exception]
) -> None:
    write_log(tmp_path / "log", 7, per_segment=20)
    segment = next((tmp_path / "log").glob("*.segment"))
    segment.write_bytes(header + segment.read_bytes()[8:])
    with pytest.raises(error):
        await tier_of(tmp_path / "log", MemoryStore()).run_once()
    with pytest.raises(error):
        await read_all(reader_of(MemoryStore(), tmp_path / "log"))


@pytest.mark.parametrize(("at", "error"), [(0, Corrupt), (7, FormatError)])
async def test_a_fragment_of_another_kind_or_version_is_refused(
    tmp_path: Path, at: int, error: type[Exception]
) -> None:
    store = await tiered(tmp_path / "log")
    await flip(store, (await keys_of(store, ".fragment"))[3], at)
    with pytest.raises(error):
        await read_all(reader_of(store))
    with pytest.raises(error):
        await restore_stream(reader_of(store).remote, tmp_path / "back")
    assert not (await verify_stream(reader_of(store).remote)).ok
