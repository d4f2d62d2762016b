"""The manifest as an object in a store, with what is known of it.

What was read or written last is kept: bytes, version and chain of entries. After an own write nothing has to
be read, and a read asks only for what changed.

Two things are never believed. That a manifest which existed is missing because it is new: it is lost, and
making it anew would hide every batch in it. And that a manifest whose next sequence went down is the same
queue: somebody restored an old copy.
"""

from __future__ import annotations

from forebay.buffer._errors import ManifestLost
from forebay.errors import NotFound
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
        manifest = buffer_manifest.decode(
            found.data,
            name=self.path,
            deep=False,
            known=self.manifest,
            manifest_bytes_max=self._bytes_max,
        )
        if manifest.next_sequence < self.manifest.next_sequence:
            self.known = False
            reason = f"its next sequence went from {self.manifest.next_sequence} to {manifest.next_sequence}"
            raise ManifestLost(self.path, reason)
        self._version = found.version
        return self._see(manifest)

    async def write(self, manifest: Manifest) -> None:
        """Replace what is known by `manifest`, if that is still what lies there.

        Raises what the store says. After any error the manifest has to be loaded again.
        """
        assert self.known, "load it first"
        self.known = False
        self._version = await self._store.put(self.path, manifest.data, self._version or ABSENT)
        self._see(manifest)

    def _see(self, manifest: Manifest) -> Manifest:
        self.manifest = manifest
        self.known = True
        self.seen_at = self._clock.monotonic()
        return manifest
