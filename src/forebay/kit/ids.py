"""Identity as a part that is handed in: sortable names and unguessable-enough tokens.

A ULID is 48 bits of milliseconds and 80 random bits, written as 26 letters of Crockford's alphabet, so that
names sort by the time they were made. Ours are strictly increasing within one source, also when many threads
ask at once and when the clock steps back: within the same or an earlier millisecond the last value grows by
one. The published packages promise this for a single thread and a clock that never steps.

Two consequences. After a step far forward and back again, new ids keep the far time until the clock has
caught up: order is promised, the time inside is the highest one the source has seen. And a millisecond cannot
run out: a fresh one leaves the top random bit unset, which is room for 2**79 more ids, and beyond that the
count would carry into the time, which is still in order. Only after the very last ULID is there nothing left.

A forked child inherits its parent's last id. Counting on from there would repeat what the parent makes in the
same millisecond, so the child takes a random leap first.
"""

from __future__ import annotations

import os
import random
import threading
import weakref

from forebay.errors import UsageError
from forebay.kit.clock import Clock, SystemClock

__all__ = ["ULID_LENGTH", "IdSource", "ulid_time_ms"]

ULID_LENGTH = 26
"""Letters of a ULID."""
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_VALUES = {letter: value for value, letter in enumerate(_ALPHABET)}
_VALUES |= {letter.lower(): value for letter, value in _VALUES.items()}
_PAIRS = [high + low for high in _ALPHABET for low in _ALPHABET]
_TIME_LETTERS = 10
_RANDOM_BITS = 80
_TIME_MS_MAX = (1 << 48) - 1
_ULID_MAX = (1 << 128) - 1
# A fresh millisecond leaves the top random bit unset: room to count up without carrying into the time.
_FRESH_BITS = _RANDOM_BITS - 1
# Of a UUID's 128 bits, 48 to 51 say version 4 and 64 and 65 say variant 1; the others are free.
_UUID_FIXED = 4 << 76 | 0b10 << 62
_UUID_FREE = (1 << 128) - 1 - (0xF << 76) - (0b11 << 62)


class IdSource:
    """Makes ids from a clock and a source of randomness. Safe to share between threads.

    The default randomness is the operating system's, so that forked processes do not repeat each other.
    """

    def __init__(self, clock: Clock | None = None, randomness: random.Random | None = None) -> None:
        self._clock = clock or SystemClock()
        self._random = randomness or random.SystemRandom()
        self._lock = threading.Lock()
        self._last = -1
        _sources.add(self)

    def ulid(self) -> str:
        """A new ULID, higher than every one this source made before."""
        time_ms = min(max(self._clock.now_ms(), 0), _TIME_MS_MAX)
        with self._lock:
            if time_ms > self._last >> _RANDOM_BITS:
                self._last = time_ms << _RANDOM_BITS | self._random.getrandbits(_FRESH_BITS)
            elif self._last < _ULID_MAX:
                self._last += 1
            else:
                raise UsageError("there is no higher ULID", hint="set the clock: it stood in the year 10889")
            value = self._last
        return _text(value)

    def token(self) -> str:
        """32 hexadecimal digits that no other write carries."""
        with self._lock:
            return f"{self._random.getrandbits(128):032x}"

    def uuid(self) -> str:
        """A random UUID (RFC 4122, version 4) in its usual text, for names that a specification calls so."""
        with self._lock:
            bits = self._random.getrandbits(128)
        digits = f"{bits & _UUID_FREE | _UUID_FIXED:032x}"
        return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"

    def _leap_after_fork(self) -> None:
        # A thread that is not part of the child may have held the lock.
        self._lock = threading.Lock()
        if self._last >= 0:
            self._last = min(self._last + self._random.getrandbits(_FRESH_BITS), _ULID_MAX)


_sources: weakref.WeakSet[IdSource] = weakref.WeakSet()


def _leap_all_after_fork() -> None:
    for source in _sources:
        source._leap_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leap_all_after_fork)


def ulid_time_ms(ulid: str) -> int:
    """The milliseconds inside a ULID, in upper or lower case. Raises `UsageError` where it is none."""
    # Ten letters hold 50 bits, two more than the time: above 7 the first one would not fit.
    if len(ulid) != ULID_LENGTH or not _VALUES.keys() >= set(ulid) or ulid[0] > "7":
        raise UsageError(
            f"{ulid[:100]!r} is not a ULID",
            hint=f"a ULID has {ULID_LENGTH} digits and letters without I, L, O, U, the first of them 0 to 7",
        )
    value = 0
    for letter in ulid[:_TIME_LETTERS]:
        value = value << 5 | _VALUES[letter]
    return value


def _text(value: int) -> str:
    return "".join([_PAIRS[value >> shift & 1023] for shift in range(120, -1, -10)])
