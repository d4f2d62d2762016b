"""Where the segments of a Quiver store lie, and which of them a query has had.

There are two places, and the same rows come from both:

* the directory of a store, or one with a `core_<id>` for each of several: looked at without its lock, so the
  process that has it open goes on. What is in no finished segment yet is not there yet.
* a bucket to which segments were forwarded, `<prefix>/signal=<s>/date=<d>/<source>-<number>-<digest>.arrow`:
  everything that planning needs is in the names and sizes of a listing.

A segment never changes, and its number is given out once in a store. It may come late, though: a forwarder
that had to try again is overtaken by what follows, so the highest number seen says nothing about those below.
A position is therefore the set of numbers that were read, by source, as runs:

    {"edge1": "1-500,502-511"}

Numbers that were never used or that were dropped stay holes; all others close up to one run.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import FormatError, NotFound, Unavailable, UsageError
from forebay.spark._clients import Client
from forebay.spark._errors import DataLossFound, own_position

if TYPE_CHECKING:
    from forebay.quiver import SegmentView
    from forebay.storage import ObjectStore

__all__ = ["Numbers", "Positions", "Segment", "as_offset", "find", "from_offset", "head", "view"]

STORE: Final = "store"
"""Source of a directory that is a single store."""
HEAD_BYTES: Final = 64 * 1024
"""Bytes from the start of an object that mostly hold its schema."""
LOOKS_MAX: Final = 5
"""Looks at a directory whose process deletes files while we read their names."""

_CORE: Final = re.compile(r"core_\d{1,3}")
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_OBJECT: Final = re.compile(r"(?:^|.*/)signal=([^/]+)/date=[^/]+/([^/]+)-(\d{16})-([0-9a-f]{12})\.(\w+)")


class Numbers:
    """A set of numbers from 1 on, mostly without holes."""

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        self._runs = [*runs]

    @classmethod
    def parse(cls, text: str) -> Numbers:
        """From `1-500,502`."""
        pairs = [each.partition("-") for each in text.split(",") if each]
        return cls((int(first), int(last or first)) for first, _, last in pairs)

    def __str__(self) -> str:
        return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in self._runs)

    def __contains__(self, number: int) -> bool:
        place = bisect.bisect(self._runs, number, key=lambda run: run[0]) - 1
        return place >= 0 and number <= self._runs[place][1]

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self._runs)

    def including(self, numbers: Iterable[int]) -> Numbers:
        """This set and these."""
        runs: list[tuple[int, int]] = []
        for first, last in sorted([*self._runs, *((number, number) for number in numbers)]):
            if runs and first <= runs[-1][1] + 1:
                runs[-1] = (runs[-1][0], max(last, runs[-1][1]))
            else:
                runs.append((first, last))
        return Numbers(runs)

    def without(self, other: Numbers) -> list[int]:
        """What is here and not there."""
        found: list[int] = []
        others, place = other._runs, 0
        for first, last in self._runs:
            while place < len(others) and others[place][1] < first:
                place += 1
            after = first
            for low, high in itertools.islice(others, place, None):
                if low > last:
                    break
                found += range(after, low)
                after = max(after, high + 1)
            found += range(after, last + 1)
        return found


Positions = Mapping[str, Numbers]


def as_offset(positions: Positions) -> dict[str, str]:
    """The dictionary that Spark keeps, in one order always: it is compared as text."""
    return {source: str(positions[source]) for source in sorted(positions)}


def from_offset(offset: Mapping[str, Any]) -> dict[str, Numbers]:
    """What `as_offset` was given."""
    with own_position("quiver"):
        return {source: Numbers.parse(text) for source, text in offset.items()}


@dataclass(frozen=True, slots=True)
class Segment:
    """A finished segment, and where it lies."""

    source: str
    """Of a bucket the name of the forwarder, of a directory its core."""
    number: int
    signal: str
    where: str
    """The key of an object, or the directory of the store."""
    is_object: bool
    size_bytes: int
    schema_hash: bytes | None
    """Where it is known without a look at the file."""


def find(client: Client, path: str, prefix: str | None) -> list[Segment]:
    """Every segment there is, by source and number. Raises `NotFound` where there is no store at all."""
    root = Path(path)
    if prefix is None and "://" not in path:
        stores = _stores(root)
        if stores:
            return [each for source, folder in stores for each in _in_directory(source, folder)]
    if "://" not in path and not root.is_dir():
        raise NotFound(path, hint="the directory of a Quiver store, or a bucket that one is forwarded to")
    return client.run(_in_bucket(client.store, "quiver" if prefix is None else prefix.strip("/")))


def _stores(root: Path) -> list[tuple[str, Path]]:
    if _is_store(root):
        return [(STORE, root)]
    if not root.is_dir():
        return []
    cores = (each for each in root.iterdir() if _CORE.fullmatch(each.name) and _is_store(each))
    return sorted((each.name, each) for each in cores)


def _is_store(folder: Path) -> bool:
    return all((folder / each).is_dir() for each in ("wal", "ack", "segments"))


def _in_directory(source: str, folder: Path) -> list[Segment]:
    from forebay.quiver import DirectoryView

    for look in itertools.count(1):
        try:
            found = DirectoryView.read(folder).found.segments
            break
        except Unavailable as error:
            deleted = isinstance(error.__cause__, FileNotFoundError)  # Between its name and its footer.
            if not deleted or look == LOOKS_MAX:
                raise
    return [
        Segment(source, number, info.signal, str(folder), False, info.file_bytes, info.schema_hash)
        for number, info in sorted(found.items())
    ]


async def _in_bucket(store: ObjectStore, prefix: str) -> list[Segment]:
    found: dict[tuple[str, int], Segment] = {}
    parquet = 0
    async for info in store.list(f"{prefix}/" if prefix else ""):
        name = _OBJECT.fullmatch(info.key)
        if name is None or name[5] != "arrow":
            parquet += name is not None and name[5] == "parquet"
            continue
        source, number = name[2], int(name[3])
        segment = Segment(source, number, _signal(name[1]), info.key, True, info.size, None)
        other = found.setdefault((source, number), segment)
        if other is not segment:
            raise DataLossFound(
                f"source {source!r}",
                start=number,
                earliest=None,
                reason=f"two stores have forwarded a segment {number} under this name: {other.where}",
            )
    if parquet and not found:
        raise UsageError(f"{prefix}: forwarded as Parquet", hint="spark.read.parquet reads these as they are")
    return [found[key] for key in sorted(found)]


def _signal(name: str) -> str:
    """Names that are no plain ones are forwarded as hexadecimal digits behind an x.

    A plain one may look the same: what it would stand for is a plain name then, which is forwarded as it is.
    """
    if name.startswith("x"):
        try:
            found = bytes.fromhex(name[1:]).decode()
        except ValueError:
            return name
        return name if not found or _PLAIN.fullmatch(found) else found
    return name


def view(client: Client, segment: Segment) -> SegmentView:
    """The segment, checked. Raises `DataLossFound` where it is gone."""
    from forebay.quiver import LocalDisk, SegmentView

    try:
        if segment.is_object:
            store = client.store
            return SegmentView(memoryview(client.run(store.get(segment.where)).data))
        return SegmentView(LocalDisk(Path(segment.where)).read(_file(segment)))
    except (NotFound, FileNotFoundError) as error:
        raise DataLossFound(
            f"segment {segment.number} of {segment.source!r}",
            start=segment.number,
            earliest=None,
            reason="its file is gone",
        ) from error
    except FormatError as error:
        error.add_note(f"segment {segment.number} of {segment.source!r}, {segment.where}")
        raise


def _file(segment: Segment) -> str:
    return f"segments/{segment.number:016d}.arrow"


def head(client: Client, segments: Sequence[Segment]) -> list[bytes | None]:
    """The first bytes of each, where its schema lies; None for one that is gone."""
    return client.run(_heads(client.store, segments))


async def _heads(store: ObjectStore, segments: Sequence[Segment]) -> list[bytes | None]:
    from forebay.quiver import LocalDisk

    async def one(segment: Segment) -> bytes | None:
        length = min(HEAD_BYTES, segment.size_bytes)
        try:
            if segment.is_object:
                return await store.get_range(segment.where, 0, length)
            return LocalDisk(Path(segment.where)).read_range(_file(segment), 0, length)
        except (NotFound, FileNotFoundError):
            return None

    return await asyncio.gather(*[one(each) for each in segments])
