"""The commit: one round trip that makes the slices of an uploaded object part of their partitions.

For every partition of a flush, in one request and as one atomic step of its shard:

    put  index/{end of the previous append}  if absent      the entry of the append before this one
    put  meta/control                        if at version  counter += n, pending = this append

`pending` is always the last append. Its index entry is put by whoever commits next, so an append costs one
round trip and is complete the moment its control record is written. That write is the commit point: before
it nothing is visible, after it the offsets are given. An index put that is refused was there already.

Invariants:

* An acknowledgement is given only for a control write that is known to have been done.
* An index entry is put only for an append that is committed already, never together with its own commit:
  operations of one request are answered one by one, and a refused control write would leave it behind.
* At one version of a control record at most one write succeeds. A write of ours whose reply was lost is
  therefore settled by reading: control still at that version, then the same may be sent again, and whichever
  copy arrives first wins; control moved on, then ours is either in it, or in the index, or can never be.
* Whoever replaces `pending` puts its index entry in the same step. So a moved control record and no entry of
  ours at the offset we would have had mean that it did not happen, unless compaction or trim have been there;
  then nothing can be told any more and the caller hears `OutcomeUnknown`.

Crash points: before the upload nothing; after it an object that the vacuum takes; after the commit an append
that its caller never heard of, readable and complete. Nobody has to be told about a crashed writer.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from forebay.coordination import WRITE_BYTES_MAX, WRITE_OPERATIONS_MAX, Put, WriteResult
from forebay.errors import ForebayError, NotDone, OutcomeUnknown, PreconditionFailed, Unavailable
from forebay.kit.conditions import ABSENT
from forebay.log._append import Unit
from forebay.log._errors import Contended
from forebay.log._keys import OFFSET_DIGITS
from forebay.log._partition_cache import PartitionCache, PartitionState, load_state
from forebay.log._producers import admit, judge, remember
from forebay.log._records import Control, Cursor, Pending, encode_record
from forebay.log._settle import Doubt, Verdict, settle
from forebay.log._topics import Catalog, Topic
from forebay.log._upload import Uploader
from forebay.log._writer_config import WriterParts

__all__ = ["Committer"]

OPERATIONS_PER_PARTITION: Final = 2
PARTITIONS_PER_WRITE: Final = WRITE_OPERATIONS_MAX // OPERATIONS_PER_PARTITION
"""Partitions committed in one round trip; a flush with more takes several."""
BYTES_PER_WRITE: Final = WRITE_BYTES_MAX * 3 // 4
"""Bytes of records committed in one round trip: control records of many producers are large."""


@dataclass(slots=True, eq=False)
class _Try:
    """A unit on its way into its partition."""

    unit: Unit
    state: PartitionState | None = None
    """What the next attempt builds on; None: to be read."""
    read: bool = False
    """Whether `state` was read for this very append, and not remembered from an earlier one."""
    doubt: Doubt | None = None
    """A write whose outcome is not known yet."""
    failure: ForebayError | None = None
    """Why the last attempt did not succeed."""
    attempts: int = 0
    done: bool = False


@dataclass(slots=True, eq=False)
class _Proposal:
    """One attempt: what to send, and what then holds."""

    one: _Try
    state: PartitionState
    control: Control
    operations: list[Put]
    size_bytes: int


class Committer:
    """Commits units, one flush at a time."""

    def __init__(
        self, parts: WriterParts, uploader: Uploader, catalog: Catalog, cache: PartitionCache
    ) -> None:
        self._coordinator = parts.coordinator
        self._uploader = uploader
        self._catalog = catalog
        self._cache = cache
        self._clock = parts.clock
        self._random = parts.randomness
        self._policy = parts.config.commit
        self._upload_deadline_s = parts.config.upload_deadline_ms / 1000
        self._auto_create = parts.config.auto_create
        self._writer = parts.name or None
        self._metrics = parts.metrics
        # Two commits of one writer to one partition would only refuse each other.
        self._turn = asyncio.Lock()

    async def commit(self, units: Iterable[Unit]) -> None:
        """Answer every unit. Units of one partition are committed in the order given, one per round trip."""
        async with self._turn:
            began = self._clock.monotonic()
            for wave in _waves(units):
                await self._commit_wave(wave)
            self._metrics.committed(self._clock.monotonic() - began)

    async def _commit_wave(self, units: Sequence[Unit]) -> None:
        tries = [_Try(unit, self._cache.get(unit.keys)) for unit in units]
        deadline = self._clock.monotonic() + self._policy.deadline_ms / 1000
        attempt = 1
        try:
            while True:
                await self._attempt(tries)
                tries = [one for one in tries if not one.done]
                if not tries:
                    return
                wait = self._policy.wait_s(attempt, self._random)
                if attempt >= self._policy.attempts_max or self._clock.monotonic() + wait >= deadline:
                    break
                await self._clock.sleep(wait)
                attempt += 1
        finally:
            # Also where the task is cancelled in the middle: what was sent and not answered is not known.
            for one in tries:
                if not one.done:
                    self._cache.forget(one.unit.keys)
        for one in tries:
            self._give_up(one)

    async def _attempt(self, tries: Sequence[_Try]) -> None:
        self._distrust(tries)
        await self._learn([one for one in tries if one.state is None])
        proposals = self._propose(await self._uploaded(self._admitted(tries)))
        if not proposals:
            return
        results = await self._send(proposals)
        created: list[_Proposal] = []
        for proposal, result in zip(proposals, results, strict=True):
            self._conclude(proposal, result)
            if proposal.one.done and proposal.state.control is None:
                created.append(proposal)
        if created:
            await self._confirm(created)

    # -- learning where the partitions stand

    def _distrust(self, tries: Sequence[_Try]) -> None:
        """Forget remembered states by which a group would be answered without a commit.

        A commit proves that what it builds on is the present. A refusal or a recognised repetition proves
        nothing: it needs a state that was read after the call began.
        """
        for one in tries:
            if one.state is not None and not one.read:
                control = one.state.control
                if control is None or judge(one.unit, control):
                    one.state = None

    async def _learn(self, tries: Sequence[_Try]) -> None:
        """Read the control records of partitions that are not known, settle doubts, find new topics."""
        if not tries:
            return
        await asyncio.gather(*[self._load(one) for one in tries])
        by_topic: dict[str, list[_Try]] = defaultdict(list)
        for one in tries:
            if not one.done and one.state is not None and one.state.control is None:
                by_topic[one.unit.keys.topic].append(one)
        if by_topic:
            await asyncio.gather(*[self._find_topic(topic, new) for topic, new in by_topic.items()])

    async def _load(self, one: _Try) -> None:
        keys = one.unit.keys
        try:
            state = await load_state(self._coordinator, keys, self._metrics)
            verdict = await settle(self._coordinator, one.unit, one.doubt, state, self._metrics)
        except (Unavailable, OutcomeUnknown) as error:
            one.failure = error
            return
        except ForebayError as error:
            self._fail(one, error)
            return
        if verdict is Verdict.COMMITTED:
            state.committed_at = self._clock.monotonic()
            self._cache.put(state)
            self._metrics.appended(one.unit.slice.body_length if one.unit.slice else 0)
            one.done = True
        elif verdict is Verdict.UNKNOWN:
            one.done = True
        else:
            if verdict is Verdict.NOT_COMMITTED:
                one.doubt = None
            one.state, one.read = state, True

    async def _find_topic(self, topic: str, tries: Sequence[_Try]) -> None:
        try:
            found = await self._topic(topic, 1 + max(one.unit.keys.partition for one in tries))
        except (Unavailable, OutcomeUnknown, PreconditionFailed) as error:
            for one in tries:
                one.state, one.failure = None, error
            return
        except ForebayError as error:
            for one in tries:
                self._fail(one, error)
            return
        for one in tries:
            assert one.state is not None
            try:
                found.check_partition(one.unit.keys.partition)
            except ForebayError as error:
                self._fail(one, error)
            one.state.topic = found

    async def _topic(self, topic: str, partitions: int) -> Topic:
        self._metrics.coordination_requests["get"].inc()
        if self._auto_create:
            return await self._catalog.ensure(topic, partitions)
        return await self._catalog.describe(topic)

    # -- what may be appended, and that its data is there

    def _admitted(self, tries: Sequence[_Try]) -> list[_Try]:
        ready = []
        for one in tries:
            if one.done or one.state is None:
                continue
            if one.read:  # Otherwise `_distrust` has found nothing against any group.
                admit(one.unit, judge(one.unit, one.state.control or _first_control(one.state)))
            if one.unit.groups:
                ready.append(one)
            else:
                one.done = True
        return ready

    async def _uploaded(self, tries: Sequence[_Try]) -> Sequence[_Try]:
        """Upload again what lost some of its groups, or is so old that a vacuum might come near it."""
        oldest = self._clock.monotonic() - self._upload_deadline_s
        missing = [one for one in tries if one.unit.slice is None or one.unit.uploaded_at < oldest]
        if not missing:
            return tries
        there = set(await self._uploader.upload([one.unit for one in missing]))
        for one in missing:
            if one.unit not in there:
                # Answered by the uploader as not done, which holds only if no earlier write may still land.
                one.done = True
                if one.doubt is not None:
                    one.unit.fail(_unknown(one))
        return [one for one in tries if not one.done]

    # -- one round trip

    def _propose(self, tries: Sequence[_Try]) -> list[_Proposal]:
        now_ms = self._clock.now_ms()
        return [self._proposal(one, now_ms) for one in tries]

    def _proposal(self, one: _Try, now_ms: int) -> _Proposal:
        state, unit = one.state, one.unit
        assert state is not None and unit.slice is not None
        before = state.control or _first_control(state)
        names, where = state.names, unit.slice
        start = before.sequence_counter
        end = start + where.msg_count - 1
        created_at_ms = max(now_ms, state.floor_ms)
        pending = Pending(
            append_id=unit.append_id,
            start_offset=start,
            end_offset=end,
            msg_count=where.msg_count,
            entry_type="WAL",
            data_key=unit.uri,
            encoding=where.encoding,
            created_at_ms=created_at_ms,
            byte_offset=where.body_offset,
            byte_length=where.body_length,
            crc32c=where.crc32c,
            writer=self._writer,
        )
        control = msgspec.structs.replace(
            before,
            sequence_counter=end + 1,
            pending=pending,
            producers=remember(before, unit.groups, start, created_at_ms),
        )
        home = names.home
        value = encode_record(control)
        operations = []
        if state.control is None:
            cursor = encode_record(Cursor(offset=start))
            operations.append(Put(unit.keys.cursor, cursor, ABSENT, partition_key=home))
        elif before.pending is not None and not state.indexed:
            entry = encode_record(before.pending.index_entry())
            key = f"{names.index}{before.pending.end_offset:0{OFFSET_DIGITS}d}"
            operations.append(Put(key, entry, ABSENT, partition_key=home))
        expected = ABSENT if state.version is None else state.version
        operations.append(Put(names.control, value, expected, partition_key=home))
        size = sum([len(operation.key) + len(operation.value) for operation in operations])
        return _Proposal(one, state, control, operations, size)

    async def _send(self, proposals: Sequence[_Proposal]) -> list[WriteResult]:
        """The result of each proposal's control write, in order."""
        chunks = _chunks(proposals)
        if len(chunks) == 1:
            return await self._write(chunks[0])
        return [result for part in await asyncio.gather(*map(self._write, chunks)) for result in part]

    async def _write(self, proposals: Sequence[_Proposal]) -> list[WriteResult]:
        operations = [operation for proposal in proposals for operation in proposal.operations]
        self._metrics.coordination_requests["write"].inc()
        try:
            results = await self._coordinator.write(operations)
        except NotDone as error:
            return [WriteResult(error=error)] * len(proposals)
        last, found = -1, []
        for proposal in proposals:
            last += len(proposal.operations)
            found.append(results[last])
        return found

    def _conclude(self, proposal: _Proposal, result: WriteResult) -> None:
        one, error = proposal.one, result.error
        one.attempts += 1
        if error is None:
            self._committed(proposal, result.version)
            return
        one.failure = error
        if isinstance(error, PreconditionFailed):
            self._metrics.conflicts.inc()
            one.state = None
        elif isinstance(error, OutcomeUnknown):
            pending = proposal.control.pending
            assert pending is not None
            one.doubt = Doubt(proposal.state.version, pending.start_offset, pending.end_offset)
            one.state = None
        elif not isinstance(error, Unavailable):
            self._fail(one, error)

    def _committed(self, proposal: _Proposal, version: int | None) -> None:
        pending, unit = proposal.control.pending, proposal.one.unit
        assert pending is not None and pending.byte_length is not None
        self._cache.put(
            PartitionState(
                unit.keys,
                proposal.state.names,
                proposal.control,
                version,
                pending.created_at_ms,
                committed_at=self._clock.monotonic(),
            )
        )
        unit.succeed(pending.start_offset, pending.data_key)
        proposal.one.done = True
        self._metrics.appended(pending.byte_length)

    async def _confirm(self, created: Sequence[_Proposal]) -> None:
        """See that topics of new partitions were not deleted in between; if so, enter them again.

        Creating a control record and checking the catalog cannot be one step, since they live on different
        shards. An append that was under way while its topic was deleted counts as one after the deletion.
        """
        for topic in {proposal.one.unit.keys.topic: None for proposal in created}:
            partitions = [
                proposal.one.unit.keys.partition
                for proposal in created
                if proposal.one.unit.keys.topic == topic
            ]
            try:
                await self._catalog.ensure(topic, 1 + max(partitions))
            except ForebayError:
                # The append is committed and stays so; the next one meets the same.
                continue

    # -- ends

    def _fail(self, one: _Try, error: ForebayError) -> None:
        one.unit.fail(_unknown(one) if one.doubt is not None else error)
        one.done = True

    def _give_up(self, one: _Try) -> None:
        if one.doubt is None and isinstance(one.failure, PreconditionFailed):
            self._fail(one, Contended(str(one.unit.keys), one.attempts))
        else:
            self._fail(one, one.failure or Unavailable(f"{one.unit.keys} was not reached", hint="try again"))


