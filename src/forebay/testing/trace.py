"""What happened in a world: every effect in order, and every request counted.

The trace is a list of plain tuples, because it is written on the hottest path there is and read only when
something failed. Its digest is the fingerprint of a run: same seed, same digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

__all__ = ["Event", "RequestCount", "Requests", "TraceLine", "digest"]

TraceLine: TypeAlias = tuple[float, str, str, str, str]
"""An `Event` as a plain tuple."""


class Event(NamedTuple):
    """One line of a trace."""

    time: float
    """Virtual seconds since the world began."""
    actor: str
    what: str
    """An operation such as `store.put`, or `crash`, `pause`, `spawn` and the like."""
    subject: str
    """The key, mostly."""
    outcome: str
    """`ok`, the name of an error, or what became of a request."""


def digest(lines: Sequence[tuple[object, ...]]) -> str:
    """32 hexadecimal digits that differ where the lines differ."""
    return hashlib.blake2b(repr(lines).encode(), digest_size=16).hexdigest()


class RequestCount(NamedTuple):
    """Requests of one actor and one operation."""

    requests: int
    bytes_sent: int
    """Bodies and values sent by the actor."""
    bytes_received: int
    """Bodies and values received by the actor."""


class Requests:
    """Counters by actor and operation (`store.put`, `coordinator.write`, ...)."""

    def __init__(self) -> None:
        self._counters: dict[tuple[str, str], list[int]] = {}

    def counter(self, actor: str, operation: str) -> list[int]:
        """The live counter: requests, bytes sent, bytes received."""
        return self._counters.setdefault((actor, operation), [0, 0, 0])

    def total(self, actor: str = "", operation: str = "") -> RequestCount:
        """The sum over one actor or all, and over one operation, one service (`store`) or all."""
        requests = sent = received = 0
        for (name, kind), counter in self._counters.items():
            if actor in ("", name) and operation in ("", kind, kind.partition(".")[0]):
                requests += counter[0]
                sent += counter[1]
                received += counter[2]
        return RequestCount(requests, sent, received)

    def count(self, actor: str = "", operation: str = "") -> int:
        """The number of requests; see `total`."""
        return self.total(actor, operation).requests

    def snapshot(self) -> Requests:
        """A copy that stays as it is."""
        copy = Requests()
        copy._counters = {key: list(counter) for key, counter in self._counters.items()}
        return copy

    def since(self, before: Requests) -> Requests:
        """What was added after a snapshot."""
        added = Requests()
        for key, counter in self._counters.items():
            old = before._counters.get(key, [0, 0, 0])
            added._counters[key] = [now - then for now, then in zip(counter, old, strict=True)]
        return added

    def __iter__(self) -> Iterator[tuple[str, str, RequestCount]]:
        """Actor, operation and count, sorted."""
        for (actor, operation), counter in sorted(self._counters.items()):
            yield actor, operation, RequestCount(*counter)
