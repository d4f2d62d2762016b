"""Many small appends become one large object: select, rewrite, and hand over to the steps.

One call of `compact_once` is one range of one partition:

    finish what is in the slot -> put the index entry of the pending append, if absent -> select a run of WAL
    entries from the cursor on -> fetch, check and join their batches -> PUT one object -> take the steps

A run starts exactly at the cursor and ends exactly at the end of an entry; an entry that leaves a gap, or
straddles, ends it. Entries younger than `min_age_ms` are left alone: a writer that lost the reply to its
commit still finds its own append by id in the index until its deadline is over.

Small compacted objects would stay small for ever, since only WAL entries are selected. A run below the target
therefore waits until its oldest entry is `wait_for_full_ms` old, or until more has come.

`compact_all` does this range after range, and reads the slices of the next one while the store is busy with
the object of this one; see `_compaction_ahead`.

What becomes of two compactors at once, and of one that stalls anywhere, is told in `_compaction_steps`.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeVar

from forebay.coordination import ABSENT, Coordinator
from forebay.errors import NotFound, OutcomeUnknown, PreconditionFailed, Unavailable, UsageError
from forebay.formats import bytes_batch
from forebay.kit.clock import Clock
from forebay.kit.ids import IdSource
from forebay.kit.retry import RetryPolicy, retry
from forebay.log._compaction_ahead import Ahead, ReadAhead
from forebay.log._compaction_rewrite import Folded, Rewriter, Source
from forebay.log._compaction_run import Run, RunLimits, entries_from, select_run
from forebay.log._compaction_steps import STEP_POLICY, CompactionSteps, Ended
from forebay.log._errors import DataLost
from forebay.log._keys import PartitionKeys
from forebay.log._meta import PartitionMeta, located
from forebay.log._numbers import WHOLE_MAX
from forebay.log._records import Compaction, encode_record
from forebay.log._resolve import Located
from forebay.log._topic import TARGET_BYTES_MAX
from forebay.log._uris import uri_of
from forebay.storage import ObjectStore

__all__ = ["CompactionResult", "Compactor", "CompactorConfig", "Outcome"]

T = TypeVar("T")

Outcome = Literal["compacted", "resumed", "skipped", "waiting", "idle", "raced"]
"""What a call did: `skipped` moved the cursor over trimmed offsets, `waiting` found too little to do yet."""

RACES_MAX: Final = 5
"""Races lost in a row after which `compact_all` leaves the partition to others."""


@dataclass(frozen=True, slots=True)
class CompactorConfig:
    """How much at once, and how early."""

    target_bytes: int = 64 * 1024 * 1024
    """Bytes of records a compacted object should hold. 1 to 512 MiB. Peak memory: two to three times this."""
    entries_max: int = 20_000
    """Most index entries of one run. At least 1."""
    entries_min: int = 2
    """Fewest index entries worth a rewrite. At least 1."""
    min_age_ms: int = 120_000
    """Milliseconds an append is left alone: longer than a writer looks for its own append. At least 0, which
    leaves none alone, whatever its time."""
    wait_for_full_ms: int = 600_000
    """Milliseconds a run below the target waits for more, by the age of its first entry. At least 0."""
    fetches_max: int = 16
    """Slices fetched at once. At least 1."""
    codec: bytes_batch.Codec = "none"
    """Compression of compacted objects: `none` or `zstd`."""
    read_back: bool = True
    """Whether a new object is read back and compared before its sources are let go."""
    commit_deadline_ms: int = 600_000
    """Milliseconds from the upload to the record that names it; later the object is written again. It must be
    well below the grace of vacuum. At least 1."""

    def __post_init__(self) -> None:
        low = min(self.target_bytes, self.entries_max, self.entries_min, self.fetches_max)
        times = min(self.min_age_ms, self.wait_for_full_ms)
        if low < 1 or times < 0 or self.commit_deadline_ms < 1 or self.target_bytes > TARGET_BYTES_MAX:
            raise UsageError(f"not a usable configuration: {self}", hint="see the range under each field")


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """What one call did, and what it saw."""

    topic: str
    partition: int
    outcome: Outcome
    start_offset: int | None = None
    end_offset: int | None = None
    records: int = 0
    entries: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    data_key: str | None = None
    """The compacted object."""
    swept: int = 0
    """Stale index keys removed."""
    lag_records: int = 0
    """Records that are committed and not compacted, after this call."""
    candidate_entries: int = 0
    """Index entries that were ready to be compacted."""
    candidate_bytes: int = 0
    pending: bool = False
    """Whether an append was pending, so that its index entry was put."""
    recovered_from: str | None = None
    """State of the compaction that was found in the slot."""
    reason: str = ""
    """Why nothing was done, or how the run ended."""

    @property
    def progressed(self) -> bool:
        """Whether the cursor has moved, so that more may be waiting."""
        return self.outcome in ("compacted", "resumed", "skipped")


class Compactor:
    """Compacts any partition of a deployment. Two at once on one partition are safe."""

    def __init__(
        self,
        store: ObjectStore,
        coordinator: Coordinator,
        *,
        clock: Clock,
        ids: IdSource,
        randomness: random.Random,
        config: CompactorConfig | None = None,
        policy: RetryPolicy = STEP_POLICY,
        on_stage: Callable[[str, float], None] | None = None,
    ) -> None:
        """`on_stage` hears of every stage that was done, and how many seconds it took."""
        self._store = store
        self._coordinator = coordinator
        self._clock = clock
        self._ids = ids
        self._random = randomness
        self.config = config or CompactorConfig()
        self._policy = policy
        self._on_stage = on_stage or (lambda name, seconds: None)
        self.steps = CompactionSteps(store, coordinator, clock, randomness, policy, self._on_stage)
        self._rewriter = Rewriter(store, clock, ids, randomness, policy, self._on_stage)

    async def compact_once(
        self, topic: str, partition: int, *, config: CompactorConfig | None = None
    ) -> CompactionResult:
        """One range: finish what is under way, or else fold the next run. Safe to repeat at any time."""
        work = _Work(self, PartitionKeys(topic, partition), config or self.config)
        return await work.run()

    async def compact_all(
        self,
        topic: str,
        partition: int,
        *,
        config: CompactorConfig | None = None,
        progress: Callable[[CompactionResult], None] | None = None,
        runs_max: int | None = None,
    ) -> list[CompactionResult]:
        """`compact_once` until there is nothing more to do, or so often; the last result says why."""
        results: list[CompactionResult] = []
        raced = 0
        ahead = Ahead()
        try:
            while True:
                is_last = len(results) + 1 == runs_max
                work = _Work(self, PartitionKeys(topic, partition), config or self.config, ahead, is_last)
                result = await work.run()
                results.append(result)
                if progress is not None:
                    progress(result)
                # Having lost a race says nothing of what is left; losing every time says who does the work.
                raced = raced + 1 if result.outcome == "raced" else 0
                if is_last or (not result.progressed and not 0 < raced < RACES_MAX):
                    return results
        finally:
            await ahead.close()

    async def resume(self, topic: str, partition: int) -> Ended | None:
        """Finish the compaction under way, whoever began it; None where there is none."""
        return await self.steps.resume(PartitionKeys(topic, partition))


class _Work:
    """One call of `compact_once`, or one round of `compact_all`."""

    def __init__(
        self,
        compactor: Compactor,
        keys: PartitionKeys,
        config: CompactorConfig,
        ahead: Ahead | None = None,
        is_last: bool = False,
    ) -> None:
        """`ahead` holds what the round before has read for this one, and this one reads for the next."""
        self._ahead = ahead
        self._is_last = is_last
        self._keys = keys
        self._config = config
        self._store = compactor._store
        self._coordinator = compactor._coordinator
        self._clock = compactor._clock
        self._ids = compactor._ids
        self._random = compactor._random
        self._policy = compactor._policy
        self._stage = compactor._on_stage
        self._steps = compactor.steps
        self._rewriter = compactor._rewriter

    async def run(self) -> CompactionResult:
        keys = self._keys
        ended = await self._steps.resume(keys)
        meta = await self._steps.meta(keys)
        blank = CompactionResult(
            keys.topic,
            keys.partition,
            "idle",
            lag_records=meta.lag,
            pending=meta.control is not None and meta.control.pending is not None,
        )
        if ended is not None:
            return await self._resumed(blank, ended, meta)
        if meta.control is None:
            return replace(blank, reason="the partition does not exist")
        await self._recover_pending(meta)
        skip_to = await self._skip_target(meta)
        if skip_to > meta.cursor:
            return await self._skip(blank, meta, skip_to)
        return await self._fold(blank, meta)

    async def _resumed(self, blank: CompactionResult, ended: Ended, meta: PartitionMeta) -> CompactionResult:
        record = ended.record
        finished = ended.outcome == "finished"
        return replace(
            blank,
            outcome="resumed" if finished else "raced",
            start_offset=record.start_offset,
            end_offset=record.end_offset,
            records=record.msg_count if finished else 0,
            data_key=record.data_key or None,
            recovered_from=ended.found_in,
            reason="finished what another compactor began" if finished else "dropped a record that came late",
        )

    # -- what to fold

    async def _recover_pending(self, meta: PartitionMeta) -> None:
        """Put the index entry of the last append, if it is not there: its writer may be gone."""
        pending = None if meta.control is None else meta.control.pending
        if pending is None:
            return
        key, value = self._keys.index(pending.end_offset), encode_record(pending.index_entry())

        async def put() -> None:
            try:
                await self._coordinator.put(key, value, ABSENT, partition_key=self._keys.partition_key)
            except (PreconditionFailed, OutcomeUnknown):
                return  # There already, or to be found by the scan that follows, or left for the next call.

        await self._patiently(put)

    async def _skip_target(self, meta: PartitionMeta) -> int:
        """Where the cursor belongs if what lies above it was trimmed, or compacted without a record."""
        first = await self._first_entry(max(meta.cursor, meta.earliest))
        if first is not None and first.entry.type == "COMPACTED":
            return first.end_offset + 1 if first.start_offset <= max(meta.cursor, meta.earliest) else 0
        if meta.earliest <= meta.cursor:
            return 0
        target = meta.earliest if first is None else min(first.start_offset, meta.earliest)
        pending = None if meta.control is None else meta.control.pending
        if pending is not None and pending.end_offset >= meta.earliest:
            # Its index entry may not have arrived yet. A cursor inside it could never move again.
            target = min(target, pending.start_offset)
        return target

    async def _first_entry(self, offset: int) -> Located | None:
        found = await self._patiently(
            lambda: self._coordinator.ceiling(
                self._keys.index(offset), partition_key=self._keys.partition_key
            )
        )
        return None if found is None else located(self._keys, found)

    async def _skip(self, blank: CompactionResult, meta: PartitionMeta, offset: int) -> CompactionResult:
        record = Compaction(
            compaction_id=self._ids.uuid(),
            state="UPDATING_CURSOR",
            start_offset=meta.cursor,
            end_offset=offset - 1,
            msg_count=offset - meta.cursor,
            data_key="",
            encoding=bytes_batch.ENCODING,
            created_at_ms=self._clock.now_ms(),
        )
        await self._steps.begin(self._keys, record)
        await self._steps.resume(self._keys)
        now = await self._steps.meta(self._keys)
        return replace(
            blank,
            outcome="skipped" if now.cursor >= offset else "raced",
            start_offset=record.start_offset,
            end_offset=record.end_offset,
            lag_records=now.lag,
            reason="these offsets were trimmed or compacted already",
        )

    async def _select(self, cursor: int) -> Run | None:
        config = self._config
        entries = entries_from(
            self._coordinator,
            self._keys,
            cursor,
            clock=self._clock,
            randomness=self._random,
            policy=self._policy,
        )
        # Without a least age nothing is too young, also not what a clock that was ahead has dated.
        young_ms = self._clock.now_ms() - config.min_age_ms if config.min_age_ms else WHOLE_MAX
        began = self._clock.monotonic()
        run = await select_run(entries, cursor, RunLimits(config.target_bytes, config.entries_max, young_ms))
        self._stage("select", self._clock.monotonic() - began)
        return run

    # -- fold

    async def _fold(self, blank: CompactionResult, meta: PartitionMeta) -> CompactionResult:
        ready = None if self._ahead is None else await self._ahead.take(meta.cursor)
        run = await self._select(meta.cursor) if ready is None else ready.run
        if run is None:
            return replace(blank, reason="no entry is old enough" if meta.lag else "everything is compacted")
        blank = replace(blank, candidate_entries=len(run.entries), candidate_bytes=run.bytes)
        waits = self._waits(run)
        if waits:
            return replace(blank, outcome="waiting", reason=waits)
        try:
            return await self._rewrite(blank, run, await self._read(run) if ready is None else ready.source)
        except NotFound as error:
            # A rival folded the range, and vacuum took its sources: then the cursor has moved.
            if (await self._steps.meta(self._keys)).cursor == meta.cursor:
                raise DataLost(
                    f"{self._keys}: {error.message}, but its index entry names it",
                    hint="restore the object from a copy; `forebay log verify` lists what else is affected",
                ) from error
            return replace(blank, outcome="raced", reason="another compactor was faster")

    def _waits(self, run: Run) -> str:
        if run.ended_by == "target":
            return ""
        if len(run.entries) < self._config.entries_min:
            return f"{len(run.entries)} entries, fewer than {self._config.entries_min}"
        age_ms = max(0, self._clock.now_ms() - run.first_time_ms)
        if age_ms < self._config.wait_for_full_ms and run.ended_by in ("tail", "young"):
            return f"{run.bytes:,} bytes, below the target, and the first is {age_ms / 1000:.0f} s old"
        return ""

    async def _rewrite(self, blank: CompactionResult, run: Run, source: Source) -> CompactionResult:
        config = self._config
        folded = self._rewriter.fold(source, config.codec)
        if self._ahead is not None and not self._is_last:
            following = folded.entries[-1].end_offset + 1
            self._ahead.begin(lambda: self._look_ahead(following))
        began = self._clock.monotonic()
        key = await self._rewriter.upload(self._keys, folded, read_back=config.read_back)
        elapsed = self._clock.monotonic() - began
        if elapsed * 1000 > config.commit_deadline_ms:
            raise Unavailable(
                f"{self._keys}: the upload took {elapsed:.0f} s",
                hint="vacuum might take an object that is named so late; the next call writes it again",
            )
        record = self._record(folded, uri_of(self._store, key))
        return await self._commit(
            replace(
                blank,
                start_offset=record.start_offset,
                end_offset=record.end_offset,
                entries=len(folded.entries),
                bytes_read=folded.bytes_read,
                bytes_written=folded.size,
                data_key=record.data_key,
                reason=f"the run ended by {run.ended_by}",
            ),
            record,
        )

    async def _look_ahead(self, cursor: int) -> ReadAhead | None:
        """The run that comes next if all goes well, unless it would wait."""
        run = await self._select(cursor)
        return None if run is None or self._waits(run) else ReadAhead(run, await self._read(run))

    async def _read(self, run: Run) -> Source:
        config = self._config
        return await self._rewriter.read(
            run, target_bytes=config.target_bytes, fetches_max=config.fetches_max
        )

    def _record(self, folded: Folded, uri: str) -> Compaction:
        first, last = folded.entries[0], folded.entries[-1]
        times = [entry.entry.created_at_ms for entry in folded.entries]
        return Compaction(
            compaction_id=self._ids.uuid(),
            state="WRITING_COMPACTED_INDEX",
            start_offset=first.start_offset,
            end_offset=last.end_offset,
            msg_count=folded.count,
            data_key=uri,
            encoding=bytes_batch.ENCODING,
            created_at_ms=self._clock.now_ms(),
            tail_start_offset=last.start_offset,
            size_bytes=folded.size,
            crc32c=folded.checksum,
            first_time_ms=min(times),
            last_time_ms=max(times),
        )

    async def _commit(self, blank: CompactionResult, record: Compaction) -> CompactionResult:
        keys = self._keys
        await self._steps.begin(keys, record)
        ended = await self._steps.resume(keys)
        ours = await self._is_in_index(record)
        now = await self._steps.meta(keys)
        if not ours:
            other = ended is not None and ended.record.compaction_id != record.compaction_id
            why = "another compaction was under way" if other else "the cursor has moved"
            return replace(blank, outcome="raced", data_key=None, lag_records=now.lag, reason=why)
        swept = await self._steps.sweep(keys, record.start_offset, now.cursor)
        return replace(blank, outcome="compacted", records=record.msg_count, swept=swept, lag_records=now.lag)

    async def _is_in_index(self, record: Compaction) -> bool:
        """Whether our range was folded, by us or by whoever resumed it. Trimmed since counts as well."""
        entry = await self._steps.covering(self._keys, record.end_offset)
        return entry is not None and entry.data_key == record.data_key

    async def _patiently(self, operation: Callable[[], Awaitable[T]]) -> T:
        return await retry(operation, policy=self._policy, clock=self._clock, randomness=self._random)
