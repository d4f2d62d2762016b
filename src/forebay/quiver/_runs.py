"""A set of integers kept as sorted, disjoint runs, which is what acknowledgements mostly are."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

__all__ = ["RunSet"]


class RunSet:
    """Integers as `[first, last]` runs. Membership is a binary search; adding at the end costs nothing."""

    __slots__ = ("_firsts", "_lasts")

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in runs:
            self.add(first, last)

    def add(self, first: int, last: int | None = None) -> None:
        """Add the integers from `first` to `last`, both included."""
        end = first if last is None else last
        low = bisect_left(self._lasts, first - 1)
        high = bisect_right(self._firsts, end + 1)
        if low < high:
            first = min(first, self._firsts[low])
            end = max(end, self._lasts[high - 1])
        self._firsts[low:high] = [first]
        self._lasts[low:high] = [end]

    def remove(self, first: int, last: int | None = None) -> None:
        """Take the integers from `first` to `last` out."""
        end = first if last is None else last
        low = bisect_left(self._lasts, first)
        high = bisect_right(self._firsts, end)
        if low >= high:
            return
        kept = []
        if self._firsts[low] < first:
            kept.append((self._firsts[low], first - 1))
        if self._lasts[high - 1] > end:
            kept.append((end + 1, self._lasts[high - 1]))
        self._firsts[low:high] = [run[0] for run in kept]
        self._lasts[low:high] = [run[1] for run in kept]

    def __contains__(self, number: int) -> bool:
        at = bisect_left(self._lasts, number)
        return at < len(self._lasts) and self._firsts[at] <= number

    def __iter__(self) -> Iterator[int]:
        for first, last in self.runs():
            yield from range(first, last + 1)

    def __len__(self) -> int:
        return sum(self._lasts) - sum(self._firsts) + len(self._firsts)

    def __bool__(self) -> bool:
        return bool(self._firsts)

    def runs(self) -> list[tuple[int, int]]:
        """The runs, in order."""
        return list(zip(self._firsts, self._lasts, strict=True))

    def end_of_run(self, number: int) -> int:
        """The last integer of the contiguous run that begins at or holds `number`; `number - 1` if none."""
        at = bisect_left(self._lasts, number)
        if at < len(self._lasts) and self._firsts[at] <= number:
            return self._lasts[at]
        return number - 1

    def gaps(self, first: int, last: int) -> list[tuple[int, int]]:
        """The runs between `first` and `last`, both included, that are not in the set."""
        found, at = [], first
        low = bisect_left(self._lasts, first)
        for index in range(low, len(self._firsts)):
            if self._firsts[index] > last:
                break
            if self._firsts[index] > at:
                found.append((at, self._firsts[index] - 1))
            at = self._lasts[index] + 1
        if at <= last:
            found.append((at, last))
        return found
