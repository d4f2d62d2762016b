"""From a directory of segments into the bucket: cut, upload in parallel, apply in order, persist.

`run_once` brings the remote tier up to the local log and ends. `follow` does so again and again. Both begin
by resolving the manifest, and both check that the log they have is the one that was tiered before: the last
chunk in the bucket must have the same epoch, id and checksum in the local log, because offsets alone would
splice two different timelines silently.

What is uploaded but not yet in a root is never lost by a failure: the next resolve finds it by the chain of
trailers. Uploads finish in any order; they are applied as the longest run from the end of the manifest.
An upload that finds its key taken by another cut of the same log adopts it, and cutting goes on from its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from forebay.coordination import Coordinator
from forebay.errors import FormatError, NotFound, OutcomeUnknown, PreconditionFailed
from forebay.kit.clock import Clock
from forebay.kit.metrics import MetricsRegistry
from forebay.kit.service import Health, HealthStatus
from forebay.storage import ObjectStore
from forebay.stream._config import TierConfig
from forebay.stream._cutter import Cut, cuts
from forebay.stream._errors import Deposed, Diverged, SegmentChanged, StreamDeleted
from forebay.stream._fragment_source import FragmentSource
from forebay.stream._keys import stream_of_directory
from forebay.stream._local import LocalLog
from forebay.stream._lookup import Lookup
from forebay.stream._manifest import FragmentInfo
from forebay.stream._metrics import TierMetrics
from forebay.stream._pressure import LagGate
from forebay.stream._remote import RemoteTier

__all__ = ["Lag", "StreamTier", "TierProgress"]

_log = logging.getLogger(__name__)

_LOOK_AGAIN = (PreconditionFailed, OutcomeUnknown, NotFound, SegmentChanged, FileNotFoundError)
"""Another writer swapped or retained, or the broker removed a segment or cut its end off."""
RESOLVES_MAX = 20
"""How often in a row a writer may lose the race for the root before it gives up and says so."""


@dataclass(frozen=True, slots=True)
class Lag:
    """What is not yet in the bucket."""

    bytes: int
    records: int
    age_ms: int
    """Age of the oldest chunk that is not in a root, in milliseconds. 0 where there is none."""

    @classmethod
    def of(cls, log: LocalLog, offset: int, now_ms: int) -> Lag:
        """What a log has from `offset` on, which is the next offset of the current root."""
        size, oldest = log.untiered(offset)
        records = max(log.next_offset - max(offset, log.first_offset), 0)
        return cls(size, records, max(now_ms - oldest, 0) if oldest is not None else 0)

    @classmethod
    def of_directory(cls, path: Path, offset: int, now_ms: int) -> Lag:
        """`of` for a directory that nobody has open here."""
        log = LocalLog(path)
        log.refresh()
        return cls.of(log, offset, now_ms)

    def alarms(self, config: TierConfig) -> list[str]:
        """What is above the bounds of a configuration, in words; empty where nothing is."""
        found = []
        if self.bytes >= config.lag_bytes_alarm:
            found.append(f"{self.bytes:,} bytes are not in the bucket yet")
        if self.age_ms >= config.lag_ms_alarm:
            found.append(f"the oldest chunk that is not in the bucket yet is {self.age_ms // 1000} s old")
        return found


@dataclass(slots=True)
class TierProgress:
    """What one tier has done since it was made."""

    fragments: int = 0
    bytes: int = 0
    adopted: int = 0
    """Fragments that were in the bucket already."""
    roots: int = 0
    removed: int = 0
    """Fragments removed by retention."""


class StreamTier:
    """One stream on its way into the bucket.

    `epoch` is that of the writer; without one it is the epoch of the log's last chunk. `committed` gives the
    commit offset where the writer is at hand; a broker's files do not tell it, and on one node all that is
    written counts. `gate` is the one that the writer asks; `room` bounds the uploads of several tiers
    together.
    """

    def __init__(  # noqa: PLR0913 - parts that are handed in, each by its name
        self,
        path: Path,
        store: ObjectStore,
        *,
        stream: str | None = None,
        coordinator: Coordinator | None = None,
        epoch: int | None = None,
        committed: Callable[[], int] | None = None,
        config: TierConfig | None = None,
        clock: Clock,
        randomness: random.Random,
        metrics: MetricsRegistry | None = None,
        gate: LagGate | None = None,
        room: asyncio.Semaphore | None = None,
    ) -> None:
        self.config = config or TierConfig()
        self.log = LocalLog(path, committed)
        self.remote = RemoteTier(
            stream or stream_of_directory(path),
            store,
            coordinator=coordinator,
            epoch=epoch or 0,
            config=self.config,
            clock=clock,
            randomness=randomness,
        )
        self.progress = TierProgress()
        self._epoch = epoch
        self._clock = clock
        self._resolved = False
        self._log_epoch = 0
        self._last: FragmentInfo | None = None
        self._changed_at: float | None = None
        self._found = False
        """Whether pending fragments were found in the bucket, and are older than this tier."""
        self._error: Exception | None = None
        self._metrics = TierMetrics(metrics, self.stream)
        self._gate = gate
        self._own_room = asyncio.Semaphore(self.config.uploads_max)
        self._shared_room = room or contextlib.nullcontext()
        self._alarmed = False

    @property
    def stream(self) -> str:
        """The id of the stream."""
        return self.remote.keys.stream

    def lag(self) -> Lag:
        """What the current root does not hold, as of the last look at the files."""
        return Lag.of(self.log, self.remote.persisted.next_offset, self._clock.now_ms())

    def health(self) -> Health:
        """Degraded where it lags too far behind or the last try failed; failed where only people can help."""
        lag = self.lag()
        reasons = lag.alarms(self.config)
        if self._error is not None:
            reasons.append(str(self._error))
        status = HealthStatus.DEGRADED if reasons else HealthStatus.HEALTHY
        if isinstance(self._error, Diverged | Deposed | StreamDeleted):
            status = HealthStatus.FAILED
        return Health(status, tuple(reasons), {"stream": self.stream, "lag_bytes": lag.bytes})

    async def run_once(self) -> None:
        """Tier everything that is there, the open end included, and persist it."""
        await self._with_resolve(self._all_of_it)

    async def follow(self) -> None:
        """Keep up with the log until cancelled."""
        while True:
            await self.catch_up()
            await self._clock.sleep(self.config.poll_interval_ms / 1000)

    async def settle(self) -> None:
        """Before a stop: make a root of what is uploaded. Nothing is lost where it is left out or fails."""
        if self.remote.pending:
            await self._persist()

    async def catch_up(self) -> None:
        """One round of `follow`: look at the files, upload what is due, persist what is due."""
        await self._with_resolve(self.step)

    async def _with_resolve(self, work: object) -> None:
        """Do the work on a resolved manifest; resolve again where another writer came first."""
        assert callable(work)
        for attempt in range(RESOLVES_MAX):
            try:
                self.log.refresh()
                # A new epoch may have cut the end of the log off before it went on: check again.
                if not self._resolved or self.log.epoch != self._log_epoch:
                    self._resolved = False
                    await self._resolve()
                await work()
            except _LOOK_AGAIN as error:
                self._resolved = False
                if isinstance(error, SegmentChanged):
                    self.log.forget()
                if attempt + 1 == RESOLVES_MAX:
                    self._error = error
                    raise
                await self._clock.sleep(self.config.retry.wait_s(attempt + 1, self.remote.calls.random))
            except BaseException as error:
                self._resolved = False
                self._error = error if isinstance(error, Exception) else None
                raise
            else:
                self._error = None
                return
            finally:
                self._tell_lag()

    def _tell_lag(self) -> None:
        """To metrics, gate and log, also after a failure: that is when it matters."""
        if self._gate is not None:
            self._gate.tiered(self.remote.persisted.next_offset)
        self._metrics.update(self)
        alarms = self.lag().alarms(self.config)
        if alarms and not self._alarmed:
            _log.warning("stream %s lags behind: %s", self.stream, "; ".join(alarms))
        elif self._alarmed and not alarms:
            _log.info("stream %s has caught up", self.stream)
        self._alarmed = bool(alarms)

    async def _all_of_it(self) -> None:
        await self._upload(None)
        await self._persist()
        await self._retain()

    async def step(self) -> None:
        """Upload what is due, persist what is due, retain; on a manifest that is resolved."""
        before_ms = self._clock.now_ms() - self.config.fragment_age_ms
        await self._upload(before_ms)
        if self._root_is_due():
            await self._persist()
            await self._retain()
        elif not self.remote.pending:
            await self._retain()

    def _root_is_due(self) -> bool:
        pending = len(self.remote.pending)
        if not pending:
            return False
        if self.remote.persisted.empty or self._found:
            # Nobody can read the stream yet, or a writer before this one left something behind: whoever is
            # stopped again and again before a root is due must not put it off for ever.
            return True
        if self._changed_at is None:
            self._changed_at = self._clock.monotonic()
        age_ms = (self._clock.monotonic() - self._changed_at) * 1000
        return pending >= self.config.changes_max or age_ms >= self.config.root_interval_ms

    async def _persist(self) -> None:
        if await self.remote.persist():
            self.progress.roots += 1
            if self._gate is not None:
                self._gate.tiered(self.remote.persisted.next_offset)
        self._found = False
        # Fragments that came while the root was written wait from now on, not for ever.
        self._changed_at = self._clock.monotonic() if self.remote.pending else None

    async def _retain(self) -> None:
        removed = await self.remote.retain(self.config.retention)
        self.progress.removed += removed
        self.progress.roots += bool(removed)

    async def _resolve(self) -> None:
        self.remote.epoch = self.log.epoch if self._epoch is None else self._epoch
        await self.remote.resolve(None if self.log.empty else self.log.first_offset)
        self._found = bool(self.remote.pending)
        self._last = await self.remote.trailing()
        await self._check_timeline()
        self._log_epoch = self.log.epoch
        self._resolved = True

    async def _check_timeline(self) -> None:
        """The last chunk in the bucket is the one of that id in the local log, if that is still there."""
        if self._last is None or self.log.empty:
            return
        tail = await self.remote.fragments.tail(self._last.first_offset)
        chunk_id = tail.last.chunk_id
        if chunk_id < self.log.first_offset:
            return
        if chunk_id < self.log.next_offset:
            mine = self.log.identity(chunk_id)
            if mine != tail.last.identity:
                reason = f"the bucket has chunk {tail.last.identity}, the local log {mine}"
                raise Diverged(self.stream, offset=chunk_id, reason=reason)
            return
        await self._check_behind()

    async def _check_behind(self) -> None:
        """The bucket is ahead: fine for a replica that lags, if its last chunk is in there."""
        mine = self.log.segments[-1].header(-1)
        theirs = await self.remote_identity(mine.chunk_id)
        if theirs is not None and theirs != mine.identity:
            reason = f"the bucket has chunk {theirs}, the local log {mine.identity}"
            raise Diverged(self.stream, offset=mine.chunk_id, reason=reason)

    async def remote_identity(self, chunk_id: int) -> tuple[int, int, int] | None:
        """Epoch, id and checksum of a chunk in the remote tier; None where it is not in there any more."""
        lookup = Lookup(self.remote.nodes, self.remote.fragments)
        header = await lookup.chunk_header(self.remote.persisted, self.remote.pending, chunk_id)
        return None if header is None else header.identity

    async def repair(self) -> int:
        """After `Diverged`: cut the remote tier back to the last fragment that the local log proves.

        Returns the next offset from which tiering goes on. Refuses where no fragment can be proven, or where
        the local log does not reach back to the common point: then nothing would be left to go on with.
        """
        self.log.refresh()
        self.remote.epoch = self.log.epoch if self._epoch is None else self._epoch
        await self.remote.resolve()
        lookup = Lookup(self.remote.nodes, self.remote.fragments)
        manifest = self.remote.persisted
        ref = None if manifest.empty else await lookup.by_offset(manifest, manifest.next_offset - 1)
        while ref is not None:
            tail = await self.remote.fragments.tail(ref.offset)
            if self.log.identity(tail.last.chunk_id) == tail.last.identity:
                break
            if ref.offset <= max(manifest.first_offset, self.log.first_offset):
                ref = None
            else:
                ref = await lookup.by_offset(manifest, ref.offset - 1)
        if ref is None:
            reason = "no fragment in the bucket is proven by the local log"
            raise Diverged(self.stream, offset=self.log.first_offset, reason=reason)
        self._resolved = False
        await self.remote.cut_back(tail.trailer.next_offset)
        return tail.trailer.next_offset

    async def _upload(self, before_ms: int | None) -> None:
        while True:
            start = self._start()
            if start is None:
                return
            batch: list[Cut] = []
            for cut in cuts(
                self.log,
                start,
                target_bytes=self.config.fragment_bytes,
                before_ms=before_ms,
                last=self._last,
            ):
                batch.append(cut)
                if len(batch) >= self.config.uploads_max * 4:
                    break
            if not batch:
                return
            try:
                await self._upload_batch(batch)
            except FormatError:
                # Damage in the log stays; what lies before it must not wait for its end.
                await self._persist()
                raise
            if self._root_is_due():
                await self._persist()

    def _start(self) -> int | None:
        """Where cutting goes on; None where the log has nothing new."""
        if self.log.empty:
            return None
        if self.remote.empty:
            return self.log.first_offset
        offset = self.remote.next_offset
        if self.log.first_offset > offset:
            self.remote.declare_gap(self.log.first_offset)
            return self.log.first_offset
        if offset >= self.log.next_offset:
            return None
        segment = self.log.segment_of(offset)
        if segment is None or int(segment.records["chunk_id"][segment.find(offset)]) != offset:
            raise Diverged(self.stream, offset=offset, reason="no chunk of the local log begins there")
        return offset

    async def _upload_batch(self, batch: Sequence[Cut]) -> None:
        """Upload in parallel and apply in order; where an adopted fragment ends elsewhere, stop there."""

        async def one(cut: Cut) -> FragmentInfo:
            async with self._own_room, self._shared_room:
                return await self.remote.fragments.put(FragmentSource(cut), self.log.identity)

        tasks = [asyncio.create_task(one(cut)) for cut in batch]
        try:
            await self._apply_in_order(batch, tasks)
        except (Exception, asyncio.CancelledError):
            await _abandon(tasks)
            raise
        await _abandon(tasks)

    async def _apply_in_order(
        self, batch: Sequence[Cut], tasks: Sequence[asyncio.Task[FragmentInfo]]
    ) -> None:
        for cut, task in zip(batch, tasks, strict=True):
            info = await task
            self._apply(cut, info)
            if info.next_offset != cut.next_offset:
                return

    def _apply(self, cut: Cut, info: FragmentInfo) -> None:
        self.remote.append([info])
        self._last = info
        if self._changed_at is None:
            self._changed_at = self._clock.monotonic()
        self.progress.fragments += 1
        self.progress.bytes += info.data_bytes
        self.progress.adopted += info.next_offset != cut.next_offset


async def _abandon(tasks: Sequence[asyncio.Task[FragmentInfo]]) -> None:
    """Let go of uploads whose cut is not wanted any more; the bucket keeps what it has for the next look."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
