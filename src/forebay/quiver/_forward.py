"""Segments into a bucket: a subscriber whose destination is an object store.

    <prefix>/signal=<signal>/date=<YYYY-MM-DD>/<source>-<segment, 16 digits>-<digest>.arrow   or .parquet

`date` is the day of the first ingestion, in UTC. The layout is the one that Arrow datasets, DuckDB and Spark
take for partitions. An Arrow object is the segment file as it is, metadata included; Parquet is for whoever
reads no Arrow files. Columns named `signal` or `date` stay what they are in the files; readers with partition
discovery see the one of the path.

**Once.** The name holds the number of the segment and a digest of what came in when, so a segment that is
delivered again after a crash is put under the same name: the object that is there is the one wanted. Two
stores never share a name, because `source` tells them apart, and a directory made anew has other digests.
The acknowledgement follows the upload; a crash in between costs a second upload and no duplicate.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Final, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from forebay.errors import ForebayError, FormatError, NotFound, PreconditionFailed, UsageError
from forebay.formats.quiver_segment import SegmentMeta
from forebay.quiver._cores import QuiverCore
from forebay.quiver._delivery import Delivery
from forebay.quiver._quiver import Quiver
from forebay.quiver._reading import SegmentView
from forebay.quiver._repair import whole_pieces
from forebay.quiver._selection import Selection
from forebay.storage import ABSENT, ObjectStore

__all__ = ["Forwarded", "Forwarder", "read_forwarded"]

_log = logging.getLogger(__name__)
_SOURCE: Final = re.compile(r"[A-Za-z0-9_.]{1,64}")
_DATE: Final = re.compile(r"/date=(\d{4}-\d{2}-\d{2})/")
_SIGNAL: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(slots=True)
class Forwarded:
    """What a forwarder has done so far."""

    segments: int = 0
    rows: int = 0
    bytes: int = 0
    failures: int = 0
    """Uploads that failed and were put back for a retry."""
    problem: str = ""
    """Why the last of them failed."""


class Forwarder:
    """Takes segments of one subscriber to a store. `source` names this Quiver among all that share it."""

    def __init__(
        self,
        quiver: Quiver | QuiverCore,
        store: ObjectStore,
        *,
        source: str,
        subscriber: str = "forward",
        prefix: str = "quiver",
        file_format: Literal["arrow", "parquet"] = "arrow",
    ) -> None:
        if not _SOURCE.fullmatch(source):
            raise UsageError(f"source is {source!r}", hint="1 to 64 of A-Z a-z 0-9 _ .")
        if file_format not in ("arrow", "parquet"):
            raise UsageError(f"file_format is {file_format!r}", hint="one of arrow, parquet")
        prefix = prefix.strip("/")
        if prefix and not {"", ".", ".."}.isdisjoint(prefix.split("/")):
            raise UsageError(f"prefix is {prefix!r:.80}", hint="names with one / between them")
        self._quiver, self._store = quiver, store
        self._source, self._subscriber = source, subscriber
        self._prefix, self._format = prefix, file_format
        self.done = Forwarded()

    async def register(self) -> None:
        """Make the subscriber, from the oldest segment on. One that is there keeps its position."""
        await self._quiver.register(self._subscriber)

    async def run(self, timeout_s: float | None = None) -> Forwarded:
        """Forward until nothing comes for `timeout_s`; for ever with None. Failed uploads come again."""
        while (delivery := await self._quiver.next(self._subscriber, timeout_s)) is not None:
            async with delivery:
                await self._forward(delivery)
        return self.done

    async def _forward(self, delivery: Delivery) -> None:
        try:
            # In a thread: Parquet of a large segment would keep the loop, and every ingest, for 200 ms.
            data = await delivery._deliveries.run(lambda: self._encode(delivery.view))
            with contextlib.suppress(PreconditionFailed):
                # Otherwise an earlier attempt got there; the name says that it is the same.
                await self._store.put(self.key(delivery.view.meta), data, ABSENT)
        except (ForebayError, pa.ArrowException) as error:
            # Also what Parquet has no type for: one such segment must not hold up those behind it.
            self.done.failures += 1
            self.done.problem = f"segment {delivery.segment}: {error}"
            _log.warning("quiver.forward.failed: %s", self.done.problem)
            await delivery.nack()
            return
        if await delivery.ack():
            self.done.segments += 1
            self.done.rows += delivery.view.num_rows
            self.done.bytes += len(data)

    def key(self, meta: SegmentMeta) -> str:
        """The name of a segment's object."""
        signal = meta.signal
        if not _SIGNAL.fullmatch(signal):
            signal = "x" + signal.encode().hex()
        day = datetime.fromtimestamp(meta.ingested_ms[0] / 1000, UTC).date()
        name = f"{self._source}-{meta.segment:016d}-{meta.identity}.{self._format}"
        return "/".join(filter(None, (self._prefix, f"signal={signal}", f"date={day}", name)))

    def _encode(self, view: SegmentView) -> bytes | memoryview:
        if self._format == "parquet":
            sink = pa.BufferOutputStream()
            pq.write_table(view.table(), sink, compression="zstd")
            return memoryview(sink.getvalue())
        return b"".join(whole_pieces(view)) if view.bad_parts else view.data


async def read_forwarded(
    store: ObjectStore, prefix: str = "quiver", selection: Selection | None = None
) -> AsyncIterator[SegmentView]:
    """The forwarded Arrow segments that can hold what is asked for, each looked at and checked.

    Days that cannot match are not fetched; for the others the object is. Use `Selection.rows` for the rows.
    An object that is gone in the meantime is left out, and one that is no whole segment: the log names it.
    """
    wanted = selection or Selection()
    base = prefix.strip("/")
    async for info in store.list(f"{base}/" if base else ""):
        if not info.key.endswith(".arrow") or not _day_fits(info.key, wanted):
            continue
        try:
            view = SegmentView(memoryview((await store.get(info.key)).data))
        except NotFound:
            continue
        except FormatError as error:
            _log.warning("quiver.forward.unreadable: %s: %s", info.key, error)
            continue
        if wanted.wants(view.meta):
            yield view


def _day_fits(key: str, wanted: Selection) -> bool:
    found = _DATE.search(key)
    if wanted.ingested_ms is None or found is None:
        return True
    first, last = wanted.ingested_ms
    try:
        day = date.fromisoformat(found[1])
    except ValueError:  # somebody else's directory
        return True
    begin = datetime(day.year, day.month, day.day, tzinfo=UTC)
    # The day is that of the first batch; a segment may go on into the day behind it (`SPAN_MS_MAX`).
    too_late = last is not None and begin.timestamp() * 1000 > last
    too_early = first is not None and (begin + timedelta(days=2)).timestamp() * 1000 < first
    return not (too_late or too_early)
