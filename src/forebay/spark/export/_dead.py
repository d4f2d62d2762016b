"""Bad records, kept before the commit that steps over them, each exactly once, with the reason.

In a **table** the numbers of the dead-letter table itself say up to which position a lane's bad records are
kept; tasks leave out what lies below. In a **topic** there are no numbers, but idempotent producers:

    Invariant: bad records of a lane are appended in order of their offsets, by a chain of appends whose
    sequence numbers the partition checks; whoever appends has read everything appended before.

    mark of the last commit -> read what came after it -> X, the highest offset of this lane that is kept, and
    how often: records of a buffer's batch share one
    -> append what comes behind with the next sequence number
    -> refused, or taken for a repetition: somebody else appended; read on from there, and try again

    Invariant: nobody else's bad records count as ours. Two exports of one name may have one place for theirs,
    and what one cannot decode the other can: each is told by its table, too.

    crash after the append, before the commit     the next round finds X and appends the rest, or nothing
    two exporters at once                         one sequence number each; the second sees the first's X
    the topic was grown in between                a lane stays in the partition that knows its producer

The mark is part of the commit, so a round reads only what was appended since. A lane without a producer yet
goes by its hash and the number of partitions, as it is in that round. What is left: two exporters of one
table at once, both with a lane's first bad record, and a topic that is grown between their looks.
"""

from __future__ import annotations

import contextlib
import hashlib
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.errors import NotDone, UsageError
from forebay.log import AppendGroup, Catalog, LogReader, LogWriter, OutOfSequence, TopicExists
from forebay.log._keys import PartitionKeys
from forebay.log._records import Control, decode_record
from forebay.spark.export._clients import Clients
from forebay.spark.export._config import ExportConfig, SourceSpec, TargetSpec
from forebay.spark.export._facts import DEAD_SCHEMA
from forebay.spark.export._files import describe, encode_parquet, file_name
from forebay.spark.export._tables import Commit, Handle, Table, commit_once, open_table
from forebay.storage import ABSENT

__all__ = ["DeadLetters", "lane_of", "open_dead_letters"]

APPEND_RECORDS_MAX: Final = 5_000
"""Bad records of one append to a topic."""
APPEND_BYTES_MAX: Final = 16 * 1024 * 1024
"""Bytes of their keys and values, unless one alone is larger."""
ATTEMPTS_MAX: Final = 50
"""Appends of one lane's bad records that other exporters may beat before the round is given up."""


class DeadLetters(Protocol):
    """Where bad records go."""

    def begin(self, handle: Handle) -> None:
        """A new round on this handle of the main table."""

    def floor(self, lane: str) -> int:
        """The position below which a lane's bad records are kept already."""

    def keep(self, dead: pa.Table, ends: Mapping[str, int]) -> None:
        """Keep them: the bad records of every lane up to its end."""

    def marks(self) -> dict[str, int]:
        """Numbers to commit with the main table."""


def open_dead_letters(config: ExportConfig, clients: Clients) -> DeadLetters | None:
    """What the configuration names, or None."""
    spec = config.dead_letter
    if spec is None:
        return None
    if spec.table is not None:
        if _place(spec.table) == _place(config.target):
            raise UsageError(
                f"{spec.table.location} would be the dead-letter table of itself", hint="choose another table"
            )
        if _is_inside(spec.table, config.target) or _is_inside(config.target, spec.table):
            # A full vacuum of the outer one deletes the inner one, which its log does not name.
            raise UsageError(
                f"{spec.table.location} and {config.target.location} are inside of one another",
                hint="choose a directory beside it",
            )
        return _DeadTable(spec.table, config, clients)
    assert spec.topic is not None
    if config.source.kind == "log" and spec.topic in config.source.names:
        raise UsageError(f"{spec.topic!r} would feed on itself", hint="choose another dead-letter topic")
    return _DeadTopic(spec.topic, config, clients)


def _place(table: TargetSpec) -> str:
    """Which table it is, without what its address says beside the place."""
    location = table.location
    if "://" in location:
        return f"{table.kind}:{location.partition('?')[0].rstrip('/')}"
    return f"{table.kind}:{Path(location).absolute()}"


def _is_inside(table: TargetSpec, outer: TargetSpec) -> bool:
    places = [_place(each).partition(":")[2] for each in (table, outer)]
    return outer.kind != "iceberg" and places[0].startswith(f"{places[1]}/")


def lane_of(config: SourceSpec, topic: str, partition: int) -> str:
    """The lane of a record, as its columns name it."""
    return f"{topic}:{partition}" if config.kind == "log" else f"{config.kind}:{topic}"


