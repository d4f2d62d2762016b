"""Which broker takes a partition: rendezvous hashing, then a choice inside the owner set.

Every broker gets a weight for every partition, a hash of topic, partition, broker and seed; the highest ones
own it. A broker that dies takes only its own share with it, and nobody has to agree on anything: the manifest
can be computed again from four values. Requests never leave the owner set; where all owners are thought dead,
they are tried all the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forebay.kit.clock import Clock

__all__ = ["Router", "owner_sets", "routing_manifest"]

DEAD_S = 2.0
"""Seconds for which a broker that could not be reached is passed over."""


def _weight(topic: str, partition: int, broker: str, seed: int) -> int:
    words = "\0".join([topic, str(partition), broker, str(seed)])
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "big")


def owner_sets(
    topic: str, partitions: int, brokers: Sequence[str], owners: int, seed: int
) -> list[list[str]]:
    """The owners of each partition, heaviest first."""
    return [
        sorted(brokers, key=lambda broker: _weight(topic, partition, broker, seed), reverse=True)[:owners]
        for partition in range(partitions)
    ]


def routing_manifest(
    topic: str, sets: Sequence[Sequence[str]], brokers: Sequence[str], seed: int, selection: str
) -> dict[str, Any]:
    """What is written beside a run."""
    return {
        "hash": "rendezvous: blake2b-64 of topic, partition, broker, seed, joined by a zero byte",
        "seed": seed,
        "selection": selection,
        "brokers": list(brokers),
        "partitions": [
            {"topic": topic, "partition": number, "owners": list(owners)}
            for number, owners in enumerate(sets)
        ],
    }


@dataclass(slots=True)
class Remap:
    """A request that went to another owner than it would have."""

    partition: int
    away_from: str
    to: str


class Router:
    """Chooses a broker for every request. One per process."""

    def __init__(self, sets: Sequence[Sequence[str]], selection: str, clock: Clock) -> None:
        self._sets = sets
        self._least = selection == "least_inflight"
        self._clock = clock
        self._turns = [0] * len(sets)
        self._in_flight: dict[str, int] = {broker: 0 for owners in sets for broker in owners}
        self._dead_until: dict[str, float] = {}

    def choose(self, partition: int, avoid: str = "") -> tuple[str, Remap | None]:
        """The broker to ask, and whether that is a remap. `avoid` did not answer the last time."""
        owners = self._sets[partition]
        now = self._clock.monotonic()
        alive = [each for each in owners if self._dead_until.get(each, 0.0) <= now and each != avoid]
        turn = self._turns[partition]
        self._turns[partition] = turn + 1
        wished = self._wish(owners, turn)
        chosen = wished if wished in alive or not alive else self._wish(alive, turn)
        if not alive and avoid == chosen and len(owners) > 1:
            chosen = next(each for each in owners if each != avoid)
        self._in_flight[chosen] += 1
        return chosen, None if chosen == wished else Remap(partition, wished, chosen)

    def _wish(self, owners: Sequence[str], turn: int) -> str:
        if self._least:
            return min(owners, key=lambda broker: self._in_flight[broker])
        return owners[turn % len(owners)]

    def done(self, broker: str, *, reached: bool) -> None:
        """The request is over. A broker that was not reached is passed over for a while."""
        self._in_flight[broker] -= 1
        if reached:
            self._dead_until.pop(broker, None)
        else:
            self._dead_until[broker] = self._clock.monotonic() + DEAD_S
