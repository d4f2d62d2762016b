"""How much disk an instance may use: alone, or as one of several on one directory.

**Static.** `OwnBudget`: a fixed number of bytes; N instances get a share each and know nothing of each other.

**Shared.** `SharedBudget`: one cap for all. Each core publishes its use in a slot of a small mapped file and
reads those of the others; a slot has one writer, so there is no lock, and a core that is stuck holds up
nobody. Rules, in the order in which they are looked at:

1. Every core may always have its *reserve*, what its logs and two segments need. It is kept free for those
   that do not use it, so a hot core never shuts a quiet one out.
2. What is left of the cap goes to whoever needs it: an idle core's share is not wasted.
3. While a core below its even share is short of space, cores above theirs are held to it: under `drop_oldest`
   they drop their own oldest data, under `backpressure` they take nothing new until their readers catch up.
4. While anybody is short of space, nobody keeps processed segments (`headroom_bytes`) or spare WAL files.

**Overshoot.** A core publishes what it will need before it looks at the sum, and takes it back if that is too
much. Two that ask at the same moment may both be refused, and never both be let in. What remains is the
difference between the estimate of an open segment and its file: less than a segment per finalizing core.

    the file: 64 bytes per core, little-endian
    0    8    bytes in use or promised
    8    8    short of space until, milliseconds since the epoch
    16   8    whether it is below its even share (1) while it is short
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Final, Protocol

from forebay.errors import UsageError
from forebay.kit.clock import Clock

__all__ = ["CORES_MAX", "Budget", "OwnBudget", "SharedBudget"]

CORES_MAX: Final = 256
"""Instances on one directory."""
_SLOT_WORDS: Final = 8
_SHORT_MS: Final = 5_000
"""For how long one refusal counts: others look at it once per maintenance pass."""


class Budget(Protocol):
    """Says yes or no to bytes on disk."""

    def is_over(self, bytes_: int) -> bool:
        """Whether an instance that uses, or will use, so many bytes uses too many."""
        ...

    def publish(self, bytes_: int) -> None:
        """Tell how many bytes are in use."""
        ...

    def refused(self) -> None:
        """A batch was refused, or data had to be dropped."""
        ...

    @property
    def is_short(self) -> bool:
        """Whether somebody else needs what this instance could spare."""
        ...

    @property
    def cap_bytes(self) -> int:
        """What the share of use is measured against."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class OwnBudget:
    """A number of bytes for one instance."""

    def __init__(self, cap_bytes: int) -> None:
        self.cap_bytes = cap_bytes
        self.is_short = False

    def is_over(self, bytes_: int) -> bool:
        """Above the cap."""
        return bytes_ > self.cap_bytes

    def publish(self, bytes_: int) -> None:
        """Nobody asks."""

    def refused(self) -> None:
        """Nobody can help."""

    def close(self) -> None:
        """Nothing to let go of."""


class SharedBudget:
    """See the module. `reserve_bytes` times `cores` must fit into the cap."""

    def __init__(
        self, path: Path, *, core: int, cores: int, cap_bytes: int, reserve_bytes: int, clock: Clock
    ) -> None:
        if not 0 <= core < CORES_MAX or not 1 <= cores <= CORES_MAX:
            raise UsageError(f"core {core} of {cores}", hint=f"at most {CORES_MAX} cores")
        if reserve_bytes * cores > cap_bytes:
            raise UsageError(
                f"{cores} cores do not fit into {cap_bytes:,} bytes",
                hint=f"each needs {reserve_bytes:,}: fewer cores, or a larger size_cap_bytes",
            )
        self.cap_bytes = cap_bytes
        self._core, self._cores, self._reserve, self._clock = core, cores, reserve_bytes, clock
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            size = CORES_MAX * _SLOT_WORDS * 8
            # A hole in a mapped file gets its space when it is written to, and on a full disk that ends the
            # process. This fills holes and makes the file long enough; what is in it stays.
            os.posix_fallocate(descriptor, 0, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        # What its own slot says stays until the store is open: it may be that of a process that has it open.
        self._words = memoryview(self._map).cast("Q")

    @property
    def _fair(self) -> int:
        return self.cap_bytes // self._cores

    def is_over(self, bytes_: int) -> bool:
        """Publishes the bytes first; the caller publishes the smaller number again where it gives up."""
        self.publish(bytes_)
        if bytes_ <= self._reserve:
            return False
        if bytes_ > self._fair and self._someone_is_short(below_share=True):
            return True
        used = self._words[::_SLOT_WORDS].tolist()
        used[self._core] = 0
        kept = [max(each, self._reserve) for each in used[: self._cores]]
        if self._core < self._cores:
            kept[self._core] = 0
        return sum(kept) + sum(used[self._cores :]) + bytes_ > self.cap_bytes

    def publish(self, bytes_: int) -> None:
        """One word, written at once."""
        self._words[self._core * _SLOT_WORDS] = bytes_

    def refused(self) -> None:
        """Let the others know for some seconds."""
        at = self._core * _SLOT_WORDS
        self._words[at + 2] = int(self._words[at] <= self._fair)
        self._words[at + 1] = self._clock.now_ms() + _SHORT_MS

    @property
    def is_short(self) -> bool:
        """Whether another core was refused lately."""
        return self._someone_is_short(below_share=False)

    def _someone_is_short(self, *, below_share: bool) -> bool:
        now = self._clock.now_ms()
        for core, until in enumerate(self._words[1::_SLOT_WORDS].tolist()):
            # A moment far ahead was written by a clock that was wrong.
            is_short = core != self._core and now < until <= now + 2 * _SHORT_MS
            if is_short and (not below_share or self._words[core * _SLOT_WORDS + 2]):
                return True
        return False

    def forget_absent(self, present: set[int]) -> None:
        """Clear what the file says of cores without files. It has no checksum, and nobody else would."""
        for core in set(range(CORES_MAX)) - present - {self._core}:
            self._words[core * _SLOT_WORDS] = 0
            self._words[core * _SLOT_WORDS + 1] = 0

    def forget(self) -> None:
        """The instance has no files any more."""
        self.publish(0)
        self._words[self._core * _SLOT_WORDS + 1] = 0

    def close(self) -> None:
        """The slot stays: the files do."""
        self._words.release()
        self._map.close()
