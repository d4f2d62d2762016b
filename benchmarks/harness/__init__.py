"""How to measure, keep and draw. Knows nothing of what is measured."""

from benchmarks.harness.figure import Figure, Measure, Sample, Target, at_least, at_most
from benchmarks.harness.suite import Bench, Benchmark, CannotMeasure, Suite, Variant, Variants

__all__ = [
    "Bench",
    "Benchmark",
    "CannotMeasure",
    "Figure",
    "Measure",
    "Sample",
    "Suite",
    "Target",
    "Variant",
    "Variants",
    "at_least",
    "at_most",
]
