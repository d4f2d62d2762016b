"""The reader against a list: whatever writers, compactors, trimmers, sweepers and stragglers do.

The machine stands between any two steps of a compaction, lets index puts arrive late inside compacted ranges,
and removes every object that the rules allow a vacuum to remove. After each step a reader must return exactly
what the list holds, from any offset, by read and by scan, and refuse what was trimmed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.log.hand_log import FAST, HandLog, numbered

from forebay.log._errors import OffsetOutOfRange
from forebay.log._fetched import ReaderConfig
from forebay.log._records import IndexEntry, Pending, decode_record
from forebay.log._uris import key_of


class LogMachine(RuleBasedStateMachine):
    """One partition, its history, and everything that may happen to it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.log = HandLog()
        self.next = 1
        self.earliest = 1
        self.cursor = 1
        self.appends: list[Pending] = []
        self.resume: tuple[int, int, int] | None = None
        """A compaction that stopped: start, end, steps done."""
        self.reader = self.log.reader(
            ReaderConfig(lookup_entries_max=3, scan_entries_max=2, prefetch_bytes_max=1, retry=FAST.retry)
        )

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        self.loop.close()

    @rule(size=st.integers(1, 4))
    def append(self, size: int) -> None:
        self.appends.append(self.run(self.log.append(numbered(self.next, size))))
        self.next += size
        self.log.now_ms += 10

    @precondition(lambda self: self.resume is None)
    @rule(entries=st.integers(1, 5), steps=st.integers(1, 3))
    def compact(self, entries: int, steps: int) -> None:
        pending = self.log.control.pending
        ends = [
            each.end_offset
            for each in self.appends
            if each.start_offset >= self.cursor and each is not pending
        ]
        if not ends:
            return
        start, end = self.cursor, ends[min(entries, len(ends)) - 1]
        self.run(self.log.compact(start, end, steps=steps))
        if steps < 3:
            self.resume = (start, end, steps)
        else:
            self.cursor = end + 1

    @precondition(lambda self: self.resume is not None)
    @rule()
    def finish_compaction(self) -> None:
        assert self.resume is not None
        start, end, _ = self.resume
        keys = self.log.keys
        self.run(
            self.log.coordinator.delete_range(
                keys.index(start), keys.index(end), partition_key=keys.partition_key
            )
        )
        self.run(self.log.put_cursor(end + 1))
        self.cursor, self.resume = end + 1, None

    @precondition(lambda self: self.appends)
    @rule(data=st.data())
    def late_index_put(self, data: st.DataObject) -> None:
        """A writer that slept puts the entry of an old append, if absent."""
        self.run(self.log.materialize(data.draw(st.sampled_from(self.appends))))

    @precondition(lambda self: self.resume is None and self.next > 1)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        self.earliest = data.draw(st.integers(self.earliest, self.next))
        self.run(self.log.trim(self.earliest))
        # As the compactor does it: it goes on with the first append that is left, whole.
        left = [each.start_offset for each in self.appends if each.end_offset >= self.earliest]
        first = left[0] if left else self.next
        if first > self.cursor:
            self.cursor = first
            self.run(self.log.put_cursor(first))

    @precondition(lambda self: self.resume is None)
    @rule()
    def vacuum(self) -> None:
        """Remove every object that nothing refers to any more."""
        self.run(self._vacuum())

    async def _vacuum(self) -> None:
        log = self.log
        record = await log.coordinator.get(log.keys.cursor, partition_key=log.keys.partition_key)
        cursor = 1 if record is None else int(record.value.split(b":")[1].rstrip(b"}"))
        referenced = set()
        if log.control.pending is not None:
            referenced.add(key_of(log.store, log.control.pending.data_key))
        scan = log.coordinator.scan_all(*log.keys.index_range(), partition_key=log.keys.partition_key)
        async for found in scan:
            entry = decode_record(IndexEntry, found.key, found.value)
            if entry.type == "COMPACTED" or log.keys.end_offset(found.key) >= cursor:
                referenced.add(key_of(log.store, entry.data_key))
        keys = [info.key async for info in log.store.list("llog/")]
        await log.store.delete([key for key in keys if key not in referenced])

    @invariant()
    def every_offset_reads_as_it_was_written(self) -> None:
        if self.next > 1:
            self.run(self._check())

    async def _check(self) -> None:
        place = self.log.place
        for offset in range(self.earliest, self.next):
            fetched = await self.reader.read(*place, offset, max_records=3)
            assert fetched.records() == numbered(offset, min(3, self.next - offset))[: len(fetched)]
            assert len(fetched) >= 1
            assert fetched.earliest == self.earliest
        assert await self.log.everything() == numbered(self.earliest, self.next - self.earliest)
        if self.earliest > 1:
            try:
                await self.reader.read(*place, self.earliest - 1)
            except OffsetOutOfRange as error:
                assert error.earliest == self.earliest
            else:
                raise AssertionError("a trimmed offset was served")


LogMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestLogMachine = LogMachine.TestCase
