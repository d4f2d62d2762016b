"""GET .../objects: which objects hold a partition, how large they are, how far compaction has come.

The answer is made from the index, in the coordinator: the store is not asked, so a look costs nothing there.
The small records of the partition are read before the index; an append that moves into the index between the
two looks would be seen twice, so the pending append is dropped where the index has it already.

Without `from` the whole index is counted, up to `ENTRIES_MAX` entries, so that sizes can be shown. With it
there is one page and no totals.
"""

from __future__ import annotations

from forebay.broker._bodies import integer_query, json_response
from forebay.broker._engines import Engines
from forebay.broker._http import Response
from forebay.broker._routes import Action, Call, Query, Route
from forebay.formats.http_messages import JSON, PATHS, CompactionUnderWay, ObjectsView, ObjectView
from forebay.log._compaction_run import entries_from
from forebay.log._keys import PartitionKeys
from forebay.log._meta import PartitionMeta, read_meta
from forebay.log._records import Compaction, IndexEntry
from forebay.log._references import READ_POLICY
from forebay.log._resolve import Located

__all__ = ["object_routes"]

ENTRIES_MAX = 20_000
"""Index entries looked at for the totals of one answer."""
OBJECTS_MAX = 1_000
"""Entries shown in one answer."""
OBJECTS_DEFAULT = 100


class Objects:
    """The handler."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    async def __call__(self, call: Call) -> Response:
        """One page, and the totals where it is the first."""
        start = integer_query(call.request, "from", low=0, high=1 << 62)
        limit = integer_query(call.request, "limit", low=0, high=OBJECTS_MAX)
        topic = await self._engines.catalog.describe(call.topic)
        topic.check_partition(call.partition)
        keys = PartitionKeys(call.topic, call.partition)
        meta = await read_meta(self._engines.coordinator, keys)
        page = _Page(meta, OBJECTS_DEFAULT if limit is None else limit, totals=start is None)
        await self._fill(page, keys, meta.earliest if start is None else max(start, meta.earliest))
        return json_response(page.view())

    async def _fill(self, page: _Page, keys: PartitionKeys, offset: int) -> None:
        parts = self._engines.parts
        entries = entries_from(
            self._engines.coordinator,
            keys,
            offset,
            clock=parts.clock,
            randomness=parts.randomness,
            policy=READ_POLICY,
        )
        async for entry in entries:
            if not page.take(entry):
                return
        control = page.meta.control
        pending = None if control is None else control.pending
        if pending is not None and page.last_end < pending.end_offset and pending.end_offset >= offset:
            page.take(
                Located(keys, pending.start_offset, pending.end_offset, pending.index_entry()), "pending"
            )


class _Page:
    """What is gathered for one answer."""

    def __init__(self, meta: PartitionMeta, limit: int, *, totals: bool) -> None:
        self.meta = meta
        self.last_end = 0
        self._limit = limit
        self._totals = totals
        self._objects: list[ObjectView] = []
        self._next_from: int | None = None
        self._seen = self._entries = self._bytes = self._compacted = 0
        self._complete = True

    def take(self, found: Located, source: str = "") -> bool:
        """Count an entry, and show it if there is room; whether more are wanted."""
        if self._seen >= ENTRIES_MAX:
            self._complete = False
            return False
        self._seen += 1
        self.last_end = found.end_offset
        shown = _shown(found, source or found.entry.type, self.meta)
        if not shown.stale:
            self._entries += 1
            self._bytes += found.stored_bytes
            self._compacted += found.stored_bytes if shown.source == "COMPACTED" else 0
        if len(self._objects) < self._limit:
            self._objects.append(shown)
        elif self._next_from is None:
            # Stale entries lie inside the range of a later one: go on by ends, which are unique, not starts.
            self._next_from = found.end_offset
        return self._totals or self._next_from is None

    def view(self) -> ObjectsView:
        """The answer."""
        meta, control = self.meta, self.meta.control
        view = ObjectsView(
            topic=meta.keys.topic,
            partition=meta.keys.partition,
            earliest=meta.earliest,
            next=meta.next,
            log_state="OPEN" if control is None else control.log_state,
            epoch=0 if control is None else control.epoch,
            cursor=meta.cursor,
            lag_records=meta.lag,
            objects=self._objects,
            next_from=self._next_from,
            compaction=None if meta.compaction is None else _under_way(meta.compaction),
        )
        if self._totals:
            view.entries, view.bytes, view.compacted_bytes = self._entries, self._bytes, self._compacted
            view.complete = self._complete
        return view


def _shown(found: Located, source: str, meta: PartitionMeta) -> ObjectView:
    entry: IndexEntry = found.entry
    return ObjectView(
        start_offset=found.start_offset,
        end_offset=found.end_offset,
        records=entry.msg_count,
        source=source,
        object=entry.data_key,
        encoding=entry.encoding,
        created_at_ms=entry.created_at_ms,
        byte_offset=entry.byte_offset,
        bytes=found.stored_bytes or None,
        first_time_ms=entry.first_time_ms,
        writer=entry.writer,
        stale=found.end_offset < meta.earliest or (source == "WAL" and found.end_offset < meta.cursor),
    )


def _under_way(record: Compaction) -> CompactionUnderWay:
    return CompactionUnderWay(
        compaction_id=record.compaction_id,
        state=record.state,
        start_offset=record.start_offset,
        end_offset=record.end_offset,
        object=record.data_key,
        created_at_ms=record.created_at_ms,
    )


def object_routes(engines: Engines) -> list[Route]:
    """The route."""
    return [
        Route(
            "GET",
            PATHS.OBJECTS,
            Objects(engines),
            "Which objects hold a partition, and how far it is compacted.",
            action=Action.READ,
            gives={JSON: ObjectsView},
            queries=(
                Query(
                    "from",
                    "Only entries that reach this offset; no totals then.",
                    schema={"type": "integer", "minimum": 0, "maximum": 1 << 62},
                ),
                Query(
                    "limit",
                    f"Entries shown; {OBJECTS_DEFAULT} if left out.",
                    schema={"type": "integer", "minimum": 0, "maximum": OBJECTS_MAX},
                ),
            ),
        )
    ]
