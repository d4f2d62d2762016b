"""The log behind the broker, put together once: writer, producer, reader, tail, and what administers them.

Nothing here is the broker's own. A broker that only reads has no producer, one that only writes keeps no tail
unless it shares one with its neighbours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from forebay._connect import Parts
from forebay.broker._config import BrokerConfig
from forebay.broker._counting import CountingCoordinator
from forebay.broker._follow import Followers, HeardTail
from forebay.broker._stored import Stored
from forebay.errors import ForebayError, Unsupported
from forebay.kit.service import Service, ServiceGroup
from forebay.log import (
    BatchingProducer,
    Catalog,
    Compactor,
    CompactorConfig,
    CompactorService,
    CountingStore,
    Fencing,
    FileTailCache,
    Groups,
    LogReader,
    LogWriter,
    MemoryTailCache,
    Retention,
    Trimmed,
    Trimmer,
    log_identity,
)

__all__ = ["Engines"]

_log = logging.getLogger(__name__)


class Engines:
    """Everything a handler may need. `start` contacts nobody, but to ask for the name of a shared tail."""

    def __init__(self, parts: Parts, config: BrokerConfig) -> None:
        self.parts = parts
        self.config = config
        self.metrics = parts.metrics
        self.clock = parts.clock
        self.store = CountingStore(parts.store, parts.metrics)
        self.stored = Stored(self.store, parts.metrics, clock=parts.clock, interval_ms=config.storage_scan_ms)
        self.coordinator = CountingCoordinator(parts.coordinator, parts.metrics)
        shared = config.tail_cache_dir is not None
        self.tail = HeardTail(MemoryTailCache(parts.clock, config.tail_cache))
        clock, randomness = parts.clock, parts.randomness
        self.reader = LogReader(
            self.store,
            self.coordinator,
            clock=parts.clock,
            randomness=parts.randomness,
            config=config.reader,
            metrics=parts.metrics,
            tail_cache=self.tail,
        )
        keeps_tail = shared or "read" in config.roles
        self.writer = LogWriter(
            # The writer counts its uploads itself, into the same family.
            CountingStore(parts.store, parts.metrics, counts_puts=False),
            self.coordinator,
            clock=parts.clock,
            ids=parts.ids,
            randomness=parts.randomness,
            config=config.writer,
            metrics=parts.metrics,
            name=config.broker_id,
            tail_cache=self.tail if keeps_tail else None,
        )
        self.catalog: Catalog = self.writer.catalog
        self._producer: BatchingProducer | None = None
        self.followers = Followers(
            self.coordinator,
            self.reader,
            self.tail,
            clock=parts.clock,
            linger_ms=config.follow_linger_ms,
            shared=shared,
        )
        self.groups = Groups(
            self.coordinator,
            self.reader,
            self.catalog,
            clock=parts.clock,
            ids=parts.ids,
            randomness=parts.randomness,
        )
        self.fencing = Fencing(self.coordinator, self.catalog, clock=clock, randomness=randomness)
        self.trimmer = Trimmer(self.coordinator, clock=clock, randomness=randomness)
        self.retention = Retention(
            self.reader,
            self.catalog,
            self.trimmer,
            clock=clock,
            randomness=randomness,
            metrics=parts.metrics,
        )
        self.compactor = self._compactor()
        self.answer_bytes: Callable[[], int] = lambda: 0
        """Bytes of answers that their clients have not taken; the server knows."""
        self._services: ServiceGroup | None = None

    async def _share_tail(self, directory: Path) -> None:
        """Keep the tail in files, under the name of this log: others may use the directory as well."""
        parts = self.parts
        try:
            log = await log_identity(
                self.coordinator, clock=parts.clock, ids=parts.ids, randomness=parts.randomness
            )
        except ForebayError as error:
            _log.warning("the tail stays in this process: %s (%s)", error.message, error.hint)
            return
        self.tail.inner = FileTailCache(directory, self.clock, parts.ids, self.config.tail_cache, log=log)

    def _compactor(self) -> Compactor:
        parts = self.parts
        # Somebody asks for it by hand: fold what is there, however little.
        return Compactor(
            self.store,
            self.coordinator,
            clock=parts.clock,
            ids=parts.ids,
            randomness=parts.randomness,
            config=CompactorConfig(wait_for_full_ms=0),
        )

    @property
    def producer(self) -> BatchingProducer:
        """The producer; raises where the broker does not write."""
        if self._producer is None:
            raise Unsupported("this broker does not write", hint="ask one with the role write")
        return self._producer

    async def start(self) -> None:
        """Begin what runs in the background."""
        if self.config.tail_cache_dir is not None:
            await self._share_tail(self.config.tail_cache_dir)
        if "write" in self.config.roles:
            self._producer = BatchingProducer(self.writer, clock=self.clock, config=self.config.producer)
            await self._producer.start()
        if self.config.compact:
            self._services = ServiceGroup("chores", self._chores())
            await self._services.start()

    def _chores(self) -> list[Service]:
        parts = self.parts
        compaction = CompactorService(
            parts.store,
            self.coordinator,
            clock=parts.clock,
            ids=parts.ids,
            randomness=parts.randomness,
            metrics=parts.metrics,
        )
        return [compaction, self.retention.service()]

    def trimmed(self, trimmed: Trimmed, asked_at: float) -> None:
        """Let the tail know at once what is gone; `asked_at`: the clock's monotonic time before the trim."""
        self.tail.saw_control(trimmed.topic, trimmed.partition, trimmed.earliest, trimmed.next, asked_at)

    @property
    def services(self) -> ServiceGroup | None:
        """Compaction and retention, where they run in here."""
        return self._services

    async def close(self) -> None:
        """Make durable what was accepted, then let go of everything."""
        await self.followers.close()
        await self.stored.close()
        try:
            if self._services is not None:
                await self._services.stop()
        finally:
            try:
                if self._producer is not None:
                    await self._producer.close()
                await self.writer.close()
            finally:
                await self.parts.close()
