"""Which shard a key lives on.

Servers do not check it: a key written to the wrong shard is accepted and then not found by anybody who
routes rightly. The hash is xxh3 with 64 bits, of which the lower 32 count; a published client uses another
one and is consistent only with itself.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import xxhash

__all__ = ["Shard", "ShardMap", "key_hash"]

_HASH_MASK = 0xFFFFFFFF


def key_hash(key: str) -> int:
    """The hash that decides on the shard, 0 to 2**32 - 1."""
    digest: int = xxhash.xxh3_64_intdigest(key.encode())
    return digest & _HASH_MASK


@dataclass(frozen=True, slots=True)
class Shard:
    """A range of hashes and the server that leads it."""

    id: int
    leader: str
    """`host:port`."""
    first: int
    last: int
    """The ends of the range; both belong to it."""


class ShardMap:
    """All shards of a namespace. Raises ValueError where some hash would have no shard, or two."""

    def __init__(self, shards: list[Shard]) -> None:
        self._by_hash = sorted(shards, key=lambda shard: shard.first)
        self._firsts = [shard.first for shard in self._by_hash]
        self._by_id = {shard.id: shard for shard in shards}
        self.ids = sorted(self._by_id)
        expected = 0
        for shard in self._by_hash:
            if shard.first != expected or shard.last < shard.first:
                raise ValueError(f"shard {shard.id} begins at {shard.first}, expected {expected}")
            expected = shard.last + 1
        if expected != _HASH_MASK + 1 or len(self.ids) != len(shards):
            raise ValueError(f"the shards {self.ids} do not cover all keys")

    def of(self, key: str) -> int:
        """The shard of a key, or of a partition key."""
        if len(self.ids) == 1:
            return self.ids[0]
        return self._by_hash[bisect.bisect_right(self._firsts, key_hash(key)) - 1].id

    def leader(self, shard: int) -> str | None:
        """The address of the shard's leader, or None where there is no such shard."""
        found = self._by_id.get(shard)
        return None if found is None else found.leader
