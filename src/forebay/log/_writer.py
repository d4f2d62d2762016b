"""The writer: groups of many partitions in, one object and one round trip to the coordinator out.

    append_shared(groups) -> [merge by partition] -> [upload one object] -> [commit all partitions at once]

A writer owns no partition and holds no lease. Any number of writers append to the same partitions; the
compare-and-set of each partition's control record decides the order, and the loser builds on what it finds.
What a writer keeps in memory is a cache and may be lost at any moment.

There is no atomicity across partitions, on purpose: every group has its own result, and a refused partition
never holds back or undoes another.

The parts `upload` and `commit` are open for a pipeline: while one flush commits, the next one uploads. See
`BatchingProducer`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from forebay.coordination import WRITE_OPERATIONS_MAX, Coordinator, Put
from forebay.errors import PreconditionFailed
from forebay.kit.clock import Clock
from forebay.kit.conditions import ABSENT
from forebay.kit.ids import IdSource
from forebay.kit.metrics import MetricsRegistry
from forebay.kit.periodic import PeriodicConfig, PeriodicService
from forebay.log._append import AppendGroup, AppendResult
from forebay.log._commit import Committer
from forebay.log._partition_cache import PartitionCache, PartitionState
from forebay.log._records import encode_record
from forebay.log._tail_cache import TailCache
from forebay.log._topics import Catalog
from forebay.log._upload import Uploaded, Uploader, units_of
from forebay.log._writer_config import WriterConfig, WriterParts
from forebay.log._writer_metrics import WriterMetrics
from forebay.storage import ObjectStore

__all__ = ["LogWriter"]


class LogWriter:
    """Appends to any partition of any topic."""

    def __init__(  # noqa: PLR0913 - the parts are handed in, one by one
        self,
        store: ObjectStore,
        coordinator: Coordinator,
        *,
        clock: Clock,
        ids: IdSource,
        randomness: random.Random,
        config: WriterConfig | None = None,
        metrics: MetricsRegistry | None = None,
        name: str = "",
        tail_cache: TailCache | None = None,
    ) -> None:
        """`name` is kept with every append, for `explain`; `tail_cache` is told of every commit."""
        self.config = config or WriterConfig()
        self.catalog = Catalog(store, coordinator, clock=clock, ids=ids, randomness=randomness)
        """The topics of this log."""
        self._coordinator = coordinator
        self._clock = clock
        self._random = randomness
        self._metrics = WriterMetrics(metrics)
        self.catalog.pair.on_put = self._metrics.store_requests["put"].inc
        self._cache = PartitionCache(self.config.cached_partitions_max)
        parts = WriterParts(
            store, coordinator, clock, ids, randomness, self.config, self._metrics, name, tail_cache
        )
        self._uploader = Uploader(parts)
        self._committer = Committer(parts, self._uploader, self.catalog, self._cache)

    async def append_shared(self, groups: Sequence[AppendGroup]) -> list[AppendResult]:
        """Append all groups through one object; one result per group, in order.

        Raises only where the call as a whole breaks a limit; then nothing was tried.
        """
        [results] = await self.commit([await self.upload(groups)])
        return results

    async def upload(self, groups: Sequence[AppendGroup]) -> Uploaded:
        """Make the groups durable, but invisible. A group that fails here is answered by `commit`."""
        began = self._clock.monotonic()
        answers, units = units_of(groups)
        return Uploaded(answers, await self._uploader.upload(units) if units else [], began)

    async def commit(self, uploads: Sequence[Uploaded]) -> list[list[AppendResult]]:
        """Make uploaded groups visible, in the order given; the results of each upload."""
        units = [unit for uploaded in uploads for unit in uploaded.units]
        if units:
            await self._committer.commit(units)
        answers = [uploaded.results() for uploaded in uploads]
        now = self._clock.monotonic()
        self._metrics.answered(answers, [now - uploaded.began_at for uploaded in uploads])
        return answers

    async def materialize_idle(self, *, idle_ms: int | None = None) -> int:
        """Put the index entries of appends that no later one has put; how many were put or found there.

        Readers find the last append in the control record, so this is not about durability: it spares the
        next writer an operation, and lets compaction see the tail of a partition that nobody writes to.
        """
        idle_s = (self.config.idle_ms if idle_ms is None else idle_ms) / 1000
        states = self._cache.unindexed(self._clock.monotonic() - idle_s)
        done = 0
        for first in range(0, len(states), WRITE_OPERATIONS_MAX):
            done += await self._put_entries(states[first : first + WRITE_OPERATIONS_MAX])
        return done

    async def _put_entries(self, states: Sequence[PartitionState]) -> int:
        puts, done = [], 0
        for state in states:
            assert state.control is not None and state.control.pending is not None
            pending, keys = state.control.pending, state.keys
            entry = encode_record(pending.index_entry())
            puts.append(Put(keys.index(pending.end_offset), entry, ABSENT, partition_key=keys.partition_key))
        self._metrics.coordination_requests["write"].inc()
        for state, result in zip(states, await self._coordinator.write(puts), strict=True):
            if result.error is None or isinstance(result.error, PreconditionFailed):
                self._cache.set_indexed(state)
                done += 1
        return done

    def background(self) -> PeriodicService:
        """A service that puts the index entries of idle partitions. Start it beside the writer."""
        return PeriodicService(
            "log-writer",
            self.materialize_idle,
            PeriodicConfig(interval_ms=self.config.idle_ms),
            clock=self._clock,
            randomness=self._random,
        )

    async def close(self) -> None:
        """Put the last index entries. The store and the coordinator stay open: they belong to the caller."""
        await self.materialize_idle(idle_ms=0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
