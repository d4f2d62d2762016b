"""Single counters, gauges and histograms: cheap where they are counted, nothing where they are not read.

A series is guarded by a lock of its own rather than by the interpreter's: `x += 1` from two threads is a read
and a write. The lock can be entered again by its owner, as a signal handler or a finalizer may count too.
"""

from __future__ import annotations

import bisect
import itertools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from forebay.errors import UsageError

__all__ = ["BYTES_BUCKETS", "SECONDS_BUCKETS", "Counter", "Gauge", "Histogram", "HistogramValue"]

SECONDS_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Bounds for durations: a local fsync to a long retry."""
BYTES_BUCKETS: Final = tuple(float(4**power) for power in range(4, 16))
"""Bounds for sizes: 256 B to 1 GiB in steps of four."""


class Counter:
    """A number that only grows."""

    __slots__ = ("_lock", "_value")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._value: float = 0

    def inc(self, amount: float = 1) -> None:
        """Count one, or `amount`."""
        if not amount >= 0:  # also true for NaN
            raise UsageError(f"a counter cannot grow by {amount}", hint="use a gauge for what goes both ways")
        with self._lock:
            self._value += amount

    add = inc

    @property
    def value(self) -> float:
        """What was counted so far."""
        return self._value


class Gauge:
    """A number that goes both ways, or a function that is asked for it."""

    __slots__ = ("_function", "_lock", "_value")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._value: float = 0
        self._function: Callable[[], float] | None = None

    def set(self, value: float) -> None:
        """Be `value` from now on."""
        with self._lock:
            self._function = None
            self._value = value

    def inc(self, amount: float = 1) -> None:
        """Grow by `amount`, which may be negative."""
        with self._lock:
            self._value += amount

    add = inc

    def dec(self, amount: float = 1) -> None:
        """Shrink by `amount`."""
        self.inc(-amount)

    def set_function(self, function: Callable[[], float]) -> None:
        """Ask `function` whenever the value is read. Where it raises, views leave the series out."""
        self._function = function

    @property
    def value(self) -> float:
        """The number now. Raises what the function raises."""
        function = self._function
        return self._value if function is None else function()


@dataclass(frozen=True, slots=True)
class HistogramValue:
    """A histogram at one moment."""

    bounds: tuple[float, ...]
    """Upper bounds, inclusive, ascending, without infinity."""
    cumulative: tuple[int, ...]
    """Observations at or below each bound."""
    count: int
    """Observations in all."""
    sum: float
    """Sum of what was observed."""

    def quantile(self, share: float) -> float | None:
        """Estimate, taking observations as spread evenly inside their bucket; None where there are none.

        What lies above the last bound is reported as that bound, as Prometheus does.
        """
        rank = share * self.count
        if self.count == 0:
            return None
        place = bisect.bisect_left(self.cumulative, rank)
        if place == len(self.bounds):
            return self.bounds[-1]
        below = self.cumulative[place - 1] if place else 0
        low = self.bounds[place - 1] if place else min(0.0, self.bounds[0])
        inside = self.cumulative[place] - below
        return low + (self.bounds[place] - low) * ((rank - below) / inside if inside else 1.0)


class Histogram:
    """How observations spread over buckets."""

    __slots__ = ("_bounds", "_counts", "_lock", "_sum")

    def __init__(self, bounds: tuple[float, ...] = SECONDS_BUCKETS) -> None:
        self._lock = threading.RLock()
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum: float = 0

    def observe(self, value: float) -> None:
        """Count one observation."""
        if math.isnan(value):
            raise UsageError("NaN cannot be observed", hint="it would make the sum useless for good")
        place = bisect.bisect_left(self._bounds, value)
        with self._lock:
            self._counts[place] += 1
            self._sum += value

    @property
    def value(self) -> HistogramValue:
        """All buckets at one moment."""
        with self._lock:
            running = tuple(itertools.accumulate(self._counts))
            total = self._sum
        return HistogramValue(self._bounds, running[:-1], running[-1], total)
