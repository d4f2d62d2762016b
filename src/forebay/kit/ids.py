"""Identity as a part that is handed in: sortable names and unguessable-enough tokens.

A ULID is 48 bits of milliseconds and 80 random bits, written as 26 letters of Crockford's alphabet, so that
names sort by the time they were made. Ours are strictly increasing within one source, also when many threads
ask at once and when the clock steps back: within the same or an earlier millisecond the last value grows by
one. The published packages promise this for a single thread and a clock that never steps.
"""

from __future__ import annotations

import random
import threading

from forebay.kit.clock import Clock, SystemClock

__all__ = ["ULID_LENGTH", "IdSource", "ulid_time_ms"]

ULID_LENGTH = 26
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_VALUES = {letter: value for value, letter in enumerate(_ALPHABET)}
_PAIRS = [high + low for high in _ALPHABET for low in _ALPHABET]
_RANDOM_BITS = 80
_TIME_MS_MAX = (1 << 48) - 1
# The low random bits that a fresh millisecond leaves unset at the top: room to count up without ever
# carrying into the time.
_FRESH_BITS = _RANDOM_BITS - 1


class IdSource:
    """Makes ids from a clock and a source of randomness. Safe to share between threads.

    The default randomness is the operating system's, so that forked processes do not repeat each other.
    """

    def __init__(self, clock: Clock | None = None, randomness: random.Random | None = None) -> None:
        self._clock = clock or SystemClock()
        self._random = randomness or random.SystemRandom()
        self._lock = threading.Lock()
        self._last = -1

    def ulid(self) -> str:
        """A new ULID, higher than every one this source made before."""
        time_ms = min(max(self._clock.now_ms(), 0), _TIME_MS_MAX)
        with self._lock:
            if time_ms > self._last >> _RANDOM_BITS:
                self._last = time_ms << _RANDOM_BITS | self._random.getrandbits(_FRESH_BITS)
            else:
                self._last += 1
            value = self._last
        return _text(value)

    def token(self) -> str:
        """32 hexadecimal digits that no other write carries."""
        with self._lock:
            return f"{self._random.getrandbits(128):032x}"


def ulid_time_ms(ulid: str) -> int:
    """The milliseconds inside a ULID. Raises ValueError where it is none."""
    if len(ulid) != ULID_LENGTH or ulid[0] > "7":
        raise ValueError(f"{ulid!r} is not a ULID")
    try:
        value = 0
        for letter in ulid[:10].upper():
            value = value << 5 | _VALUES[letter]
        if any(letter not in _VALUES for letter in ulid[10:].upper()):
            raise KeyError(ulid)
    except KeyError:
        raise ValueError(f"{ulid!r} is not a ULID") from None
    return value


def _text(value: int) -> str:
    return "".join([_PAIRS[value >> shift & 1023] for shift in range(120, -1, -10)])
