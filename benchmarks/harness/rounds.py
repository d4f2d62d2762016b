"""Turns: a round is cut into slices; each variant has its turn in each, one slice there and the next back.

Two variants measured one after the other on a shared disk can swap places between two runs. A disk may be ten
times faster in one second than in the next, so a round takes its samples from several short turns that
alternate between the variants, and only their sums make a ratio. Going back through the list in every other
slice gives each variant both neighbours: whoever follows a noisy one does not always follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from gc import collect

from benchmarks.harness.figure import Sample, joined
from benchmarks.harness.suite import Variants

__all__ = ["FULL", "QUICK", "Plan", "measure", "order"]

WARM_UP_SHARE = 0.2
"""Part of a turn that each variant runs before the first round, unmeasured: caches, connections, imports."""

JOB_ROUNDS_MAX = 5
"""Rounds of a benchmark whose turns are whole jobs."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    rounds: int
    """Turns of every variant. At least 1; odd, so that the median is a sample."""
    seconds: float
    """How long each variant works in a round; some variants stretch it."""
    slices: int = 1
    """Turns that make up those seconds. At least 1."""

    def of_jobs(self) -> Plan:
        """For turns that are whole jobs of seconds, however little is asked for: fewer and in one piece."""
        return Plan(min(self.rounds, JOB_ROUNDS_MAX), self.seconds / self.slices)


FULL = Plan(rounds=9, seconds=0.75, slices=3)
QUICK = Plan(rounds=3, seconds=0.25)


def order(names: Sequence[str], index: int) -> list[str]:
    """Who comes when in slice `index`, counted through all rounds."""
    return list(names) if index % 2 == 0 else list(reversed(names))


def measure(
    variants: Variants, plan: Plan, advance: Callable[[], None] = lambda: None
) -> list[dict[str, Sample]]:
    """The samples, a dictionary per round. `advance` is called after every turn."""
    for variant in variants.values():
        variant.run(plan.seconds * WARM_UP_SHARE)
    rounds: list[dict[str, Sample]] = []
    for index in range(plan.rounds):
        slices: dict[str, list[Sample]] = {name: [] for name in variants}
        for slice_index in range(plan.slices):
            for name in order(list(variants), index * plan.slices + slice_index):
                # What one variant leaves behind is not to be swept up at the cost of the next.
                collect()
                slices[name].append(variants[name].run(plan.seconds * variants[name].stretch / plan.slices))
                advance()
        rounds.append({name: joined(samples) for name, samples in slices.items()})
    return rounds