class _DeadTable:
    """A table with the columns of `DEAD_SCHEMA`."""

    def __init__(self, spec: TargetSpec, config: ExportConfig, clients: Clients) -> None:
        # Another table of the same export's name may have other bad records of the same lane.
        place = hashlib.sha256(_place(config.target).encode()).hexdigest()[:16]
        self._table: Table = open_table(spec, f"{config.name}@{place}", clients)
        self._location = spec.location
        self._clients = clients
        self._compression = config.compression
        self._handle: Handle | None = None

    def begin(self, handle: Handle) -> None:
        """Load the handle that the round commits through."""
        self._handle = self._table.load()
        if self._handle is None:
            self._table.create(DEAD_SCHEMA, ())
            self._handle = self._table.load()
        assert self._handle is not None
        found = {each.name: each.type for each in self._handle.schema}
        lacking = [each.name for each in DEAD_SCHEMA if found.get(each.name) != each.type]
        if lacking or self._handle.partition_by:
            why = f"no column {lacking[0]!r} like theirs" if lacking else "partitions"
            raise UsageError(
                f"{self._location} is no table of dead letters: it has {why}", hint="choose another table"
            )

    def floor(self, lane: str) -> int:
        """The lane's number."""
        assert self._handle is not None
        return self._handle.position(lane) or 0

    def keep(self, dead: pa.Table, ends: Mapping[str, int]) -> None:
        """One file, one commit."""
        assert self._handle is not None
        if not dead.num_rows:
            return
        data, footer = encode_parquet(dead, self._compression)
        path = file_name({}, hive=False)
        store = self._clients.store(self._table.store)
        self._clients.run(store.put(path, memoryview(data), ABSENT))
        expected = {lane: self._handle.position(lane) for lane in ends}
        moved = {lane: end for lane, end in ends.items() if end > (expected[lane] or 0)}
        commit = Commit([describe(path, data, footer, {})], moved, expected, path)
        commit_once(self._table, self._handle, commit, moved)

    def marks(self) -> dict[str, int]:
        """None: the numbers are in the dead-letter table."""
        return {}


