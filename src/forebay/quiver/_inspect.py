"""A store's directory, read without opening it: nothing is locked, moved or written.

A store that is in use changes under the reader: a segment is acknowledged and gone between the look at
`ack.log` and the look at the files. So what seems to be damaged is looked at again, and counts once two looks
in a row agree.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, cast

import pyarrow as pa

from forebay.errors import FormatError, NotFound
from forebay.formats.quiver_segment import SegmentMeta
from forebay.quiver._errors import from_os_error
from forebay.quiver._local_disk import LocalDisk
from forebay.quiver._reading import SegmentView
from forebay.quiver._recovery import DIRECTORIES, Recovered, recover
from forebay.quiver._segment_file import segment_name
from forebay.quiver._selection import Selection

__all__ = ["DirectoryView", "describe_segment"]

LOOKS_MAX: Final = 10
"""Looks at a directory that changes meanwhile."""


def describe_segment(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The metadata of one segment file, with the parts whose checksum does not match."""
    data = LocalDisk(Path(path).parent).read(Path(path).name)
    view = SegmentView(data)
    return {"kind": "segment", **_described(view.meta, len(data)), "bad_parts": view.bad_parts}


def _described(meta: SegmentMeta, file_bytes: int) -> dict[str, Any]:
    return {
        "segment": meta.segment,
        "signal": meta.signal,
        "schema_hash": meta.schema_hash.hex(),
        "rows": meta.rows,
        "batches": len(meta.sources),
        "codec": meta.codec,
        "raw_bytes": meta.raw_bytes,
        "file_bytes": file_bytes,
        "ingested_ms": list(meta.ingested_ms),
        "event_ns": None if meta.event_ns is None else list(meta.event_ns),
        "wal_entries": [list(run) for run in meta.entries],
    }


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    try:
        return cast(list[dict[str, Any]], table.to_pylist())
    except Exception:
        # A time that Python has no type for, text that is no UTF-8: one such value must not hide the others.
        columns = [[_value(each) for each in column] for column in table.columns]
        return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def _value(scalar: pa.Scalar) -> object:
    with contextlib.suppress(Exception):
        return scalar.as_py()
    for kind in (pa.string(), pa.int64(), pa.binary()):
        with contextlib.suppress(Exception):
            return scalar.cast(kind).as_py()
    return f"a value of type {scalar.type}"


def _looked_at(disk: LocalDisk) -> Recovered:
    before = None
    for attempt in range(LOOKS_MAX):
        try:
            found = recover(disk, read_only=True)
        except FileNotFoundError:
            if attempt == LOOKS_MAX - 1:
                raise
            continue
        if found.report.is_clean or found.report == before:
            return found
        before = found.report
    return found


class DirectoryView:
    """What the next opening of the directory would find."""

    def __init__(self, path: Path, found: Recovered) -> None:
        self._path = path
        self.found = found

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> DirectoryView:
        """Raises `NotFound` where the directory is no store."""
        root = Path(path)
        if not all((root / each).is_dir() for each in DIRECTORIES):
            hint = "name the directory that holds wal/, ack/ and segments/"
            cores = sorted(each.name for each in root.glob("core_*")) if root.is_dir() else []
            raise NotFound(
                f"Quiver store {root}", hint=f"look at one of its cores: {cores[0]}" if cores else hint
            )
        try:
            return cls(root, _looked_at(LocalDisk(root)))
        except OSError as error:
            raise from_os_error("reading the directory", error) from error

    def stats(self) -> dict[str, Any]:
        """Sizes, positions and losses."""
        found, state = self.found, self.found.state
        subscribers = []
        for who in state.subscribers.values():
            pending = [info for number, info in found.segments.items() if not who.is_resolved(number)]
            held = [number for number in state.sealed if not who.is_resolved(number)]
            subscribers.append(
                {
                    "name": who.name,
                    "high_water": who.high_water,
                    "gap_set_size": len(who.resolved_above),
                    "lag_segments": len(pending) + len(held),
                    "pinned_bytes": sum(info.file_bytes for info in pending),
                    "dropped": dict(who.dropped),
                }
            )
        return {
            "segments": len(found.segments),
            "held_segments": len(state.sealed),
            "rows": sum(info.rows for info in found.segments.values()),
            "segment_bytes": sum(info.file_bytes for info in found.segments.values()),
            "wal_bytes": sum(file.size for file in found.wal_files),
            "spare_bytes": sum(size for _, size in found.wal_spares),
            "wal_entries": len(found.replay),
            "ack_bytes": sum(file.size for file in found.ack_files)
            + sum(each.size for each in found.checkpoints)
            + sum(size for _, size in found.ack_spares),
            "aside_bytes": found.aside_bytes,
            "next_segment": state.next_segment,
            "losses": dict(state.losses),
            "subscribers": subscribers,
        }

    def describe(self) -> dict[str, Any]:
        """Everything, with a line for each segment."""
        segments = [
            {
                "segment": info.segment,
                "signal": info.signal,
                "rows": info.rows,
                "file_bytes": info.file_bytes,
                "ingested_ms": list(info.ingested_ms),
                "event_ns": None if info.event_ns is None else list(info.event_ns),
            }
            for _, info in sorted(self.found.segments.items())
        ]
        return {
            "kind": "quiver",
            **{name: value for name, value in self.stats().items() if name != "segments"},
            "recovery": asdict(self.found.report),
            "segments": segments,
        }

    def verify(self) -> list[str]:
        """Problems, one sentence each, after comparing every checksum."""
        report = self.found.report
        problems = []
        for count, what in (
            (report.damaged_ranges, "damaged ranges in the logs"),
            (report.unknown_frames, "frames of an unknown type"),
            (report.checkpoints_damaged, "damaged checkpoints"),
            (report.segments_quarantined, "segments whose footer cannot be read"),
            (len(report.segments_lost), "segments that are needed and gone"),
        ):
            if count:
                problems.append(f"{count} {what}")
        disk = LocalDisk(self._path)
        files = [(f"segment {number}", segment_name(number)) for number in sorted(self.found.segments)]
        files += [(f"dead letter {name}", f"dead/{name}") for name, _ in disk.list("dead")]
        for what, name in files:
            try:
                view = SegmentView(disk.read(name))
            except FileNotFoundError:
                continue  # Everybody has had it since.
            except (FormatError, OSError) as error:
                problems.append(f"{what}: {error}")
                continue
            if view.bad_parts:
                problems.append(f"{what}: parts {view.bad_parts} are damaged")
        return problems

    def select(self, selection: Selection | None = None, *, newest_first: bool = False) -> list[int]:
        """The finished segments that can hold what is asked for."""
        wanted = selection or Selection()
        found = [number for number, info in self.found.segments.items() if wanted.wants(info)]
        return sorted(found, reverse=newest_first)

    def view(self, segment: int) -> SegmentView:
        """One of them."""
        return SegmentView(LocalDisk(self._path).read(segment_name(segment)))

    def last_rows(
        self, count: int, selection: Selection | None = None, event_time_column: str = "timestamp"
    ) -> list[dict[str, Any]]:
        """The last rows of the finished segments that are asked for, oldest first."""
        rows: list[dict[str, Any]] = []
        for number in self.select(selection, newest_first=True):
            try:
                view = self.view(number)
            except FileNotFoundError:
                continue
            table = (selection or Selection()).rows(view, event_time_column)
            rows[:0] = _rows(table.slice(max(0, table.num_rows - (count - len(rows)))))
            if len(rows) >= count:
                break
        return rows
