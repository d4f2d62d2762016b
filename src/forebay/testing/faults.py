"""What can go wrong between an actor and a service, how often, and how long everything takes.

The kinds, by what the caller may conclude:

    kind        took effect?    the caller sees          for
    before      no              Unavailable              all
    throttle    no              Unavailable, quickly     all
    reset       -               Unavailable, late        reads
    after       yes             OutcomeUnknown           writes
    lost        no              OutcomeUnknown           writes
    late        afterwards      OutcomeUnknown           writes
    duplicate   twice           the first answer         writes
    slow        as without      the answer, much later   all

`after`, `lost` and `late` are one and the same to the caller, and that is the point: an engine that guesses
is wrong in one of the three.

Real tenants resolve most lost replies by reading back before they answer. The simulated ones never do, so an
engine meets here every `OutcomeUnknown` that it could ever meet.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Protocol, TypeAlias

__all__ = [
    "FAULT_KINDS",
    "INSTANT",
    "S3_LIKE",
    "Constant",
    "FaultSchedule",
    "Faults",
    "Latencies",
    "Latency",
    "LogNormal",
    "Rate",
    "Uniform",
]

Rate: TypeAlias = float | Mapping[str, float]
"""A probability from 0 to 1, or one per operation; `"*"` stands for the operations that are not named."""

_ERRORS_OF_ALL = ("before", "throttle")
_ERRORS_OF_READS = ("reset",)
_ERRORS_OF_WRITES = ("after", "lost", "late")
FAULT_KINDS = (*_ERRORS_OF_ALL, *_ERRORS_OF_READS, *_ERRORS_OF_WRITES, "duplicate", "slow")
"""Every kind of fault, in the order of the table above."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The faults of one operation, ready to be drawn from."""

    errors: tuple[tuple[float, str], ...]
    """Upper ends of the intervals of [0, 1) that belong to each kind of error."""
    duplicate: float
    slow: float


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities per request. None by default."""

    before: Rate = 0.0
    """An error before any effect."""
    throttle: Rate = 0.0
    """Turned away at once: too many requests."""
    reset: Rate = 0.0
    """The connection ends in the middle of the answer to a read."""
    after: Rate = 0.0
    """Done, but the answer is lost."""
    lost: Rate = 0.0
    """The request is lost and never has an effect, but the caller cannot know."""
    late: Rate = 0.0
    """The caller gives up first, the effect comes afterwards."""
    duplicate: Rate = 0.0
    """The same request arrives once more, later, and is decided anew."""
    slow: Rate = 0.0
    """The request takes `slow_factor` times as long."""
    slow_factor: float = 20.0
    """How much longer a slow request takes. At least 1."""
    late_ms_max: float = 3_000.0
    """Most milliseconds between an answer and the late or second arrival of its request. Above 0."""

    def __post_init__(self) -> None:
        for kind in FAULT_KINDS:
            rate = getattr(self, kind)
            for value in rate.values() if isinstance(rate, Mapping) else (rate,):
                if not 0 <= value <= 1:
                    raise ValueError(f"{kind}={value} is not a probability")
        if self.slow_factor < 1 or self.late_ms_max <= 0:
            raise ValueError("slow_factor is at least 1, late_ms_max above 0")

    @classmethod
    def all(cls, rate: float) -> Faults:
        """Every kind at the same rate. (Errors exclude each other, so their rates add up.)"""
        return cls(**dict.fromkeys(FAULT_KINDS, rate))

    def only(self, *kinds: str) -> Faults:
        """The same rates for these kinds, none for the others."""
        for kind in kinds:
            if kind not in FAULT_KINDS:
                raise ValueError(f"{kind!r} is not one of {', '.join(FAULT_KINDS)}")
        return replace(self, **{kind: 0.0 for kind in FAULT_KINDS if kind not in kinds})

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that can happen."""
        return tuple(kind for kind in FAULT_KINDS if _possible(getattr(self, kind)))

    def rate(self, kind: str, operation: str) -> float:
        """The probability of one kind for one operation."""
        rate = getattr(self, kind)
        if isinstance(rate, Mapping):
            return float(rate.get(operation, rate.get("*", 0.0)))
        return float(rate)

    def plan(self, operation: str, *, write: bool) -> Plan | None:
        """What to draw from for one operation. None: nothing can go wrong."""
        errors: list[tuple[float, str]] = []
        total = 0.0
        for kind in _ERRORS_OF_ALL + (_ERRORS_OF_WRITES if write else _ERRORS_OF_READS):
            rate = self.rate(kind, operation)
            if rate:
                total += rate
                errors.append((total, kind))
        duplicate = self.rate("duplicate", operation) if write else 0.0
        slow = self.rate("slow", operation)
        return Plan(tuple(errors), duplicate, slow) if errors or duplicate or slow else None


