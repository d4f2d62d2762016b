"""Retention of the remote tier: remove a prefix of the fragments, in the root and inside its groups.

The oldest fragments go while the stream is larger than it may be, or while their last chunk is older than it
may be; one always stays. Where the root begins with a group, the group is read, trimmed in the same way, and
what is left of it is written as a new group, so that every entry that can be reached exists. A group that
becomes empty is left out. Nothing is deleted here: the keys are collected for after the swap.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from forebay.formats import stream_manifest as fmt
from forebay.formats.stream_manifest import FRAGMENT, Entries
from forebay.stream._config import RetentionPolicy
from forebay.stream._keys import StreamKeys
from forebay.stream._manifest import Manifest
from forebay.stream._nodes import NodeStore

__all__ = ["Retention"]


class Retention:
    """One pass over one manifest."""

    def __init__(self, nodes: NodeStore, keys: StreamKeys, policy: RetentionPolicy, now_ms: int) -> None:
        self._nodes = nodes
        self._keys = keys
        self._max_bytes = policy.max_bytes
        self._cutoff_ms = None if policy.max_age_ms is None else now_ms - policy.max_age_ms
        self._left_bytes = 0
        self._last_offset = 0
        self.retired: list[str] = []
        """Keys that nothing names any more once the trimmed root is current, oldest first."""
        self.fragments = 0
        """Fragments removed."""

    async def trim(self, manifest: Manifest) -> Manifest | None:
        """The manifest without what is to go, or None where all of it stays."""
        if manifest.empty or not self._due(manifest):
            return None
        self._left_bytes = manifest.total_bytes
        self._last_offset = int((await self._nodes.last_fragment(manifest.entries))["offset"][0])
        entries = await self._trim(manifest.entries)
        if self.fragments == 0:
            return None
        first = await self._nodes.first_fragment(entries)
        return replace(
            manifest,
            first_offset=int(first["offset"][0]),
            first_timestamp=int(first["first_ts"][0]),
            first_last_timestamp=int(first["last_ts"][0]),
            total_bytes=self._left_bytes,
            entries=entries,
        )

    def _due(self, manifest: Manifest) -> bool:
        """Whether the first fragment has to go, as far as the root alone can tell."""
        large = self._max_bytes is not None and manifest.total_bytes > self._max_bytes
        return large or (self._cutoff_ms is not None and manifest.first_last_timestamp < self._cutoff_ms)

    async def _trim(self, entries: Entries) -> Entries:
        while len(entries):
            if int(fmt.kinds_of(entries[:1])[0]) == FRAGMENT:
                return self._trim_fragments(entries)
            children = await self._nodes.children(entries[:1])
            left = await self._trim(children)
            if len(left) == len(children) and left.tobytes() == children.tobytes():
                return entries
            self.retired.append(self._nodes.group_key(entries[:1]))
            if len(left):
                kind = int(fmt.kinds_of(entries[:1])[0])
                return fmt.join_entries(await self._nodes.put_group(kind, left), entries[1:])
            entries = entries[1:]
        return entries

    def _trim_fragments(self, entries: Entries) -> Entries:
        # Kinds only decrease along a node, so all of these are fragments.
        sizes = fmt.sizes_of(entries)
        before = self._left_bytes - np.concatenate([[0], np.cumsum(sizes)[:-1]])
        goes = np.zeros(len(entries), bool)
        if self._max_bytes is not None:
            goes |= before > self._max_bytes
        if self._cutoff_ms is not None:
            goes |= entries["last_ts"].astype(np.int64) < self._cutoff_ms
        goes &= entries["offset"].astype(np.int64) < self._last_offset
        count = len(entries) if goes.all() else int(np.argmin(goes))
        self._left_bytes -= int(sizes[:count].sum())
        self.fragments += count
        for offset in entries["offset"][:count].tolist():
            self.retired += [self._keys.filters(offset), self._keys.fragment(offset)]
        return entries[count:]
