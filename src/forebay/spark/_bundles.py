"""What is read as a whole (batches of a queue, segments) in bundles that are worth a task each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

__all__ = ["TASK_BYTES", "bundles"]

T = TypeVar("T")

TASK_BYTES: Final = 32 * 1024 * 1024
"""Bytes at which a task has enough to read."""


def bundles(items: Sequence[T], sizes: Sequence[int], least: int | None) -> Iterator[tuple[T, ...]]:
    """Items in order, together as large as a task likes them; at least `least`, where there are as many."""
    needed = 0 if least is None else least
    target = TASK_BYTES if least is None else max(1, min(TASK_BYTES, sum(sizes) // least))
    found: list[T] = []
    taken = 0
    for left, item, size in zip(range(len(items) - 1, -1, -1), items, sizes, strict=True):
        found.append(item)
        taken += size
        # From where only as many are left as bundles are asked for, each is one.
        if taken >= target or not left or left <= needed - 1:
            yield tuple(found)
            found, taken, needed = [], 0, needed - 1
