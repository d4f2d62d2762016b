"""Proof, from objects and keys alone, that a log is whole.

For every partition the entries of the index, and the pending append behind them, must cover every offset from
the earliest to the next, each exactly once, and every slice must be there, with the length, checksum and
number of records its entry says, and as the header of its object says. What readers step over, late entries
below the compaction cursor, is stepped over here too; what a compaction under way is about to delete is not
an overlap.

The log may be in use while it is verified. Control is read before the index, so what is missing is missing;
but a trim or a compaction between two requests can make a healthy partition look torn. A partition with
problems is therefore looked at again, and only what is wrong every time is reported.

Memory is bounded by a window of slices and by `_references`: the objects are listed in portions, and for each
portion the index is walked once more.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from forebay.coordination import Coordinator
from forebay.errors import ForebayError, NotFound, StorageDamaged
from forebay.formats.shared_blob import Header
from forebay.kit.clock import Clock
from forebay.kit.ids import IdSource
from forebay.log._compaction_run import entries_from
from forebay.log._discovery import partitions_of
from forebay.log._errors import AnotherLog
from forebay.log._fetch import decode_slice
from forebay.log._keys import CATALOG_PARTITION_KEY, ROOT, PartitionKeys, topic_key
from forebay.log._meta import PartitionMeta, read_meta
from forebay.log._records import decode_record
from forebay.log._references import READ_POLICY, LogObjects, is_shared, owner_of, read_header
from forebay.log._resolve import Located
from forebay.log._topics import Catalog, Topic
from forebay.log._uris import key_of
from forebay.storage import ObjectInfo, ObjectStore

__all__ = ["PartitionReport", "VerifyReport", "verify"]

LOOKS_MAX: Final = 3
"""How often a partition is looked at before its problems count."""
WINDOW_BYTES: Final = 64 * 1024 * 1024
"""Bytes of slices fetched at once; a single larger one is fetched alone."""
WINDOW_ENTRIES: Final = 16
HEADERS_KEPT: Final = 256
"""Headers of shared objects remembered."""
PROBLEMS_MAX: Final = 100
"""Problems reported per partition."""
CHECKED_MAX: Final = 100_000
"""Sound slices remembered, so that a second look at a partition does not fetch them again."""
CANDIDATES_MAX: Final = 200_000
"""Objects compared with the index in one portion."""
ORPHANS_MAX: Final = 100_000
"""Orphans listed."""


@dataclass(slots=True)
class PartitionReport:
    """What is wrong with one partition."""

    topic: str
    partition: int
    records: int = 0
    """Records that can be read."""
    problems: list[str] = field(default_factory=list)
    leftover: str = ""
    """What is left over from a topic of this name that was deleted. It does no harm."""

    def as_json(self) -> dict[str, Any]:
        """Plain data; with `leftover` only where there is one."""
        document = {
            "topic": self.topic,
            "partition": self.partition,
            "records": self.records,
            "problems": self.problems,
        }
        return document | ({"leftover": self.leftover} if self.leftover else {})


@dataclass(slots=True)
class VerifyReport:
    """What is wrong with a deployment."""

    partitions: list[PartitionReport] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    """Objects that no partition names: left by crashes, by compaction, by an upload under way."""
    problems: list[str] = field(default_factory=list)
    """What is wrong beside the partitions: topics that cannot be read, a store of another log."""

    @property
    def ok(self) -> bool:
        """Whether nothing is missing or damaged. Orphans do no harm."""
        return not self.problems and not any(partition.problems for partition in self.partitions)

    def as_json(self) -> dict[str, Any]:
        """Plain data; with `problems` only where there are some."""
        document = {
            "ok": self.ok,
            "partitions": [partition.as_json() for partition in self.partitions],
            "orphans": self.orphans,
        }
        return document | ({"problems": self.problems} if self.problems else {})


async def verify(
    store: ObjectStore,
    coordinator: Coordinator,
    *,
    clock: Clock,
    randomness: random.Random,
    topic: str | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> VerifyReport:
    """Look at every record of a topic, or of all of them. `progress` hears which partition, and records."""
    ids = IdSource(clock, randomness)
    catalog = Catalog(store, coordinator, clock=clock, ids=ids, randomness=randomness)
    objects = LogObjects(store, coordinator, clock=clock, randomness=randomness)
    report, partitions, unsure = await _begin(objects, catalog, topic)
    search = _OrphanSearch(objects, partitions, unsure=unsure)
    await search.run(f"{ROOT}/" if topic is None else f"{ROOT}/{topic}/partitions/")
    report.orphans = search.orphans
    for keys in [*partitions, *search.hidden]:
        found = await _Look(objects, keys, clock, randomness).verify()
        report.partitions.append(found)
        if progress is not None:
            progress(str(keys), found.records)
    return report


async def _begin(
    objects: LogObjects, catalog: Catalog, topic: str | None
) -> tuple[VerifyReport, list[PartitionKeys], bool]:
    """What is wrong beside the partitions, which ones there are, and whether there may be others."""
    report = VerifyReport(problems=await _pair_problems(objects, catalog))
    survey = await catalog.survey()
    unsure = bool(report.problems or survey.damaged)
    if topic is not None:
        return report, partitions_of([await catalog.describe(topic)]), unsure
    report.problems += [error.message for error in survey.damaged]
    return report, partitions_of(survey.topics), unsure


async def _pair_problems(objects: LogObjects, catalog: Catalog) -> list[str]:
    """Where store and coordinator are of different logs, everything in the store looks like an orphan."""
    try:
        await objects.patiently(catalog.pair.check)
    except (AnotherLog, StorageDamaged) as error:
        return [error.message]
    return []


class _OrphanSearch:
    """Finds objects that nobody names, and on the way partitions that the catalog does not know."""

    def __init__(
        self, objects: LogObjects, partitions: Sequence[PartitionKeys], *, unsure: bool = False
    ) -> None:
        """`unsure`: there may be partitions that nobody can ask."""
        self._objects = objects
        self._partitions = partitions
        self._known = set(partitions)
        self.hidden: list[PartitionKeys] = []
        """Partitions that exist and are not in the catalog."""
        self._orphans: list[str] = []
        self._unsure = unsure

    @property
    def orphans(self) -> list[str]:
        """Where a partition cannot tell what it names, nothing can be called an orphan."""
        return [] if self._unsure else self._orphans

    async def run(self, prefix: str) -> None:
        portion: list[ObjectInfo] = []
        async for info in self._objects.listed(prefix):
            portion.append(info)
            if len(portion) >= CANDIDATES_MAX:
                await self._compare(portion)
                portion = []
        await self._compare(portion)

    async def _compare(self, portion: Sequence[ObjectInfo]) -> None:
        left = {info.key: info for info in portion}
        asked: set[PartitionKeys] = set()
        await self._ask(self._partitions, asked, left)
        await self._ask([keys for keys in map(owner_of, list(left)) if keys is not None], asked, left)
        owners = await self._objects.owners([info for info in left.values() if is_shared(info.key)])
        for some in owners.values():
            await self._ask(some or [], asked, left)
        self._orphans += list(left)[: ORPHANS_MAX - len(self._orphans)]

    async def _ask(
        self, partitions: Sequence[PartitionKeys], asked: set[PartitionKeys], left: dict[str, ObjectInfo]
    ) -> None:
        def named(key: str) -> None:
            left.pop(key, None)

        for keys in partitions:
            if keys in asked:
                continue
            asked.add(keys)
            try:
                visit = await self._objects.visit(keys, named)
            except StorageDamaged:
                self._unsure = True
                continue
            if visit.exists and keys not in self._known:
                self._known.add(keys)
                self.hidden.append(keys)


class _Look:
    """Looks at one partition."""

    def __init__(
        self, objects: LogObjects, keys: PartitionKeys, clock: Clock, randomness: random.Random
    ) -> None:
        self._objects = objects
        self._keys = keys
        self._clock = clock
        self._random = randomness
        self._headers: OrderedDict[str, Header] = OrderedDict()
        self._checked: set[tuple[int, str]] = set()

    async def verify(self) -> PartitionReport:
        """Look until nothing is wrong, or until it is wrong every time."""
        report = PartitionReport(self._keys.topic, self._keys.partition)
        always: set[str] | None = None
        for look in range(1, LOOKS_MAX + 1):
            try:
                report = await self._look()
            except ForebayError as error:
                report.problems = [f"{error.message}"]
            always = set(report.problems) if always is None else always & set(report.problems)
            if not always:
                report.problems = []
                break
            report.problems = [problem for problem in report.problems if problem in always]
            if look < LOOKS_MAX:
                await self._clock.sleep(0.1 * look)
        report.problems = report.problems[:PROBLEMS_MAX]
        return report

    async def _look(self) -> PartitionReport:
        keys = self._keys
        report = PartitionReport(keys.topic, keys.partition)
        meta = await self._meta()
        topic = await self._topic() if meta.control is None or meta.control.just_begun else None
        if meta.control is None:
            report.problems = await self._without_control(topic)
            return report
        left_over = topic is not None and meta.control.is_left_over(topic.state, topic.first_offset)
        # Not where the topic was deleted and made again between the two looks.
        if topic is not None and left_over and (await self._meta()).control == meta.control:
            report.leftover = (
                f"{keys.control} begins at offset {meta.earliest}, its topic at {topic.first_offset}: it was "
                "made late, after an earlier topic was deleted; readers pass over it, an append replaces it"
            )
            return report
        report.records = meta.next - meta.earliest
        cursor = await self._cursor(meta)
        position, highest = meta.earliest, 0
        window = _Window(self)
        async for entry in self._entries(meta.earliest):
            highest = entry.end_offset
            if (entry.entry.type == "WAL" and entry.end_offset < cursor) or entry.start_offset >= meta.next:
                continue
            _place(report, entry, position, meta.earliest)
            position = entry.end_offset + 1
            report.problems += await window.add(entry)
        report.problems += await window.flush()
        report.problems += await self._tail(meta, position)
        if highest and highest >= (await self._meta()).next:
            report.problems.append(f"the index ends at offset {highest}, which was never assigned")
        return report

    async def _topic(self) -> Topic | None:
        coordinator, key = self._objects.coordinator, topic_key(self._keys.topic)
        record = await self._objects.patiently(
            lambda: coordinator.get(key, partition_key=CATALOG_PARTITION_KEY)
        )
        return None if record is None else decode_record(Topic, key, record.value)

    async def _without_control(self, topic: Topic | None) -> list[str]:
        """A partition comes into being with its control record. Index entries without one are what a sleeper
        puts after a deletion, below the first offset of the next topic; any other says that it was lost."""
        if topic is None:
            return []
        async for entry in self._entries(topic.first_offset):
            # Two more looks tell whether the partition has come into being meanwhile.
            if topic.state == "ACTIVE" and (await self._meta()).control is None:
                return [f"there is no control record, and the index has offset {entry.end_offset}"]
            break
        return []

    async def _meta(self) -> PartitionMeta:
        return await self._objects.patiently(lambda: read_meta(self._objects.coordinator, self._keys))

    def _entries(self, offset: int) -> Any:
        return entries_from(
            self._objects.coordinator,
            self._keys,
            offset,
            clock=self._clock,
            randomness=self._random,
            policy=READ_POLICY,
        )

    async def _cursor(self, meta: PartitionMeta) -> int:
        """Below it WAL entries do not count: the cursor, or the end of a compaction that has done step 1."""
        record = meta.compaction
        if record is None or record.end_offset < meta.cursor:
            return meta.cursor
        async for entry in self._entries(record.end_offset):
            same = entry.end_offset == record.end_offset and entry.entry.data_key == record.data_key
            return record.end_offset + 1 if same else meta.cursor
        return meta.cursor

    async def _tail(self, meta: PartitionMeta, position: int) -> list[str]:
        """What lies behind the index: the pending append, and then nothing."""
        assert meta.control is not None
        pending = meta.control.pending
        if pending is None:
            return _missing(position, meta.next)
        problems = []
        if pending.end_offset + 1 != meta.next:
            problems.append(f"the last append ends at {pending.end_offset}, the next offset is {meta.next}")
        if position <= pending.end_offset:
            problems += _missing(position, pending.start_offset)
            if pending.start_offset < position and meta.earliest < position:
                problems.append(f"offset {pending.start_offset} is in the index and pending")
            entry = Located(self._keys, pending.start_offset, pending.end_offset, pending.index_entry())
            problems += await self.check([entry])
        return problems

    async def check(self, entries: Sequence[Located]) -> list[str]:
        """What is wrong with the slices of these entries."""
        new = [entry for entry in entries if (entry.end_offset, entry.entry.data_key) not in self._checked]
        found = await asyncio.gather(*(self._slice_problem(entry) for entry in new))
        for entry, problem in zip(new, found, strict=True):
            if problem is None and len(self._checked) < CHECKED_MAX:
                self._checked.add((entry.end_offset, entry.entry.data_key))
        return [problem for problem in found if problem is not None]

    async def _slice_problem(self, wanted: Located) -> str | None:
        entry, store = wanted.entry, self._objects.store
        where = f"offsets {wanted.start_offset} to {wanted.end_offset}"
        try:
            key = key_of(store, entry.data_key)
            if entry.byte_offset is None or entry.byte_length is None:
                data = (await self._objects.patiently(lambda: store.get(key))).data
                self._check_size(wanted, len(data))
            else:
                start, length = entry.byte_offset, entry.byte_length
                data = await self._objects.patiently(lambda: store.get_range(key, start, length))
            count = len(decode_slice(wanted, data))
            if count != entry.msg_count:
                return f"{where}: {entry.data_key} holds {count} records, its entry says {entry.msg_count}"
            return await self._header_problem(wanted, key)
        except NotFound:
            return f"{where}: object {entry.data_key} is missing"
        except ForebayError as error:
            return f"{where}: {entry.data_key}: {error.message}"

    def _check_size(self, wanted: Located, size: int) -> None:
        expected = wanted.entry.size_bytes
        if expected is not None and size != expected:
            raise ForebayError(f"{wanted.entry.data_key} has {size} bytes, {expected} were written")

    async def _header_problem(self, wanted: Located, key: str) -> str | None:
        """Whether the table of contents of a shared object says the same as the entry."""
        entry = wanted.entry
        if not is_shared(key) or entry.byte_offset is None:
            return None
        header = self._headers.get(key)
        if header is None:
            header = await self._objects.patiently(lambda: self._read_header(key))
            self._headers[key] = header
            if len(self._headers) > HEADERS_KEPT:
                self._headers.popitem(last=False)
        for part in header.partitions:
            if (part.topic, part.partition, part.body_offset) == (
                wanted.keys.topic,
                wanted.keys.partition,
                entry.byte_offset,
            ):
                if (part.msg_count, part.body_length) == (entry.msg_count, entry.byte_length):
                    return None
                break
        return (
            f"offsets {wanted.start_offset} to {wanted.end_offset}: the header of {entry.data_key} does not "
            f"name {wanted.keys} with {entry.msg_count} records at byte {entry.byte_offset}"
        )

    async def _read_header(self, key: str) -> Header:
        info = await self._objects.store.head(key)
        return await read_header(self._objects.store, key, info.size)


class _Window:
    """Collects slices until there are enough for one round of requests."""

    def __init__(self, look: _Look) -> None:
        self._look = look
        self._entries: list[Located] = []
        self._bytes = 0

    async def add(self, entry: Located) -> list[str]:
        problems = []
        if self._entries and self._bytes + entry.stored_bytes > WINDOW_BYTES:
            problems = await self.flush()
        self._entries.append(entry)
        self._bytes += entry.stored_bytes
        return problems + (await self.flush() if len(self._entries) >= WINDOW_ENTRIES else [])

    async def flush(self) -> list[str]:
        entries, self._entries, self._bytes = self._entries, [], 0
        return await self._look.check(entries)


def _place(report: PartitionReport, entry: Located, position: int, earliest: int) -> None:
    """Whether an entry begins where the one before it ended. The first may begin below the earliest."""
    report.problems += _missing(position, entry.start_offset)
    if entry.start_offset < position and position != earliest:
        report.problems.append(
            f"offsets {entry.start_offset} to {min(position - 1, entry.end_offset)} have two owners"
        )


def _missing(position: int, until: int) -> list[str]:
    return [f"offsets {position} to {until - 1} are missing"] if position < until else []
