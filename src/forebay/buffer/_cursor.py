"""Where a consumer stands: what it handed out, what was acknowledged, what the manifest still holds.

    dequeued <= acked <= handed out        (each is the last sequence, None before the first)

Acknowledgements come one after the other, from the very first one, and never for more than was handed out.
Batches that the consumer skips by policy (their object is gone, or they came before) are handed out and
acknowledged by nobody; they count as acknowledged as soon as everything before them is.

Plain state without any waiting: a failed request changes nothing here, so that it can be repeated.
"""

from __future__ import annotations

from collections import OrderedDict

from forebay.buffer._errors import AckOutOfOrder

__all__ = ["Cursor", "Locations"]


class Cursor:
    """See the module."""

    def __init__(self, last_acked: int | None) -> None:
        self.handed_out = last_acked
        """Last sequence handed out."""
        self.acked = last_acked
        """Last sequence acknowledged, skipped ones included."""
        self.dequeued = last_acked
        """Last sequence that is known to be out of the manifest by our own doing."""
        self._first: int | None = None
        self._skipped: set[int] = set()

    def hand_out(self, sequence: int) -> None:
        """A batch leaves."""
        if self._first is None:
            self._first = sequence
        self.handed_out = sequence

    def skip(self, sequence: int) -> None:
        """A batch is passed over."""
        self.hand_out(sequence)
        self._skipped.add(sequence)
        self._pass_skipped()

    @property
    def expected(self) -> int | None:
        """The one sequence that may be acknowledged now, if any."""
        following = self._first if self.acked is None else self.acked + 1
        if following is None or self.handed_out is None or following > self.handed_out:
            return None
        return following

    def check(self, sequence: int, *, through: bool = False) -> None:
        """Raise `AckOutOfOrder` unless `sequence` (or everything up to it) may be acknowledged now."""
        expected = self.expected
        if expected is None or self.handed_out is None:
            raise AckOutOfOrder(expected=None, got=sequence)
        if sequence != expected and not (through and expected <= sequence <= self.handed_out):
            raise AckOutOfOrder(expected=expected, got=sequence)

    def ack(self, sequence: int) -> int:
        """Everything up to `sequence` is acknowledged; how many batches that are."""
        expected = self.expected
        assert expected is not None, "check first"
        count = sequence + 1 - expected
        self.acked = sequence
        self._skipped = {skipped for skipped in self._skipped if skipped > sequence}
        self._pass_skipped()
        return count

    def _pass_skipped(self) -> None:
        while (following := self._first if self.acked is None else self.acked + 1) in self._skipped:
            self._skipped.discard(following)
            self.acked = following

    def pending(self, acked: int | None) -> int:
        """Batches that would be acknowledged and still in the manifest if `acked` were the last one."""
        if acked is None:
            return 0
        start = self.dequeued if self.dequeued is not None else (self._first or 0) - 1
        return max(0, acked - start)


class Locations:
    """The locations seen last, to notice one that comes again."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._seen: OrderedDict[str, int] = OrderedDict()

    def first(self, location: str, sequence: int) -> int | None:
        """The sequence under which `location` was seen before, or None. Remembers it."""
        found = self._seen.setdefault(location, sequence)
        self._seen.move_to_end(location)
        while len(self._seen) > self._size:
            self._seen.popitem(last=False)
        return None if found == sequence else found
