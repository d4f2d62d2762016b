"""What a figure is: a number made from the samples of one round, and the target it is held against.

The ratio is taken inside a round, between samples that are seconds apart, and only then is the median taken
over the rounds. The other way round, the median of the rates first, would compare a quiet minute of one
variant with a busy minute of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = ["Figure", "Measure", "Sample", "Target", "at_least", "at_most", "joined"]


@dataclass(frozen=True, slots=True)
class Sample:
    """What one variant did in one round."""

    rate: float
    """Units per second, of all processes together."""
    shares: tuple[float, ...] = ()
    """Units per second of each process, where several shared the work."""
    cpu_us: float | None = None
    """Microseconds of processor time per unit, of all processes together; None where nobody looked."""


def joined(samples: Sequence[Sample]) -> Sample:
    """Slices of equal length as one sample: sums over sums, not a mean of ratios."""
    rate = _mean([sample.rate for sample in samples])
    shares = tuple(_mean(shares) for shares in zip(*[sample.shares for sample in samples], strict=True))
    spent = [sample.cpu_us * sample.rate for sample in samples if sample.cpu_us is not None]
    known = len(spent) == len(samples) and rate > 0
    return Sample(rate, shares, sum(spent) / (rate * len(samples)) if known else None)


class Measure(Enum):
    """How a figure is made from the samples of one round."""

    RATE = "rate"
    """Rate of the variant over rate of what it is compared with: higher is better."""
    TIME = "time"
    """Time per unit over the time per unit of what it is compared with: lower is better."""
    CPU = "cpu"
    """Processor time per unit over that of what it is compared with: lower is better, and busy neighbours
    disturb it less than time."""
    LEAST_SHARE = "least share"
    """The least lucky process over the mean of all of them: 1 is fair, 0 is starved."""
    PLAIN = "plain"
    """The rate itself. For targets that are absolute; the machine decides, so mistrust it."""


@dataclass(frozen=True, slots=True)
class Target:
    """A bound that a figure is held against."""

    bound: float
    is_most: bool = False
    """True where lower is better."""

    def is_met(self, value: float) -> bool:
        """Whether the value keeps the bound."""
        return value <= self.bound if self.is_most else value >= self.bound

    def margin(self, value: float) -> float:
        """How many times better than asked: 1 is just met, 0.5 is half of it."""
        if value <= 0:
            return 0.0
        return self.bound / value if self.is_most else value / self.bound

    def __str__(self) -> str:
        return f"{'<=' if self.is_most else '>='} {self.bound:g}"


def at_least(bound: float) -> Target:
    """Higher is better."""
    return Target(bound)


def at_most(bound: float) -> Target:
    """Lower is better."""
    return Target(bound, is_most=True)


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table."""

    name: str
    of: str
    """Name of the variant it is about."""
    against: str = ""
    """Name of the variant it is compared with; empty for a least share and a plain rate."""
    target: Target | None = None
    """None: shown for orientation, nobody promised anything."""
    measure: Measure = Measure.RATE

    def value(self, samples: Mapping[str, Sample]) -> float:
        """The figure of one round."""
        of = samples[self.of]
        if self.measure is Measure.PLAIN:
            return of.rate
        if self.measure is Measure.LEAST_SHARE:
            return _over(min(of.shares, default=0.0), _mean(of.shares))
        against = samples[self.against]
        if self.measure is Measure.CPU:
            if of.cpu_us is None or against.cpu_us is None:
                raise ValueError(f"{self.name}: nobody looked at the processor time")
            return _over(of.cpu_us, against.cpu_us)
        if self.measure is Measure.TIME:
            return _over(against.rate, of.rate)
        return _over(of.rate, against.rate)

    def variants(self) -> tuple[str, ...]:
        """The variants it needs."""
        return (self.of, self.against) if self.against else (self.of,)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _over(value: float, base: float) -> float:
    # Where the base did nothing at all there is no ratio; zero reads as a miss, which it is.
    return value / base if base > 0 else 0.0
