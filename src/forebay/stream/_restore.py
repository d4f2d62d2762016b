"""A stream from the bucket alone, back into the files of a broker.

No coordinator is asked. The copy of the record in the bucket names the root; where it is missing or behind,
the root with the highest next offset counts that still agrees with its uid; where there is none, the
fragments themselves do, since each names the next; so they do from a group on that cannot be read. In every
case the chain of trailers is followed to its end.

Fragments remember where their segment began, so the files are the ones that were tiered, byte for byte, as
far as retention has left them. Some megabytes of a fragment are in memory at a time. Files are written beside
their place and renamed when they are complete; an existing directory is never touched.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from forebay.errors import FormatError, NotFound, UsageError
from forebay.formats import osiris_file
from forebay.stream._errors import FragmentMissing, RootMissing, StreamMissing
from forebay.stream._lookup import FragmentRef
from forebay.stream._manifest import EMPTY, Manifest
from forebay.stream._runs import FragmentRuns
from forebay.stream._view import RemoteView

__all__ = ["Restored", "recover_manifest", "restore"]


@dataclass(slots=True)
class Restored:
    """What came back."""

    stream: str
    first_offset: int = 0
    next_offset: int = 0
    segments: int = 0
    chunks: int = 0
    bytes: int = 0


async def recover_manifest(view: RemoteView) -> Manifest:
    """The best manifest that the bucket can give, extended by the chain of trailers."""
    try:
        await view.refresh()
        manifest = view.manifest
    except (StreamMissing, RootMissing, FormatError):
        manifest = await _best_root(view)
    if manifest.empty:
        start = await _first_fragment(view)
        if start is None:
            return manifest
        chain = await view.fragments.chain(start)
    else:
        chain = await view.fragments.chain(manifest.next_offset)
    return manifest.append(chain)


async def _best_root(view: RemoteView) -> Manifest:
    best = EMPTY
    async for info in view.calls.store.list(f"{view.keys.prefix}metadata/root."):
        name = view.keys.parse(info.key)
        if name is None or name.what != "root":
            continue
        try:
            root = await view.nodes.root(name.uid)
        except (NotFound, FormatError):
            continue
        # Of two with the same end the later one has been trimmed further.
        if (root.next_offset, root.first_offset) > (best.next_offset, best.first_offset):
            best = root
    return best


async def _first_fragment(view: RemoteView) -> int | None:
    async for info in view.calls.store.list(f"{view.keys.prefix}data/"):
        name = view.keys.parse(info.key)
        if name is not None and name.what == "fragment":
            return name.offset
    return None


async def restore(view: RemoteView, target: Path, *, until_ms: int | None = None) -> Restored:
    """Write the stream's segment and index files into `target`, up to a moment if one is given."""
    work = _prepare(target)
    try:
        done = await _fill(view, work, until_ms)
    except (Exception, asyncio.CancelledError):
        shutil.rmtree(work)
        raise
    work.rename(target)
    _sync_directory(target.parent)
    return done


def _prepare(target: Path) -> Path:
    work = target.with_name(f".{target.name}.restoring")
    for path in (target, work):
        if path.exists():
            raise UsageError(f"{str(path)!r} exists", hint="name a directory that does not exist yet")
    work.mkdir(parents=True)
    return work


async def _fill(view: RemoteView, work: Path, until_ms: int | None) -> Restored:
    manifest = await recover_manifest(view)
    if manifest.empty and view.held is None:
        raise StreamMissing(view.keys.stream)
    done = Restored(view.keys.stream, manifest.first_offset, manifest.first_offset)
    with _Files(work) as files:
        async for ref in _refs(view, manifest):
            if not await _write(view, ref, files, done, until_ms):
                break
        files.finish(manifest.first_offset)
        done.segments = files.count
    return done


async def _refs(view: RemoteView, manifest: Manifest) -> AsyncIterator[FragmentRef]:
    """Every fragment in order: by the manifest, and from a group on that cannot be read by themselves."""
    last: int | None = None
    try:
        async for ref in view.lookup.from_offset(manifest, manifest.first_offset):
            yield ref
            last = ref.offset
    except (NotFound, FormatError):
        expected = manifest.first_offset
        if last is not None:
            expected = (await view.fragments.trailer(last)).next_offset
        async for ref in _listed(view, expected, manifest.next_offset):
            yield ref


async def _listed(view: RemoteView, expected: int, end: int) -> AsyncIterator[FragmentRef]:
    """The fragments in the bucket between two offsets: each where the one before it ends, or behind a gap."""
    gaps = dict(view.held.head.gaps) if view.held is not None else {}
    async for info in view.calls.store.list(f"{view.keys.prefix}data/"):
        name = view.keys.parse(info.key)
        if name is None or name.what != "fragment" or not expected <= name.offset < end:
            continue  # Of another cut of the same chunks, perhaps.
        if name.offset != gaps.get(expected, expected):
            break
        trailer = await view.fragments.trailer(name.offset)
        yield FragmentRef(name.offset, trailer.data_bytes)
        expected = trailer.next_offset
    if expected < end:
        raise FragmentMissing(view.keys.stream, offset=expected)


async def _write(
    view: RemoteView, ref: FragmentRef, files: _Files, done: Restored, until_ms: int | None
) -> bool:
    """Add a fragment's chunks, some at a time; False where the moment is reached."""
    fragment = await FragmentRuns.open(view, ref)
    count = len(fragment.index)
    if until_ms is not None:
        later = np.flatnonzero(fragment.index["timestamp"] > until_ms)
        count = int(later[0]) if len(later) else count
    if count and (fragment.trailer.chunks_before == 0 or files.count == 0):
        files.roll(fragment.trailer.first_offset)
    async with aclosing(fragment.runs(count)) as runs:
        async for run in runs:
            files.add(run.data, run.positions, run.headers)
            done.next_offset = int(fragment.ids[run.stop])
            done.chunks += run.stop - run.first
            done.bytes += len(run.data)
    return count == len(fragment.index)


class _Files:
    """The segment and the index being written."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._segment: BinaryIO | None = None
        self._index: BinaryIO | None = None
        self._position = 0
        self.count = 0

    def roll(self, chunk_id: int) -> None:
        """Begin with the next pair of files."""
        self._close()
        self._segment = (self._directory / osiris_file.file_name(chunk_id, "segment")).open("xb")
        self._index = (self._directory / osiris_file.file_name(chunk_id, "index")).open("xb")
        self._segment.write(osiris_file.SEGMENT_HEADER)
        self._index.write(osiris_file.INDEX_HEADER)
        self._position = osiris_file.FILE_HEADER_BYTES
        self.count += 1

    def add(self, data: memoryview, positions: npt.NDArray[np.int64], headers: npt.NDArray[Any]) -> None:
        """Append whole chunks."""
        assert self._segment is not None
        assert self._index is not None
        records = np.empty(len(positions), osiris_file.INDEX_DTYPE)
        for name in ("chunk_id", "timestamp", "epoch", "type"):
            records[name] = headers[name]
        records["position"] = positions + self._position
        self._segment.write(data)
        self._index.write(records.tobytes())
        self._position += len(data)

    def finish(self, first_offset: int) -> None:
        """Make everything durable. A stream without chunks gets its two headers, as a broker would write."""
        if self.count == 0:
            self.roll(first_offset)
        self._close()
        _sync_directory(self._directory)

    def _close(self) -> None:
        for file in (self._segment, self._index):
            if file is not None and not file.closed:
                file.flush()
                os.fsync(file.fileno())
                file.close()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._segment, self._index):
            if file is not None:
                file.close()


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
