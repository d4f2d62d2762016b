"""Turns: every variant once per round, one round there and the next one back.

Two variants measured one after the other on a shared disk can swap places between two runs. Turns of less
than a second spread a busy moment over all of them, and going back through the list in every other round
gives each variant both neighbours: whoever follows a noisy one does not always follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from gc import collect

from benchmarks.harness.figure import Sample
from benchmarks.harness.suite import Variants

__all__ = ["FULL", "QUICK", "Plan", "measure", "order"]

WARM_UP_SHARE = 0.2
"""Part of a turn that each variant runs before the first round, unmeasured: caches, connections, imports."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    rounds: int
    """Turns of every variant. At least 1; odd, so that the median is a sample."""
    seconds: float
    """Length of a turn; some variants stretch it."""


FULL = Plan(rounds=9, seconds=0.7)
QUICK = Plan(rounds=3, seconds=0.25)


def order(names: Sequence[str], index: int) -> list[str]:
    """Who comes when in round `index`."""
    return list(names) if index % 2 == 0 else list(reversed(names))


def measure(
    variants: Variants, plan: Plan, advance: Callable[[], None] = lambda: None
) -> list[dict[str, Sample]]:
    """The samples, a dictionary per round. `advance` is called after every turn."""
    for variant in variants.values():
        variant.run(plan.seconds * WARM_UP_SHARE)
    rounds: list[dict[str, Sample]] = []
    for index in range(plan.rounds):
        samples: dict[str, Sample] = {}
        for name in order(list(variants), index):
            # What one variant leaves behind is not to be swept up at the cost of the next.
            collect()
            samples[name] = variants[name].run(plan.seconds * variants[name].stretch)
            advance()
        rounds.append(samples)
    return rounds
