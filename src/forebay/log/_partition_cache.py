"""What a writer knows of its partitions: the control record and its version, as of its last commit or read.

The cache is never trusted: every commit names the version it builds on, so a state that somebody else has
moved is refused and read again. It only saves the read. A partition costs one read at first contact and then
none, as long as no other writer appends to it.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict

import msgspec

from forebay.coordination import Coordinator
from forebay.log._keys import PartitionKeys
from forebay.log._records import Control, IndexEntry, decode_record
from forebay.log._topic import Topic
from forebay.log._writer_metrics import WriterMetrics

__all__ = ["PartitionCache", "PartitionState", "load_state"]


class PartitionState(msgspec.Struct, eq=False, gc=False):
    """A partition as it was at one version. Part of no ring, so the collector need not see it."""

    keys: PartitionKeys
    control: Control | None
    """None: the partition has no control record yet."""
    version: int | None
    floor_ms: int = 0
    """Time of the last entry: no later one may be older, so that offsets can be found by time."""
    topic: Topic | None = None
    """The topic, where a control record is to be created."""
    indexed: bool = False
    """Whether the entry of the pending append is known to be in the index."""
    committed_at: float = 0.0
    """When this writer committed it, on the monotonic clock."""


class PartitionCache:
    """States by partition; the one used longest ago is forgotten first."""

    def __init__(self, partitions_max: int) -> None:
        self._partitions_max = partitions_max
        self._states: OrderedDict[str, PartitionState] = OrderedDict()
        # Apart from the others and in the order of their commits, so that nobody has to walk over all.
        self._unindexed: dict[str, PartitionState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def get(self, keys: PartitionKeys) -> PartitionState | None:
        """What is known, or None."""
        return self._states.get(keys.partition_key)

    def put(self, state: PartitionState) -> None:
        """Remember a state. One that is pushed out leaves its entry to the next writer or compactor."""
        name = state.keys.partition_key
        self._states[name] = state
        self._states.move_to_end(name)
        self._unindexed.pop(name, None)
        if not state.indexed and state.control is not None and state.control.pending is not None:
            self._unindexed[name] = state
        if len(self._states) > self._partitions_max:
            oldest, _ = self._states.popitem(last=False)
            self._unindexed.pop(oldest, None)

    def forget(self, keys: PartitionKeys) -> None:
        """Read it again before the next commit."""
        self._states.pop(keys.partition_key, None)
        self._unindexed.pop(keys.partition_key, None)

    def unindexed(self, committed_before: float) -> list[PartitionState]:
        """States whose pending append was committed by that time and is not in the index, for all we know."""
        waiting = itertools.takewhile(
            lambda state: state.committed_at <= committed_before, self._unindexed.values()
        )
        return list(waiting)

    def set_indexed(self, state: PartitionState) -> None:
        """The entry of the pending append is in the index."""
        state.indexed = True
        name = state.keys.partition_key
        if self._unindexed.get(name) is state:
            del self._unindexed[name]


async def load_state(coordinator: Coordinator, keys: PartitionKeys, metrics: WriterMetrics) -> PartitionState:
    """Read a partition's control record."""
    metrics.coordination_requests["get"].inc()
    record = await coordinator.get(keys.control, partition_key=keys.partition_key)
    if record is None:
        return PartitionState(keys, None, None)
    control = decode_record(Control, record.key, record.value)
    if control.pending is not None:
        return PartitionState(keys, control, record.version, control.pending.created_at_ms)
    floor_ms = 0
    if control.sequence_counter > control.start_offset:
        # Somebody cleared the pending append: the time of the last entry is in the index alone.
        metrics.coordination_requests["lookup"].inc()
        last = await coordinator.floor(
            keys.index(control.sequence_counter - 1), partition_key=keys.partition_key
        )
        floor_ms = decode_record(IndexEntry, last.key, last.value).created_at_ms if last else 0
    return PartitionState(keys, control, record.version, floor_ms, indexed=True)