class _DeadTopic:
    """A topic of the source's deployment."""

    def __init__(self, topic: str, config: ExportConfig, clients: Clients) -> None:
        source = config.source
        self._topic = topic
        self._source = source
        self._name = config.name
        self._table = _place(config.target).encode()
        self._clients = clients
        self._reader: LogReader = clients.reader(source.store, source.coordinator)
        self._writer: LogWriter = clients.writer(source.store, source.coordinator)
        self._coordinator = clients.parts(source.store, source.coordinator).coordinator
        clients.run(self._prepare())
        self._offsets: dict[str, int] = {}
        self._sequences: dict[str, int] = {}
        self._handle: Handle | None = None

    async def _prepare(self) -> None:
        catalog: Catalog = self._writer.catalog
        if self._topic not in [topic.topic for topic in await catalog.list()]:
            with contextlib.suppress(TopicExists):
                await catalog.create(self._topic, partitions=1)

    def begin(self, handle: Handle) -> None:
        """The marks are those of the handle."""
        self._handle = handle
        self._offsets.clear()
        self._sequences.clear()

    def floor(self, lane: str) -> int:
        """Nothing is left out by the tasks: what is kept is found when it is appended."""
        return 0

    def marks(self) -> dict[str, int]:
        """Up to where the topic was read for each lane, and the lane's next sequence number."""
        read = {f"dead-offset:{lane}": offset for lane, offset in self._offsets.items()}
        return read | {f"dead-sequence:{lane}": number for lane, number in self._sequences.items()}

    def keep(self, dead: pa.Table, ends: Mapping[str, int]) -> None:
        """Lane by lane, in order of the offsets."""
        if not dead.num_rows:
            return
        count, homes = self._clients.run(self._homes())
        for lane, rows in _by_lane(dead, self._source):
            home = homes.get(self._producer(lane), zlib.crc32(lane.encode()) % count)
            self._clients.run(self._keep_lane(lane, home, rows))

    async def _homes(self) -> tuple[int, dict[str, int]]:
        """The number of partitions, and where those that appended before did so: a topic that is grown leaves
        everybody in place."""
        count = (await self._writer.catalog.describe(self._topic)).partitions
        every = [PartitionKeys(self._topic, number) for number in range(count)]
        found = await self._coordinator.get_many([(each.control, each.partition_key) for each in every])
        homes: dict[str, int] = {}
        for keys, record in zip(every, found, strict=True):
            if record is not None:
                known = decode_record(Control, record.key, record.value).producers
                homes |= dict.fromkeys(known, keys.partition)
        return count, homes

    async def _keep_lane(self, lane: str, partition: int, rows: pa.Table) -> None:
        assert self._handle is not None
        ends = await self._reader.offsets(self._topic, partition)
        position = max(self._handle.position(f"dead-offset:{lane}") or 0, ends.earliest)
        if position > ends.next:  # The mark is of another topic, which was the place before.
            position = ends.earliest
        sequence = self._handle.position(f"dead-sequence:{lane}") or 0
        refused = 0
        while refused < ATTEMPTS_MAX:
            position, highest, count = await self._kept(partition, position, lane)
            # They are in order, so those are the first.
            below = pc.sum(pc.less(rows.column("offset"), highest)).as_py() or 0
            rows = rows.slice(below + count)
            if not rows.num_rows:
                break
            group = self._group(lane, partition, _portion(rows), sequence)
            [result] = await self._writer.append_shared([group])
            if isinstance(result.error, OutOfSequence):
                sequence = result.error.expected
                refused += 1
                continue
            # One that was taken for a repetition is settled by the next look, like any other.
            refused += result.unwrap().duplicate
            sequence += 1
        else:
            raise NotDone(f"{self._topic}: other exporters were always first", hint="run the export again")
        self._offsets[lane], self._sequences[lane] = position, sequence

    async def _kept(self, partition: int, position: int, lane: str) -> tuple[int, int, int]:
        """Where the topic ends, the highest offset of this lane that was appended from `position` on, and how
        many records have it; -1 and none where nothing was."""
        highest, count = -1, 0
        source = f"{self._name}/{lane}".encode()
        async for batch in self._reader.scan(self._topic, partition, position):
            position += batch.num_rows
            headers = batch.column("headers")
            for entry in headers.to_pylist():
                found = {header["key"]: header["value"] for header in entry or ()}
                if (found.get("forebay-source"), found.get("forebay-table")) == (source, self._table):
                    offset = int(found["forebay-offset"])
                    if offset > highest:
                        highest, count = offset, 0
                    count += offset == highest
        return position, highest, count

    def _group(self, lane: str, partition: int, rows: pa.Table, sequence: int) -> AppendGroup:
        source = f"{self._name}/{lane}".encode()
        headers = [
            {
                "forebay-source": source,
                "forebay-table": self._table,
                "forebay-offset": str(row["offset"]).encode(),
                "forebay-reason": row["reason"].encode(),
            }
            for row in rows.select(["offset", "reason"]).to_pylist()
        ]
        times = rows.column("timestamp").cast(pa.timestamp("ms", tz="UTC"), safe=False).cast(pa.int64())
        times = times.fill_null(0)  # One that is in no calendar.
        group = AppendGroup.of(
            self._topic,
            partition,
            rows.column("value").to_pylist(),
            keys=rows.column("key").to_pylist(),
            timestamps_ms=np.asarray(times.to_numpy(), np.int64),
            headers=headers,
        )
        return AppendGroup(group.topic, group.partition, group.batch, self._producer(lane), sequence)

    def _producer(self, lane: str) -> str:
        """Who appends a lane's bad records: one export of one table."""
        whole = f"{self._name}/{lane}\n".encode() + self._table
        return f"dead-{hashlib.sha256(whole).hexdigest()[:40]}"


def _portion(rows: pa.Table) -> pa.Table:
    """As many of the first as one append takes."""
    some = rows.slice(0, APPEND_RECORDS_MAX)
    sizes = [pc.binary_length(some.column(name)).fill_null(0).to_numpy() for name in ("key", "value")]
    ends = np.cumsum(sizes[0].astype(np.int64) + sizes[1])
    return some.slice(0, max(int(np.searchsorted(ends, APPEND_BYTES_MAX, side="right")), 1))


def _by_lane(dead: pa.Table, source: SourceSpec) -> Iterator[tuple[str, pa.Table]]:
    pairs = dead.select(["topic", "partition"]).group_by(["topic", "partition"]).aggregate([]).to_pylist()
    for pair in pairs:
        same = pc.and_(
            pc.equal(dead.column("topic"), pair["topic"]),
            pc.equal(dead.column("partition"), pair["partition"]),
        )
        yield lane_of(source, pair["topic"], pair["partition"]), dead.filter(same).sort_by("offset")
