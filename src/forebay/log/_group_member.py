"""A member of a consumer group: alive by its session, assigned by the state, owner by its claims.

    join     put members/{id}, ephemeral                     the others see it
    react    state lists other members than there are?       any member writes the next generation
    claim    offsets/{partition}: generation, owner          compare-and-set; the old owner is fenced
    commit   offsets/{partition}: offset                     compare-and-set; one round trip for all

No member leads. Whoever notices that the state does not fit the live members works out an assignment and
writes it under the next generation, by compare-and-set; the others find it and follow. The assignment is only
a plan. What decides who may commit are the claims (see `_group_offsets`), so a member that has not heard of a
new generation does no harm: it reads records that another member reads too, and its commits are refused.

Crash points: after the join the session runs out and the key vanishes; after writing a state everybody
follows it as if its author lived; between claim and first commit the next owner claims over it and begins at
the last commit. Records that were handed out and not committed are handed out again: at least once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from forebay.coordination import Coordinator, Session
from forebay.errors import Closed, ForebayError, OutcomeUnknown, PreconditionFailed, Unavailable, UsageError
from forebay.kit.clock import Clock
from forebay.kit.conditions import ABSENT
from forebay.kit.ids import IdSource
from forebay.kit.retry import RetryPolicy, retry
from forebay.log._group_assign import assign
from forebay.log._group_offsets import GroupOffsets, Held, Refused
from forebay.log._group_records import (
    GenerationFenced,
    GroupOffset,
    GroupState,
    MemberRecord,
    TopicPartition,
    valid_offsets,
)
from forebay.log._keys import CATALOG_PARTITION_KEY, GroupKeys, group_key, validate_group, validate_topic
from forebay.log._records import decode_record, encode_record
from forebay.log._topics import Catalog

__all__ = ["GroupConfig", "GroupMember", "enter_group"]
MEMBER_NAME_CHARS_MAX: Final = 100
"""Longest first part of a member's id."""


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """How members of groups behave."""

    session_timeout_ms: int = 15_000
    """Milliseconds after which a silent member counts as dead. 2,000 to 300,000."""
    refresh_ms: int = 5_000
    """Milliseconds after which a member looks at its group even if nothing told it to. At least 1."""
    member_name: str = "member"
    """First part of the ids of members, for people who look at a group. As a topic name, up to 100."""
    retry: RetryPolicy = field(default_factory=lambda: RetryPolicy(attempts_max=20, base_ms=10, cap_ms=500))
    """For every single step."""

    def __post_init__(self) -> None:
        if self.refresh_ms < 1:
            raise UsageError(f"refresh_ms is {self.refresh_ms}", hint="it is at least 1")
        if len(validate_group(self.member_name)) > MEMBER_NAME_CHARS_MAX:
            raise UsageError(
                f"a member name of {len(self.member_name)} characters",
                hint=f"at most {MEMBER_NAME_CHARS_MAX}",
            )


