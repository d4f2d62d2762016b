"""Reading as a member of a group: poll, work, commit.

    async with GroupConsumer(member, reader) as consumer:
        while batches := await consumer.poll(timeout_s=10):
            ...
            await consumer.commit()

A poll reads from every partition the member owns, beginning at what was committed last. `commit` commits what
polls have handed out. What was handed out and not committed comes again, to whoever owns the partition then:
at least once. A partition whose commit is refused is dropped; its new owner began at the last commit.
"""

from __future__ import annotations

import math
from types import TracebackType
from typing import Literal, Self, get_args

from forebay.errors import ForebayError, UsageError
from forebay.kit.clock import Clock
from forebay.log._errors import OffsetOutOfRange
from forebay.log._fetched import Fetched, FetchedBatch, ReadRequest
from forebay.log._group_member import GroupMember
from forebay.log._group_records import GenerationFenced, TopicPartition
from forebay.log._reader import LogReader

__all__ = ["GroupConsumer", "StartAt"]

StartAt = Literal["earliest", "latest"]


class GroupConsumer:
    """A member that reads. One task polls and commits."""

    def __init__(
        self, member: GroupMember, reader: LogReader, *, clock: Clock, start_at: StartAt = "earliest"
    ) -> None:
        """`start_at`: where to begin in a partition without a committed offset."""
        if start_at not in get_args(StartAt):
            raise UsageError(f"a start at {start_at!r}", hint="'earliest' or 'latest'")
        self.member = member
        self._reader = reader
        self._clock = clock
        self._start_at = start_at
        self._positions: dict[TopicPartition, int] = {}
        """Next offset to hand out, of partitions this consumer owns."""
        self._began: dict[TopicPartition, int] = {}
        """Where each began: there is nothing to commit before something was handed out."""
        self._claims: dict[TopicPartition, int] = {}
        """Under which claim of the member."""
        self._generations: dict[TopicPartition, int] = {}
        """Generation of the group at that time, for messages."""

    async def __aenter__(self) -> Self:
        await self.member.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.member.close()

    @property
    def positions(self) -> dict[TopicPartition, int]:
        """Next offset to be handed out, by partition."""
        return dict(self._positions)

    async def poll(self, *, timeout_s: float = 0.0, max_bytes: int | None = None) -> list[FetchedBatch]:
        """Records of any of its partitions; empty where none came within the timeout.

        `max_bytes` is for each partition. A partition that was trimmed beyond its position goes on at the
        earliest offset. Raises `Closed` outside of its group, where it would wait for nothing for ever.
        """
        if math.isnan(timeout_s):
            raise UsageError(
                f"a timeout of {timeout_s}", hint="seconds, as a number"
            )  # It would never be over.
        self.member.check_joined()
        deadline = self._clock.monotonic() + timeout_s
        while True:
            await self._adopt()
            batches = await self._read(max_bytes)
            left_s = deadline - self._clock.monotonic()
            if batches or left_s <= 0:
                return batches
            await self._wait(min(left_s, 1.0))

    async def commit(self) -> None:
        """Commit everything that was handed out.

        Raises `GenerationFenced` for what is no longer ours, after the rest was committed.
        """
        member, owned = self.member, self.member.owned
        changed: dict[TopicPartition, int] = {}
        fenced: list[GenerationFenced] = []
        for place, offset in list(self._positions.items()):
            handed_out = offset != self._began[place]
            if member.claim_of(place) == self._claims[place]:
                if handed_out and owned[place] != offset:
                    changed[place] = offset
                continue
            if handed_out:
                generation = self._generations[place]
                fenced.append(
                    GenerationFenced(member.group, place, generation=generation, current=member.generation)
                )
            self._forget(place)
        try:
            if changed:
                await member.commit(changed)
        except GenerationFenced as error:
            self._forget(error.partition)
            raise
        if fenced:
            raise fenced[0]

    async def _adopt(self) -> None:
        """Begin with what is newly owned, forget what is not owned any more."""
        owned = self.member.owned
        for place in [place for place in self._positions if place not in owned]:
            self._forget(place)
        for place, committed in owned.items():
            claim = self.member.claim_of(place)
            if claim is not None and claim != self._claims.get(place):
                begin = await self._begin(place, committed)
                self._positions[place] = self._began[place] = begin
                self._claims[place], self._generations[place] = claim, self.member.generation

    def _forget(self, place: TopicPartition) -> None:
        for table in (self._positions, self._began, self._claims, self._generations):
            table.pop(place, None)

    async def _begin(self, place: TopicPartition, committed: int | None) -> int:
        if committed is not None:
            return committed
        ends = await self._reader.offsets(place.topic, place.partition)
        return ends.earliest if self._start_at == "earliest" else ends.next

    async def _read(self, max_bytes: int | None) -> list[FetchedBatch]:
        places = sorted(self._positions)
        requests = [
            ReadRequest(place.topic, place.partition, self._positions[place], max_bytes) for place in places
        ]
        found: list[FetchedBatch] = []
        problem: ForebayError | None = None
        for place, answer in zip(places, await self._reader.read_many(requests), strict=True):
            if isinstance(answer, Fetched):
                found += answer.batches
                self._positions[place] = answer.next_offset
            elif isinstance(answer, OffsetOutOfRange) and answer.offset < answer.earliest:
                self._positions[place] = answer.earliest
            else:
                problem = problem or answer
        if problem is not None and not found:
            raise problem
        return found

    async def _wait(self, timeout_s: float) -> None:
        """Until there is something to read; not for long, because what it owns may change."""
        wanted = [(place.topic, place.partition, offset) for place, offset in self._positions.items()]
        if wanted:
            await self._reader.wait_for_data(wanted, timeout_s=timeout_s)
        else:
            await self._clock.sleep(min(timeout_s, 0.1))
