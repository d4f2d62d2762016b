"""An auditor for simulated logs: after every single effect, is every committed offset still readable?

Readers ask now and then, and may miss a moment. The auditor stands beside the bucket and the coordinator and
looks after each write of a key and each delete of an object, with the rule readers follow: the pending
append, or the lowest entry that covers the offset and is not a stale one below the cursor, and its object is
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forebay.log import Topic
from forebay.log._keys import CATALOG_PARTITION_KEY, PartitionKeys, topic_key
from forebay.log._meta import located
from forebay.log._records import Control, Cursor, decode_record
from forebay.log._uris import key_of
from forebay.storage import DeleteResult
from forebay.testing import World

__all__ = ["Auditor", "Ledger"]

PROBLEMS_MAX = 20


class Auditor:
    """Watches the partitions of one topic."""

    def __init__(self, world: World, partitions: Sequence[PartitionKeys]) -> None:
        self.problems: list[str] = []
        self.looks = 0
        self._world = world
        self._state = world._state
        self._partitions = partitions
        self._cursors = dict.fromkeys(partitions, 0)
        self._counters = dict.fromkeys(partitions, 0)
        write, delete = world._state.write, world.bucket.delete

        def audited_write(*arguments: Any) -> Any:
            results = write(*arguments)
            self.look("after a write of keys")
            return results

        async def audited_delete(keys: Sequence[str]) -> list[DeleteResult]:
            results = await delete(keys)
            self.look(f"after the delete of {list(keys)[:3]}")
            return results

        world._state.write = audited_write  # type: ignore[method-assign,assignment]
        world.bucket.delete = audited_delete  # type: ignore[method-assign]

    def look(self, when: str) -> None:
        """Look at every partition now."""
        self.looks += 1
        for keys in self._partitions:
            unreadable = self._unreadable(keys)
            if unreadable and len(self.problems) < PROBLEMS_MAX:
                self.problems.append(f"{self._world.now:.3f} s, {when}: {keys} cannot read {unreadable[:10]}")

    def _unreadable(self, keys: PartitionKeys) -> list[int]:
        home = keys.partition_key
        found = self._state.get(keys.control, home)
        if found is None:
            return []
        control = decode_record(Control, found.key, found.value)
        cursor_record = self._state.get(keys.cursor, home)
        cursor = (
            1 if cursor_record is None else decode_record(Cursor, keys.cursor, cursor_record.value).offset
        )
        self._check_growth(keys, cursor, control.sequence_counter)
        owners: dict[int, str] = {}
        pending = control.pending
        tail = control.sequence_counter if pending is None else pending.start_offset
        start, end = keys.index_range()
        for record in self._state.scan(start, end, 1000, home):
            entry = located(keys, record)
            if entry.entry.type == "WAL" and entry.end_offset < cursor:
                continue
            for offset in range(max(entry.start_offset, control.start_offset), entry.end_offset + 1):
                owners.setdefault(offset, entry.entry.data_key)
        if pending is not None:
            for offset in range(tail, control.sequence_counter):
                owners[offset] = pending.data_key
        objects = self._world.bucket._objects.entries
        return [
            offset
            for offset in range(control.start_offset, control.sequence_counter)
            if offset not in owners or key_of(self._world.bucket, owners[offset]) not in objects
        ]

    def _check_growth(self, keys: PartitionKeys, cursor: int, counter: int) -> None:
        if cursor < self._cursors[keys] or counter < self._counters[keys]:
            self.problems.append(f"{self._world.now:.3f} s: cursor or counter of {keys} went back")
        self._cursors[keys], self._counters[keys] = cursor, counter


def _first_offset(world: World, keys: PartitionKeys) -> int:
    found = world._state.get(topic_key(keys.topic), CATALOG_PARTITION_KEY)
    return 1 if found is None else decode_record(Topic, found.key, found.value).first_offset


class Ledger:
    """Notes every append at the moment of its commit: also what a trim or a deletion removes again.

    What is in the log at the end does not tell whether something was in it twice. Readers were told.
    """

    def __init__(self, world: World, partitions: Sequence[PartitionKeys]) -> None:
        self.twice: list[str] = []
        self.starts: dict[str, int] = {}
        """First offset by append."""
        self._last: dict[PartitionKeys, Control] = {}
        write = world._state.write

        def noted_write(*arguments: Any) -> Any:
            results = write(*arguments)
            for keys in partitions:
                found = world._state.get(keys.control, keys.partition_key)
                now = None if found is None else decode_record(Control, found.key, found.value)
                self._note(keys, now, _first_offset(world, keys))
            return results

        world._state.write = noted_write  # type: ignore[method-assign,assignment]

    def _note(self, keys: PartitionKeys, now: Control | None, first_offset: int) -> None:
        before = self._last.pop(keys, None)
        if now is None:
            if before is not None and before.log_state == "OPEN" and before.pending is not None:
                # Taken back by its writer: a deletion fences before it removes.
                self.starts.pop(before.pending.append_id, None)
            return
        self._last[keys] = now
        pending = now.pending
        if pending is None or now.start_offset < first_offset:
            return  # What a late request has made after a deletion is part of no topic.
        start = self.starts.setdefault(pending.append_id, pending.start_offset)
        if start != pending.start_offset:
            self.twice.append(f"append {pending.append_id} at {start} and again at {pending.start_offset}")