def _unknown(one: _Try) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"append to {one.unit.keys}",
        reason=str(one.failure or "its reply was lost"),
        hint="it may be in the log; read the tail, or append with a producer id and repeat it",
    )


def _first_control(state: PartitionState) -> Control:
    assert state.topic is not None
    first = state.topic.first_offset
    return Control(log_state="OPEN", sequence_counter=first, pending=None, start_offset=first)


def _waves(units: Iterable[Unit]) -> list[list[Unit]]:
    """Units such that no wave holds a partition twice, and each partition's are in order."""
    waves: list[list[Unit]] = []
    depth: dict[tuple[str, int], int] = {}
    for unit in units:
        name = (unit.keys.topic, unit.keys.partition)
        number = depth.get(name, 0)
        depth[name] = number + 1
        if number == len(waves):
            waves.append([])
        waves[number].append(unit)
    return waves


def _chunks(proposals: Sequence[_Proposal]) -> list[list[_Proposal]]:
    chunks: list[list[_Proposal]] = [[]]
    size = 0
    for proposal in proposals:
        full = len(chunks[-1]) >= PARTITIONS_PER_WRITE or size + proposal.size_bytes > BYTES_PER_WRITE
        if full and chunks[-1]:
            chunks.append([])
            size = 0
        chunks[-1].append(proposal)
        size += proposal.size_bytes
    return chunks
