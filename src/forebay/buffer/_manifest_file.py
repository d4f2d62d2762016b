"""The manifest as an object in a store, with what is known of it.

What was read or written last is kept: bytes, version and chain of entries. After an own write nothing has to
be read, and a read asks only for what changed.

Two things are never believed. That a manifest which existed is missing because it is new: it is lost, and
making it anew would hide every batch in it. And that a manifest whose next sequence went down is the same
queue: somebody restored an old copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from forebay.buffer._errors import ManifestLost
from forebay.errors import ForebayError, NotFound, PreconditionFailed
from forebay.formats import buffer_manifest
from forebay.formats.buffer_manifest import EMPTY, Manifest
from forebay.kit.clock import Clock
from forebay.kit.conditions import ABSENT
from forebay.storage import ObjectStore, StoredObject

__all__ = ["ManifestFile"]


class ManifestFile:
    """See the module. One per producer, consumer or reader. Several tasks may load it, one may write it."""

    def __init__(self, store: ObjectStore, path: str, clock: Clock, *, bytes_max: int) -> None:
        self._store = store
        self.path = path
        self._clock = clock
        self._bytes_max = bytes_max
        self._version: str | None = None
        self.manifest = EMPTY
        """As last read or written. Empty where there is none yet."""
        self.known = False
        """Whether `manifest` may be built on: False before the first read and after a failed write."""
        self.seen_at = 0.0
        """When it was last read or written, on the monotonic clock."""
        self.reads = 0
        """Bodies downloaded."""

    def use(self, store: ObjectStore) -> None:
        """Go on through another way to the same object."""
        self._store = store

    @property
    def exists(self) -> bool:
        """Whether it was ever seen."""
        return self._version is not None

    @property
    def version(self) -> str | None:
        """Version of `manifest`, or None where there is none yet."""
        return self._version

    async def load(self) -> Manifest:
        """The manifest as it is now. Raises `ManifestLost`, `CorruptManifest`, or what the store says."""
        while True:
            asked = self._version
            found = await self._look(asked)
            if self._version == asked:
                return self._loaded(found)
            # Somebody else read or wrote it meanwhile. What was found may be older than that: ask again.

    async def _look(self, version: str | None) -> StoredObject | None:
        """What lies there, or None where that is `version`, or nothing at all where none is known."""
        try:
            if version is not None:
                return await self._store.get_if_changed(self.path, version)
            return await self._store.get(self.path)
        except NotFound:
            if version is None:
                return None
            self.known = False
            raise ManifestLost(self.path, "it existed and is gone") from None

    def _loaded(self, found: StoredObject | None) -> Manifest:
        if found is None:
            return self._see(self.manifest if self.exists else EMPTY)
        self.reads += 1
        manifest = self._decoded(found)
        if manifest.next_sequence < self.manifest.next_sequence:
            self.known = False
            reason = f"its next sequence went from {self.manifest.next_sequence} to {manifest.next_sequence}"
            raise ManifestLost(self.path, reason)
        self._version = found.version
        return self._see(manifest)

    def _decoded(self, found: StoredObject) -> Manifest:
        return buffer_manifest.decode(
            found.data,
            name=self.path,
            deep=False,
            known=self.manifest,
            manifest_bytes_max=self._bytes_max,
        )

    async def write(self, manifest: Manifest, *, patience_s: float | None = None) -> None:
        """Replace what is known by `manifest`, if that is still what lies there.

        Raises what the store says. After any error the manifest has to be loaded again. With `patience_s`,
        an append that takes longer is looked after, and not waited for once it has certainly lost its race.
        """
        assert self.known, "load it first"
        self.known = False
        put = self._store.put(self.path, manifest.data, self._version or ABSENT)
        self._version = await (put if patience_s is None else self._watched(put, manifest, patience_s))
        self._see(manifest)

    async def _watched(self, put: Awaitable[str], manifest: Manifest, patience_s: float) -> str:
        """What `put` gives. Looks, ever more rarely, whether it can still succeed."""
        writing = asyncio.ensure_future(put)
        writing.add_done_callback(_seen)
        try:
            while not writing.done():
                await asyncio.wait({writing}, timeout=patience_s)
                if not writing.done() and await self._has_lost(manifest) and not writing.done():
                    raise PreconditionFailed(self.path, expected=self._version)
                patience_s *= 2
            return writing.result()
        finally:
            writing.cancel()

    async def _has_lost(self, manifest: Manifest) -> bool:
        """Whether the append of `manifest`, under way, has not happened and cannot happen any more.

        It names the version known here, and versions never come back. So it is lost where another version
        lies there, unless that is its own or a later one: its first place is then taken by its own batch, or
        empty again.
        """
        place = self.manifest.next_sequence
        try:
            found = await self._look(self._version)
            if found is None:
                return False
            now = self._decoded(found)
            there, ours = now.entry(place), manifest.entry(place)
        except ForebayError:
            return False  # Whoever waits for the write will hear it from there.
        if there is None or ours is None:
            return now.next_sequence == place
        return there.location != ours.location

    def _see(self, manifest: Manifest) -> Manifest:
        self.manifest = manifest
        self.known = True
        self.seen_at = self._clock.monotonic()
        return manifest


def _seen(writing: asyncio.Future[str]) -> None:
    """Nobody asks for the error of a write that was given up."""
    if not writing.cancelled():
        writing.exception()