NO_FAULTS = Faults()


def _possible(rate: Rate) -> bool:
    return any(rate.values()) if isinstance(rate, Mapping) else bool(rate)


class FaultSchedule:
    """Which faults hold at which time.

    With `rotate_s`, a random subset of the kinds holds for each period of that many virtual seconds, and none
    at all in a share `quiet` of them. The subset is a function of seed and period, so it takes no timer.
    """

    def __init__(self, faults: Faults, *, seed: str = "", rotate_s: float = 0.0, quiet: float = 0.25) -> None:
        if rotate_s < 0 or not 0 <= quiet <= 1:
            raise ValueError("rotate_s is not negative, quiet a share from 0 to 1")
        self._faults = faults
        self._seed = seed
        self._rotate_s = rotate_s
        self._quiet = quiet
        self._period = -1
        self._current = NO_FAULTS

    def at(self, now: float) -> Faults:
        """The faults at a virtual time. The same object as long as they do not change."""
        if not self._rotate_s:
            return self._faults
        period = int(now / self._rotate_s)
        if period != self._period:
            self._period = period
            self._current = self._pick(period)
        return self._current

    def _pick(self, period: int) -> Faults:
        draw = random.Random(f"{self._seed}/{period}")
        kinds = self._faults.kinds
        if not kinds or draw.random() < self._quiet:
            return NO_FAULTS
        return self._faults.only(*draw.sample(kinds, draw.randint(1, len(kinds))))


class Latency(Protocol):
    """How long something takes."""

    def sample(self, randomness: random.Random) -> float:
        """Seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """Always the same."""

    ms: float = 0.0
    """Milliseconds, 0 or more."""

    def sample(self, randomness: random.Random) -> float:
        """Seconds."""
        return self.ms / 1000


@dataclass(frozen=True, slots=True)
class Uniform:
    """Anywhere between two bounds."""

    low_ms: float
    """Milliseconds, 0 or more."""
    high_ms: float
    """Milliseconds, at least `low_ms`."""

    def sample(self, randomness: random.Random) -> float:
        """Seconds."""
        return (self.low_ms + (self.high_ms - self.low_ms) * randomness.random()) / 1000


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Mostly near the median, sometimes far above it: what stores really do."""

    median_ms: float
    """Milliseconds, above 0."""
    sigma: float = 0.35
    """Width. With 0.35 one request in a hundred takes more than 2.3 times the median."""
    max_ms: float = 30_000.0
    """Nothing takes longer, in milliseconds."""

    def sample(self, randomness: random.Random) -> float:
        """Seconds."""
        return min(self.median_ms * math.exp(self.sigma * randomness.gauss(0.0, 1.0)), self.max_ms) / 1000


@dataclass(frozen=True, slots=True)
class Latencies:
    """How long each operation of a service takes, and when in that time the service decides."""

    default: Latency = Uniform(5, 30)
    """For operations that are not named."""
    operations: Mapping[str, Latency] = field(default_factory=dict)
    """By operation."""
    decides_at: float | None = None
    """When a request takes effect, as a share of its latency: 0 on arrival, 1 just before the answer, None
    anywhere, drawn for each request."""

    def __post_init__(self) -> None:
        if self.decides_at is not None and not 0 <= self.decides_at <= 1:
            raise ValueError("decides_at is a share from 0 to 1, or None")

    def of(self, operation: str) -> Latency:
        """The latency of one operation."""
        return self.operations.get(operation, self.default)


INSTANT = Latencies(Constant(0), decides_at=1.0)
"""No time passes. Calls still take turns."""
S3_LIKE = Latencies(
    LogNormal(25),
    {"put": LogNormal(60), "delete": LogNormal(40), "list": LogNormal(50)},
    decides_at=1.0,
)
"""An object store in the same region: 60 ms for a put, which wins or loses at its end, 25 ms for a get."""

assert {item.name for item in fields(Faults)} >= set(FAULT_KINDS)
