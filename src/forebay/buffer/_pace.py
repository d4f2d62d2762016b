"""When to try: how producers that know nothing of each other share one object that takes one write at a time.

A compare-and-set of the manifest takes as long as a put, and of all that are under way at once one wins. If
everybody tries again at once, as many requests are spent per success as there are producers; whoever just won
knows the newest version and wins again; and some wait for seventy rounds.

So producers take turns. The manifest itself tells how many there are: of the entries that were added since
our last success, some are ours, and all of them over ours is the number of producers as busy as we are. After
a success we let as many writes pass as there are others, and further batches gather meanwhile. Successes are
apart by at least one write, since the manifest takes one at a time; everybody waits for about the same time;
so the next tries are apart as well. Each producer finds a slot of its own without a word. That is also why
this wait is not varied at random. A lone producer sees only its own entries and never waits.

Both counts are sums over several successes, older ones weighing less. One success alone tells too little: a
producer that loses a few times enqueues nothing, and if the other took that for its absence it would not wait
any more, and win for good. What came while we had nothing to enqueue tells nothing of our share and is left
out.

How long a look and a write take is the median of the last few: a store that stalls for seconds now and then,
as some do over writes that overlap, must not teach everybody to pause for seconds.

After a conflict the wait is drawn at random, which is how free slots are found, below a ceiling that falls
with the age of the oldest batch: whoever has waited longest tries first. Waits after errors are those of the
retry policy.
"""

from __future__ import annotations

import random
from collections import deque
from statistics import median
from typing import Final

from forebay.errors import ForebayError, PreconditionFailed
from forebay.kit.clock import Clock
from forebay.kit.retry import RetryPolicy

__all__ = ["Pace"]

PERIOD_S_MAX: Final = 2.0
"""Longest time from a success to the next try, however many producers there are."""
CROWD_MIN: Final = 1.2
"""Producers, as estimated, from which on there is anybody to wait for."""
MARGIN: Final = 1.3
"""Time of a slot over the time of a look and a write."""
CROWD_FEARED: Final = 4
"""Producers that a conflict makes us reckon with before the manifest has told."""
CROWD_MAX: Final = 64.0
"""Producers that are reckoned with at most: a queue that jumped while we were away has not as many."""
TIMES_KEPT: Final = 9
"""Looks and writes whose times count."""
TIME_S_MIN: Final = 1e-4
"""What a look or a write takes at least: a store in memory needs no time that a clock shows."""
PATIENCE: Final = 4.0
"""How much longer than usual a write may take before somebody looks what became of it."""
PATIENCE_S_MIN: Final = 0.05
"""Seconds that it may take in any case."""
IDLE_CROWD: Final = 2.0
"""Producers that are reckoned with after a time without commits, if there were several before."""
_KEEP: Final = 0.8
"""What a count of entries still weighs one success later."""
_EAGERNESS, _YOUTH = 0.3, 3.0
"""Ceiling of the wait after a conflict, in writes: of whoever waited for a whole round, and what is added for
somebody who just came."""


class Pace:
    """The pace of one producer on one queue."""

    def __init__(self, clock: Clock, randomness: random.Random) -> None:
        self._clock = clock
        self._random = randomness
        self._reads = deque([0.02], TIMES_KEPT)
        self._writes = deque([0.05], TIMES_KEPT)
        self._read_s = 0.02
        self._write_s = 0.05
        self.crowd = 1.0
        """How many producers as busy as this one there seem to be, itself included."""
        self._next_due = float("-inf")
        self._end: int | None = None
        self._ours = self._all = 0.0
        """Entries added by us and by everybody, older ones weighing less."""
        self._ended = float("inf")
        """When our last commit ended."""

    def read_took(self, seconds: float) -> None:
        """A look at the manifest took so long."""
        self._reads.append(seconds)
        self._read_s = max(median(self._reads), TIME_S_MIN)

    def write_took(self, seconds: float) -> None:
        """A write of the manifest took so long."""
        self._writes.append(seconds)
        self._write_s = max(median(self._writes), TIME_S_MIN)

    @property
    def is_shared(self) -> bool:
        """Whether somebody else seems to be there."""
        return self.crowd >= CROWD_MIN

    @property
    def patience_s(self) -> float:
        """Seconds after which a write has taken so long that it is worth a look what became of it."""
        return max(PATIENCE * self._write_s, PATIENCE_S_MIN)

    async def turn(self) -> None:
        """A commit begins: wait until the others had their turns."""
        if self._clock.monotonic() - self._ended > PERIOD_S_MAX:
            self.crowd = self._all = min(self.crowd, IDLE_CROWD)
            self._ours, self._end = 1.0, None
        wait = self._next_due - self._clock.monotonic()
        if wait > 0:
            await self._clock.sleep(wait)

    def is_stale(self, seen_at: float) -> bool:
        """Whether somebody else has probably written since then."""
        return self.is_shared and self._clock.monotonic() - seen_at > self._write_s / 2

    def succeeded(self, sequence: int, count: int) -> None:
        """A commit put `count` batches at `sequence`."""
        since = sequence if self._end is None else self._end
        self._end = sequence + count
        self._ours = _KEEP * self._ours + count
        self._all = _KEEP * self._all + min(self._end - since, CROWD_MAX * count)
        self.crowd = self._all / self._ours
        slot_s = MARGIN * (self._read_s + self._write_s)
        others_s = slot_s * (self.crowd - 1) if self.is_shared else 0.0
        self._ended = self._clock.monotonic()
        self._next_due = self._ended + min(others_s, PERIOD_S_MAX)

    def saw(self, next_sequence: int, waiting: int) -> None:
        """The manifest was read while `waiting` batches of ours are to be enqueued."""
        if self._end is None:
            self._end = next_sequence
        seen = min(waiting + next_sequence - self._end, CROWD_MAX * waiting)
        guess = (_KEEP * self._all + seen) / (_KEEP * self._ours + waiting)
        self.crowd = max(self.crowd, guess)

    def wait_after(
        self, problem: ForebayError, attempt: int, waiting_since: float, policy: RetryPolicy
    ) -> float:
        """Seconds to wait before the next attempt."""
        if not isinstance(problem, PreconditionFailed):
            return policy.wait_s(attempt, self._random)
        age = self._clock.monotonic() - waiting_since
        slot_s = self._read_s + self._write_s
        youth = max(0.0, 1.0 - age / (slot_s * max(self.crowd, CROWD_FEARED)))
        return self._random.uniform(0.0, self._write_s * (_EAGERNESS + _YOUTH * youth))
