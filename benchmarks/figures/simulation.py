"""How many seeds of the simulated world a second buys: the price of looking for rare bugs.

The scenario is the small log of the test kit: four writers, twenty appends each, by compare-and-set on one
object of the simulated store, with reads in between and the whole history checked at the end. Once as it is
tested, with faults and crashes, once without. A rate, not a ratio: there is nothing to compare it with, so
the rate per second of processor time stands beside it, which a busy machine changes little.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count

from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, Figure, Measure, Sample, Variant, Variants, at_least
from benchmarks.harness.timing import variant
from forebay.testing import Faults
from forebay.testing.scenarios import CasLogScenario, run_cas_log

__all__ = ["simulation"]

FAULTY = CasLogScenario(writers=4, appends=20)
CALM = CasLogScenario(writers=4, appends=20, faults=Faults(), crash_rate=0.0)


@suite.benchmark(
    "simulation",
    "A second buys many seeds of four writers with twenty appends each.",
    Figure("seeds per second", of="calm", measure=Measure.PLAIN, target=at_least(50)),
    Figure("with faults and crashes", of="faulty", measure=Measure.PLAIN, target=at_least(50)),
    Figure("with faults, per second of processor time", of="faulty, processor time", measure=Measure.PLAIN),
)
def simulation(bench: Bench) -> Iterator[Variants]:
    """A new seed every time; a seed that shows a problem would end the run."""
    seeds = count()

    def run(scenario: CasLogScenario) -> int:
        result = run_cas_log(next(seeds), scenario)
        assert not result.problems, result.problems
        return 1

    def per_processor_second(seconds: float) -> Sample:
        begin = now = time.process_time()
        units = 0
        while now < begin + seconds:
            units += run(FAULTY)
            now = time.process_time()
        return Sample(units / (now - begin))

    yield {
        "calm": variant(lambda: run(CALM), "seeds/s"),
        "faulty": variant(lambda: run(FAULTY), "seeds/s"),
        "faulty, processor time": Variant(per_processor_second, "seeds/s"),
    }
