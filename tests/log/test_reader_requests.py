"""What reads cost, counted: requests, not time. The same for a thousand entries and for ten million."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tests.log.hand_log import HandLog, numbered

from forebay.coordination import MemoryCoordinator, Operation, Record, WriteResult
from forebay.formats import bytes_batch
from forebay.kit.clock import SystemClock
from forebay.kit.ids import IdSource
from forebay.log import AppendGroup, LogReader, LogWriter
from forebay.log._keys import PartitionKeys, shared_wal_key
from forebay.log._records import Control, IndexEntry, Pending, encode_record
from forebay.log._uris import uri_of
from forebay.storage import MemoryStore
from forebay.testing import Actor, World

KEYS = PartitionKeys("orders", 0)


def cost_of_a_read(records: int, batches: int, offset: int, *, scan: bool = False) -> dict[str, int]:
    """Requests of a fresh reader for one batch from `offset` on, by kind."""

    async def main(world: World) -> dict[str, int]:
        log = HandLog(store=world.bucket, coordinator=world.keys)
        for start in range(1, records * batches, records):
            await log.append(numbered(start, records))

        async def look(me: Actor) -> None:
            reader = HandLog(store=me.store, coordinator=me.coordinator).reader()
            if scan:
                [batch] = [each async for each in reader.scan("orders", 0, offset, offset + records)]
                assert batch.column("value")[0].as_py() == b"%d" % offset
                return
            fetched = await reader.read("orders", 0, offset, max_records=records)
            assert fetched.records()[0] == b"%d" % offset

        await world.spawn("reader", look).join()
        kinds = ("coordinator.get_and_ceiling", "coordinator.range_scan", "store.get_ranges")
        counts = {kind: world.requests.count("reader", kind) for kind in kinds}
        counts["all"] = world.requests.count("reader")
        return counts

    return World(seed=1).run(main)


@pytest.mark.parametrize("scan", [False, True], ids=["read", "scan"])
@pytest.mark.parametrize("records", [1, 10, 1_000])
def test_a_cold_read_of_a_batch_is_one_lookup_and_one_range(records: int, scan: bool) -> None:
    assert cost_of_a_read(records, 3, 1, scan=scan) == {
        "coordinator.get_and_ceiling": 1,
        "coordinator.range_scan": 0,
        "store.get_ranges": 1,
        "all": 2,
    }


@pytest.mark.parametrize("scan", [False, True], ids=["read", "scan"])
def test_a_cold_read_of_the_pending_tail_needs_no_second_lookup(scan: bool) -> None:
    assert cost_of_a_read(10, 3, 21, scan=scan) == {
        "coordinator.get_and_ceiling": 1,
        "coordinator.range_scan": 0,
        "store.get_ranges": 1,
        "all": 2,
    }


class Vast(MemoryCoordinator):
    """A coordinator whose partition has as many index entries as it is told, made up when they are read."""

    def __init__(self, entries: int, entry: IndexEntry) -> None:
        super().__init__()
        self.entries = entries
        self.entry = encode_record(entry)
        self.requests: list[str] = []

    async def get(self, key: str, *, partition_key: str | None = None) -> Record | None:
        self.requests.append("get")
        return await super().get(key, partition_key=partition_key)

    async def get_and_ceiling(
        self, key: str, start: str, *, partition_key: str
    ) -> tuple[Record | None, Record | None]:
        self.requests.append("get_and_ceiling")
        control = await super().get(key, partition_key=partition_key)
        number = max(1, KEYS.end_offset(start))
        return control, Record(KEYS.index(number), self.entry, 1) if number <= self.entries else None

    async def write(self, operations: Sequence[Operation]) -> list[WriteResult]:
        self.requests.append("write")
        return await super().write(operations)

    async def range_scan(
        self, start: str, end: str, *, limit: int = 1_000, partition_key: str | None = None
    ) -> list[Record]:
        self.requests.append("range_scan")
        if not start.startswith(f"{KEYS.root}/index/"):
            return await super().range_scan(start, end, limit=limit, partition_key=partition_key)
        first = max(1, KEYS.end_offset(start.rstrip("\0")) + start.endswith("\0"))
        last = min(self.entries, first + limit - 1)
        return [Record(KEYS.index(number), self.entry, 1) for number in range(first, last + 1)]


async def requests_at(entries: int) -> dict[str, list[str]]:
    """Requests of an append, a cold read in the middle, a tail read and a scan of a hundred records."""
    store = MemoryStore()
    body = bytes_batch.encode([b"x"])
    key = shared_wal_key("one")
    await store.put(key, body)
    entry = IndexEntry(
        type="WAL",
        msg_count=1,
        data_key=uri_of(store, key),
        encoding=bytes_batch.ENCODING,
        created_at_ms=1,
        byte_offset=0,
        byte_length=len(body),
    )
    vast = Vast(entries, entry)
    pending = Pending(
        append_id="last",
        start_offset=entries + 1,
        end_offset=entries + 1,
        msg_count=1,
        entry_type="WAL",
        data_key=entry.data_key,
        encoding=entry.encoding,
        created_at_ms=1,
        byte_offset=0,
        byte_length=len(body),
    )
    control = Control(log_state="OPEN", sequence_counter=entries + 2, pending=pending)
    await vast.put(KEYS.control, encode_record(control), partition_key=KEYS.partition_key)
    clock, randomness = SystemClock(), random.Random(1)
    writer = LogWriter(store, vast, clock=clock, ids=IdSource(), randomness=randomness)
    reader = LogReader(store, vast, clock=clock, randomness=randomness)
    found: dict[str, list[str]] = {}

    async def count(name: str) -> None:
        found[name] = list(vast.requests)
        vast.requests.clear()

    vast.requests.clear()
    middle = entries // 2
    assert (await reader.read("orders", 0, middle, max_records=1)).next_offset == middle + 1
    await count("cold read")
    assert len(await reader.read("orders", 0, entries + 1)) == 1
    await count("tail read")
    assert len([batch async for batch in reader.scan("orders", 0, middle, middle + 100)]) == 100
    await count("scan")
    group = AppendGroup.of("orders", 0, [b"y"])
    for name in ("first append", "append"):
        [result] = await writer.append_shared([group])
        result.unwrap()
        await count(name)
    return found


async def test_ten_million_entries_cost_the_same_requests_as_a_thousand() -> None:
    small, large = await requests_at(1_000), await requests_at(10_000_000)
    assert small == large
    assert large == {
        "cold read": ["get_and_ceiling"],
        "tail read": ["get_and_ceiling"],
        "scan": ["get_and_ceiling", "range_scan"],
        "first append": ["get", "write"],
        "append": ["write"],
    }