class GroupMember:
    """One consumer in a group. Use it as a context manager; it looks after itself in the background."""

    def __init__(
        self,
        coordinator: Coordinator,
        catalog: Catalog,
        group: str,
        topics: Iterable[str],
        *,
        clock: Clock,
        ids: IdSource,
        randomness: random.Random,
        config: GroupConfig | None = None,
    ) -> None:
        self.group = validate_group(group)
        if isinstance(topics, str):
            raise UsageError(f"{topics!r} is one topic", hint=f"give a list: [{topics!r}]")
        self.topics = sorted({validate_topic(topic) for topic in topics})
        if not self.topics:
            raise UsageError("a member reads at least one topic", hint="name the topics")
        self._config = config or GroupConfig()
        self.member_id = f"{self._config.member_name}-{ids.ulid()}"
        """Never used twice: a member that comes back is another one."""
        self.generation = 0
        """Generation of the assignment it follows."""
        self._coordinator = coordinator
        self._catalog = catalog
        self._keys = GroupKeys(group)
        self._clock = clock
        self._ids = ids
        self._random = randomness
        self._offsets = GroupOffsets(
            coordinator, self._keys, clock=clock, ids=ids, randomness=randomness, policy=self._config.retry
        )
        self._held: dict[TopicPartition, Held] = {}
        self._claims: dict[TopicPartition, int] = {}
        self._claims_made = 0
        self._session: Session | None = None
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()
        self.last_error: ForebayError | None = None
        """Why the last look at the group failed; None where it did not."""

    # -- life

    async def start(self) -> None:
        """Join the group. Returns when the first assignment is there, be it empty."""
        if self._task is not None:
            raise UsageError("this member has joined already", hint="make another one")
        try:
            await enter_group(self._coordinator, self.group, self._retry)
            await self._join()
            await self._refresh()
        except BaseException:
            # Also when it is cancelled: a session that lives on would hold partitions that nobody reads.
            await self.close()
            raise
        self._task = asyncio.get_running_loop().create_task(self._live(), name=f"forebay {self.member_id}")

    async def close(self) -> None:
        """Leave the group at once, so that others take over without waiting for the session to run out."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        self._held = {}
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # -- what it owns

    def check_joined(self) -> None:
        """Raise `Closed` before it has joined and after it has left."""
        if self._task is None:
            raise Closed("this member is not in its group", hint="use it inside its with block")

    @property
    def owned(self) -> dict[TopicPartition, int | None]:
        """Partitions it may commit for, and where each was committed last; None: never."""
        return {place: held.record.offset for place, held in sorted(self._held.items())}

    def claim_of(self, place: TopicPartition) -> int | None:
        """A number that is another one each time the partition is claimed; None: not owned.

        What was read under one claim must not be committed under a later one: in between somebody else may
        have owned the partition.
        """
        return self._claims.get(place) if place in self._held else None

    async def changed(self) -> None:
        """Return after the next change of what it owns."""
        self._changed.clear()
        await self._changed.wait()

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Say how far the group has come: the next offset to read, by partition. One round trip.

        Raises `GenerationFenced` where a partition belongs to somebody else now; the others are committed.
        An offset never goes back; `Groups.reset` does that. A member commits what it has read: whether the
        log goes so far is not looked up, which would be a second round trip.
        """
        self.check_joined()
        async with self._turn:
            await self._commit(offsets)

    async def _commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        changes: dict[TopicPartition, tuple[Held, GroupOffset]] = {}
        problems: list[ForebayError] = []
        for place, offset in valid_offsets(offsets).items():
            held = self._held.get(place)
            if held is None:
                problems.append(self._fenced(place, self.generation))
                continue
            if held.record.offset is not None and offset < held.record.offset:
                raise UsageError(
                    f"{place} is committed up to {held.record.offset}, not {offset}",
                    hint="to read something again, reset the group",
                )
            now = self._clock.now_ms()
            changes[place] = (held, msgspec.structs.replace(held.record, offset=offset, committed_at_ms=now))
        problems += [
            problem
            for place, answer in (await self._offsets.write(changes)).items()
            if (problem := self._concluded(place, answer)) is not None
        ]
        if problems:
            raise problems[0]

    def _concluded(self, place: TopicPartition, answer: Held | Refused | ForebayError) -> ForebayError | None:
        if isinstance(answer, Held):
            self._held[place] = answer
            return None
        if isinstance(answer, ForebayError):
            return answer
        found = answer.found.record
        if found.owner == self.member_id:
            # An earlier commit of ours whose outcome was not known has landed after all.
            self._held[place] = answer.found
            return OutcomeUnknown(f"a commit for {place}", hint="an earlier one was late; commit again")
        self._held.pop(place, None)
        self._changed.set()
        return self._fenced(place, found.generation)

    def _fenced(self, place: TopicPartition, current: int) -> GenerationFenced:
        return GenerationFenced(self.group, place, generation=self.generation, current=current)

    # -- looking after itself

    async def _live(self) -> None:
        """Look again after every change, and now and then without one."""
        watched = self._coordinator.watch
        failures = 0
        while True:
            try:
                async with watched(self._keys.members) as members, watched(self._keys.meta) as meta:
                    await self._look()
                    self.last_error, failures = None, 0
                    pause = self._clock.sleep(self._config.refresh_ms / 1000)
                    await _first_of(members.changed(), meta.changed(), pause)
            except ForebayError as error:
                # Until the next look it keeps what it has; its claims keep it honest.
                self.last_error = error
                failures += 1
                await self._clock.sleep(self._config.retry.wait_s(failures, self._random))

    async def _look(self) -> None:
        if self._session is None or not self._session.alive:
            # The others take its partitions over; what it holds is worth nothing any more.
            self._held = {}
            self._changed.set()
            await self._join()
        await self._refresh()

    async def _join(self) -> None:
        session = await self._retry(lambda: self._coordinator.open_session(self._config.session_timeout_ms))
        record = MemberRecord(member_id=self.member_id, topics=self.topics, joined_at_ms=self._clock.now_ms())

        async def put() -> None:
            await self._coordinator.put(
                self._keys.member(self.member_id),
                encode_record(record),
                session=session,
                partition_key=self._keys.partition_key,
            )

        try:
            await self._retry(put)
        except BaseException:
            # A session without the member's key would look like a life, and nobody would assign it anything.
            with contextlib.suppress(ForebayError):
                await session.close()
            raise
        self._session = session

    async def _refresh(self) -> None:
        """Bring the state up to date, then hold what it gives to this member and nothing else."""
        async with self._turn:
            state, offsets = await self._retry(self._agree)
            self.generation = state.generation
            mine = {TopicPartition(*each) for each in state.assignment.get(self.member_id, [])}
            lost = (self._held.keys() - mine) | self._overwritten(offsets)
            for place in lost:
                del self._held[place]
            gained = mine - self._held.keys()
            if gained:
                await self._claim(sorted(gained))
            if lost or gained:
                self._changed.set()

    def _overwritten(self, offsets: Mapping[TopicPartition, Held]) -> set[TopicPartition]:
        """What it holds and somebody else has written to since: a reset, say. Without commits of its own, as
        at the end of the log, this is how it hears of it."""
        return {
            place
            for place, held in self._held.items()
            if (now := offsets.get(place)) is None
            or (now.version != held.version and now.record.owner != self.member_id)
        }

    async def _agree(self) -> tuple[GroupState, Mapping[TopicPartition, Held]]:
        """The state that fits the live members; written by this member if nobody was faster. And the offsets
        as they were just before."""
        keys = self._keys
        low, high = f"{keys.members}/", f"{keys.members}//"
        record = await self._coordinator.get(keys.state, partition_key=keys.partition_key)
        state = GroupState() if record is None else decode_record(GroupState, keys.state, record.value)
        scan = self._coordinator.scan_all(low, high, partition_key=keys.partition_key)
        members = [decode_record(MemberRecord, found.key, found.value) async for found in scan]
        topics = {member.member_id: member.topics for member in members}
        counts = await self._counts({topic for each in members for topic in each.topics})
        # Commits from outside choose a generation of their own; members must come after all of them.
        offsets = await self._offsets.read()
        highest = max([held.record.generation for held in offsets.values()], default=0)
        before = {
            member: [TopicPartition(*each) for each in places] for member, places in state.assignment.items()
        }
        if highest <= state.generation and _fits(before, topics, counts):
            return state, offsets
        chosen = assign(topics, counts, before)
        wanted = GroupState(
            generation=max(state.generation, highest) + 1,
            assignment={
                member: [(place.topic, place.partition) for place in places]
                for member, places in chosen.items()
            },
            changed_at_ms=self._clock.now_ms(),
            revision=self._ids.token(),
        )
        version = ABSENT if record is None else record.version
        if record is None:
            # The group may have been deleted under its members, by force. It lives, so it is listed.
            await enter_group(self._coordinator, self.group, self._retry)
        await self._coordinator.put(
            keys.state, encode_record(wanted), version, partition_key=keys.partition_key
        )
        return wanted, offsets

    async def _counts(self, topics: set[str]) -> dict[str, int]:
        names = sorted(topics)
        found = await asyncio.gather(*(self._catalog.find(name) for name in names))
        return {
            name: topic.partitions
            for name, topic in zip(names, found, strict=True)
            if topic is not None and topic.state == "ACTIVE"
        }

    async def _claim(self, places: list[TopicPartition]) -> None:
        """Become the owner of partitions that no newer generation has."""
        found = await self._offsets.read()
        changes: dict[TopicPartition, tuple[Held, GroupOffset]] = {}
        for place in places:
            held = found.get(place, self._offsets.absent(place))
            if held.record.generation <= self.generation:
                claimed = msgspec.structs.replace(
                    held.record, generation=self.generation, owner=self.member_id
                )
                changes[place] = (held, claimed)
        for place, answer in (await self._offsets.write(changes)).items():
            # What was not claimed now is tried again with the next look.
            if isinstance(answer, Held):
                self._claims_made += 1
                self._held[place], self._claims[place] = answer, self._claims_made

    async def _retry(self, operation: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return await retry(
            operation,
            policy=self._config.retry,
            clock=self._clock,
            randomness=self._random,
            retryable=_again,
        )


async def enter_group(
    coordinator: Coordinator, group: str, patiently: Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]
) -> None:
    """Enter the group into the catalog, if it is not there."""

    async def put() -> None:
        try:
            await coordinator.put(
                group_key(group), group.encode(), ABSENT, partition_key=CATALOG_PARTITION_KEY
            )
        except PreconditionFailed:
            return

    await patiently(put)


def _fits(
    before: Mapping[str, list[TopicPartition]], topics: Mapping[str, list[str]], counts: Mapping[str, int]
) -> bool:
    """Whether an assignment is one of exactly these members and partitions."""
    if before.keys() != topics.keys():
        return False
    wanted = {TopicPartition(topic, number) for topic, count in counts.items() for number in range(count)}
    given = [place for places in before.values() for place in places]
    right = all(place.topic in topics[member] for member, places in before.items() for place in places)
    return right and len(given) == len(wanted) and set(given) == wanted


def _again(error: ForebayError) -> bool:
    # Every step reads first or may be repeated.
    return isinstance(error, Unavailable | OutcomeUnknown | PreconditionFailed)


async def _first_of(*works: Coroutine[Any, Any, object]) -> None:
    """Return when the first is done; the others are cancelled."""
    tasks = [asyncio.get_running_loop().create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in tasks:
        if task.done() and not task.cancelled():
            task.result()
