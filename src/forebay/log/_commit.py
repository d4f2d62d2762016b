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
from collections.abc import Sequence

from forebay.coordination import Delete, WriteResult
from forebay.errors import ForebayError, NotDone, OutcomeUnknown, PreconditionFailed, Unavailable
from forebay.log._append import Unit
from forebay.log._errors import AnotherLog, Contended, UnknownTopic
from forebay.log._numbers import WHOLE_MAX
from forebay.log._partition_cache import PartitionCache, PartitionState, load_state
from forebay.log._producers import admit, judge
from forebay.log._proposals import Proposal, Try, chunks, first_control, propose, waves
from forebay.log._records import Control
from forebay.log._settle import Doubt, Verdict, settle
from forebay.log._topic import Topic, TopicDeleted
from forebay.log._topics import Catalog
from forebay.log._upload import Uploader
from forebay.log._writer_config import WriterParts

__all__ = ["Committer"]


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
        self._tail_cache = parts.tail_cache
        # Two commits of one writer to one partition would only refuse each other.
        self._turn = asyncio.Lock()
        self._pair_seen = False
        """Whether store and coordinator were looked at, and nothing spoke against them."""

    async def commit(self, units: Sequence[Unit]) -> None:
        """Answer every unit. Units of one partition are committed in the order given, one per round trip."""
        async with self._turn:
            began = self._clock.monotonic()
            for wave in waves(units):
                await self._commit_wave(wave)
            self._metrics.committed(self._clock.monotonic() - began)

    async def _commit_wave(self, units: Sequence[Unit]) -> None:
        tries = [Try(unit, self._cache.get(unit.keys)) for unit in units]
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

    async def _attempt(self, tries: Sequence[Try]) -> None:
        if unknown := self._unknown(tries):
            await self._learn(unknown)
        ready = self._admitted(tries)
        if missing := self._missing(ready):
            ready = await self._uploaded(ready, missing)
        if not ready:
            return
        now_ms = self._clock.now_ms()
        proposals = [propose(one, now_ms, self._writer) for one in ready]
        results = await self._send(proposals)
        begun: list[Try] = []
        committed: list[Unit] = []
        now = self._clock.monotonic()
        for proposal, result in zip(proposals, results, strict=True):
            if result.error is not None:
                self._refused(proposal, result.error)
                continue
            self._committed(proposal, result.version, now)
            # A new partition is told of once its topic is confirmed.
            if proposal.state.control is None:
                begun.append(proposal.one)
            else:
                committed.append(proposal.one.unit)
        self._tell(committed)
        if begun:
            await self._confirm(begun)

    # -- learning where the partitions stand

    def _unknown(self, tries: Sequence[Try]) -> list[Try]:
        """Those whose state is to be read. A remembered one by which a group would be answered is forgotten.

        A commit proves that what it builds on is the present. A refusal or a recognised repetition proves
        nothing: it needs a state that was read after the call began.
        """
        unknown = []
        for one in tries:
            if one.state is not None and not one.read:
                control = one.state.control
                if control is None or judge(one.unit, control):
                    one.state = None
            if one.state is None:
                unknown.append(one)
        return unknown

    async def _learn(self, tries: Sequence[Try]) -> None:
        """Read the control records of partitions that are not known, settle doubts, find new topics."""
        looks = asyncio.gather(*[self._load(one) for one in tries])
        foreign, begun = await asyncio.gather(self._foreign(), looks)
        if foreign is not None:
            for one in tries:
                if not one.done:
                    self._fail(one, foreign)
            return
        if any(begun):
            await self._confirm([one for one, new in zip(tries, begun, strict=True) if new])
        by_topic: dict[str, list[Try]] = defaultdict(list)
        for one in tries:
            if not one.done and one.state is not None and _just_begun(one.state.control):
                by_topic[one.unit.keys.topic].append(one)
        if by_topic:
            await asyncio.gather(*[self._find_topic(topic, new) for topic, new in by_topic.items()])

    async def _foreign(self) -> AnotherLog | None:
        """What is wrong where the store belongs to another log than the coordinator. Asked for once."""
        if self._pair_seen:
            return None
        self._metrics.coordination_requests["get"].inc()
        try:
            await self._catalog.pair.check()
        except AnotherLog as error:
            return error
        except ForebayError:
            return None  # Not to be told now: the next partition that is not known yet asks again.
        self._pair_seen = True
        return None

    async def _load(self, one: Try) -> bool:
        """Read one; whether it turned out to be committed already, and its topic is to be confirmed."""
        keys = one.unit.keys
        try:
            state = await load_state(self._coordinator, keys, self._metrics)
            verdict = await settle(self._coordinator, one.unit, one.doubt, state, self._metrics)
        except (Unavailable, OutcomeUnknown) as error:
            one.failure = error
            return False
        except ForebayError as error:
            self._fail(one, error)
            return False
        if verdict is Verdict.COMMITTED:
            state.committed_at = self._clock.monotonic()
            self._cache.put(state)
            one.done = True
            if _just_begun(state.control):
                return True
            self._tell([one.unit])
        elif verdict is Verdict.UNKNOWN:
            one.done = True
        else:
            if verdict is Verdict.NOT_COMMITTED:
                one.doubt = None
            one.state, one.read = state, True
        return False

    async def _find_topic(self, topic: str, tries: Sequence[Try]) -> None:
        """Find the topic of partitions that begin, or have just begun.

        A control record that begins below its topic is left over: the request that made it came late, after
        a deletion. It counts as none, and is replaced. Going on with it would give out old offsets again.
        """
        try:
            found = await self._topic(topic, _partitions(tries))
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
            control = one.state.control
            if control is not None and control.start_offset >= found.first_offset:
                continue
            try:
                found.check_partition(one.unit.keys.partition)
            except ForebayError as error:
                self._fail(one, error)
            one.state.control, one.state.topic = None, found
            if one.doubt is not None and one.doubt.start_offset < found.first_offset:
                self._fail(one, UnknownTopic(topic))  # It may have been in the topic that is gone.

    async def _topic(self, topic: str, partitions: int) -> Topic:
        self._metrics.coordination_requests["get"].inc()
        if self._auto_create:
            return await self._catalog.ensure(topic, partitions)
        found = await self._catalog.describe(topic)
        if found.state != "ACTIVE":
            raise TopicDeleted(topic)
        return found

    # -- what may be appended, and that its data is there

    def _admitted(self, tries: Sequence[Try]) -> list[Try]:
        ready = []
        for one in tries:
            if one.done or one.state is None:
                continue
            if one.read:  # Otherwise `_unknown` has found nothing against any group.
                admit(one.unit, judge(one.unit, one.state.control or first_control(one.state)))
            if one.unit.groups:
                ready.append(one)
            else:
                one.done = True
        return ready

    def _missing(self, tries: Sequence[Try]) -> list[Try]:
        """What lost some of its groups, or was uploaded so long ago that a vacuum might come near it."""
        oldest = self._clock.monotonic() - self._upload_deadline_s
        return [one for one in tries if one.unit.slice is None or one.unit.uploaded_at < oldest]

    async def _uploaded(self, tries: Sequence[Try], missing: Sequence[Try]) -> list[Try]:
        """Upload again what is missing; those that then are there."""
        there = set(await self._uploader.upload([one.unit for one in missing]))
        for one in missing:
            if one.unit not in there:
                # Answered by the uploader as not done, which holds only if no earlier write may still land.
                one.done = True
                if one.doubt is not None:
                    one.unit.fail(_unknown(one))
        return [one for one in tries if not one.done]

    # -- one round trip

    async def _send(self, proposals: Sequence[Proposal]) -> list[WriteResult]:
        """The result of each proposal's control write, in order."""
        parts = chunks(proposals)
        if len(parts) == 1:
            return await self._write(parts[0])
        return [result for part in await asyncio.gather(*map(self._write, parts)) for result in part]

    async def _write(self, proposals: Sequence[Proposal]) -> list[WriteResult]:
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

    def _refused(self, proposal: Proposal, error: ForebayError) -> None:
        one = proposal.one
        one.attempts += 1
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

    def _committed(self, proposal: Proposal, version: int | None, now: float) -> None:
        control, unit = proposal.control, proposal.one.unit
        pending = control.pending
        assert pending is not None
        created_at_ms = pending.created_at_ms
        self._cache.put(PartitionState(unit.keys, control, version, created_at_ms, committed_at=now))
        unit.succeed(pending.start_offset, pending.data_key, created_at_ms)
        proposal.one.done = True

    def _tell(self, units: Sequence[Unit]) -> None:
        """Appends are committed: to whom it may concern."""
        # Counted once per flush: a counter has a lock.
        self._metrics.appended(sum([unit.slice.body_length for unit in units if unit.slice is not None]))
        if self._tail_cache is None:
            return
        for unit in units:
            if unit.batch is not None:
                keys = unit.keys
                self._tail_cache.committed(
                    keys.topic, keys.partition, unit.start_offset, unit.batch, unit.time_ms
                )

    async def _confirm(self, begun: Sequence[Try]) -> None:
        """See that the topics of new partitions were not deleted in between.

        Creating a control record and checking the catalog cannot be one step, since they live on different
        shards. An append that was under way while its topic was deleted counts as one after the deletion: the
        topic is entered again where that is allowed, and a partition that began under the old one is taken
        back and tried anew.
        """
        by_topic: dict[str, list[Try]] = defaultdict(list)
        for one in begun:
            by_topic[one.unit.keys.topic].append(one)
        for topic, tries in by_topic.items():
            first_offset: int | None
            try:
                first_offset = (await self._topic(topic, _partitions(tries))).first_offset
            except (UnknownTopic, TopicDeleted):
                first_offset = WHOLE_MAX
            except ForebayError:
                # Not to be told now. The appends are committed and stay so; the next ones meet the same.
                first_offset = None
            for one in tries:
                state = self._cache.get(one.unit.keys)
                assert state is not None and state.control is not None
                if first_offset is None:
                    self._cache.forget(state.keys)
                elif state.control.start_offset < first_offset:
                    await self._take_back(one, state)
                    continue
                self._tell([one.unit])

    async def _take_back(self, one: Try, state: PartitionState) -> None:
        """Remove a control record that was created under a topic that is gone, if it is still there."""
        keys = state.keys
        assert state.control is not None and state.version is not None
        self._cache.forget(keys)
        if state.control.log_state == "OPEN":
            self._metrics.coordination_requests["write"].inc()
            delete = Delete(keys.control, state.version, partition_key=keys.partition_key)
            [result] = await self._coordinator.write([delete])
            if result.error is None:
                one.done, one.state, one.doubt = False, None, None
                return
        # It is the deletion's already, or somebody has removed or replaced it.
        one.unit.fail(OutcomeUnknown(f"append to {keys}", reason="its topic was deleted meanwhile"))

    # -- ends

    def _fail(self, one: Try, error: ForebayError) -> None:
        one.unit.fail(_unknown(one) if one.doubt is not None else error)
        one.done = True

    def _give_up(self, one: Try) -> None:
        if one.doubt is None and isinstance(one.failure, PreconditionFailed):
            self._fail(one, Contended(str(one.unit.keys), one.attempts))
        else:
            self._fail(one, one.failure or Unavailable(f"{one.unit.keys} was not reached", hint="try again"))


def _partitions(tries: Sequence[Try]) -> int:
    """How many partitions their topic has at least."""
    return 1 + max(one.unit.keys.partition for one in tries)


def _just_begun(control: Control | None) -> bool:
    """Whether a partition has nothing, or nothing but its last append."""
    return control is None or control.just_begun


def _unknown(one: Try) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"append to {one.unit.keys}",
        reason=str(one.failure or "its reply was lost"),
        hint="it may be in the log; read the tail, or append with a producer id and repeat it",
    )
