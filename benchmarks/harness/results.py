"""Results on disk: one JSON file per benchmark, in a folder per machine, with every raw sample.

    benchmarks/results/<machine>/<benchmark>.json
    benchmarks/results/<machine>/chart.svg
    benchmarks/results/<machine>/quick/...          short runs, not tracked

A file stands for itself: claim, targets, machine, versions, commit and load are in it, so that a table or a
chart can be drawn from files alone, also from those of another machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from benchmarks.harness.figure import Figure, Measure, Sample, Target
from benchmarks.harness.machine import Machine
from benchmarks.harness.rounds import Plan
from benchmarks.harness.suite import Benchmark, Variants

__all__ = ["SCHEMA", "BenchmarkResult", "FigureResult", "Run", "VariantResult", "load", "save", "summarize"]

SCHEMA = 1
"""Raised when a field changes its meaning; files of another schema are not read."""


class Run(msgspec.Struct, frozen=True):
    """What all results of one run share."""

    date: str
    """When it began, UTC."""
    commit: str
    machine: Machine
    versions: dict[str, str]
    quick: bool = False

    @staticmethod
    def now(commit: str, machine: Machine, versions: dict[str, str], *, quick: bool) -> Run:
        """A run that begins at this moment."""
        date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return Run(date, commit, machine, versions, quick)


class VariantResult(msgspec.Struct, frozen=True):
    """The rates of one variant."""

    unit: str
    median: float
    samples: list[float]
    """Units per second, by round."""
    shares: list[list[float]] = []
    """By round and process, where several shared the work."""
    cpu_us: float | None = None
    """Microseconds of processor time per unit, the median of the rounds; None where nobody looked."""


class FigureResult(msgspec.Struct, frozen=True):
    """One ratio over the rounds."""

    name: str
    of: str
    against: str
    measure: Measure
    median: float
    lowest: float
    highest: float
    samples: list[float]
    target: float | None = None
    target_is_most: bool = False
    met: bool | None = None
    """By the median. None without a target."""

    def bound(self) -> Target | None:
        """The target as it was when this was measured."""
        return None if self.target is None else Target(self.target, self.target_is_most)


class BenchmarkResult(msgspec.Struct, frozen=True):
    """Everything one benchmark measured."""

    benchmark: str
    claim: str
    run: Run
    rounds: int
    seconds: float
    load: list[float]
    """Load averages of the last minute before and after: how much else went on."""
    variants: dict[str, VariantResult]
    figures: list[FigureResult]
    schema: int = SCHEMA


def summarize(
    benchmark: Benchmark,
    run: Run,
    plan: Plan,
    variants: Variants,
    rounds: Sequence[dict[str, Sample]],
    load: Sequence[float],
) -> BenchmarkResult:
    """Medians and bounds of all rounds."""
    return BenchmarkResult(
        benchmark=benchmark.name,
        claim=benchmark.claim,
        run=run,
        rounds=plan.rounds,
        seconds=plan.seconds,
        load=[round(value, 2) for value in load],
        variants={
            name: _variant(variant.unit, [samples[name] for samples in rounds])
            for name, variant in variants.items()
        },
        figures=[_figure(figure, rounds) for figure in benchmark.figures],
    )


def _variant(unit: str, samples: list[Sample]) -> VariantResult:
    rates = [_short(sample.rate) for sample in samples]
    shares = [[_short(share) for share in sample.shares] for sample in samples if sample.shares]
    spent = [sample.cpu_us for sample in samples if sample.cpu_us is not None]
    cpu_us = _short(statistics.median(spent)) if spent else None
    return VariantResult(unit, statistics.median(rates), rates, shares, cpu_us)


def _figure(figure: Figure, rounds: Sequence[dict[str, Sample]]) -> FigureResult:
    values = [_short(figure.value(samples)) for samples in rounds]
    median, target = statistics.median(values), figure.target
    return FigureResult(
        name=figure.name,
        of=figure.of,
        against=figure.against,
        measure=figure.measure,
        median=median,
        lowest=min(values),
        highest=max(values),
        samples=values,
        target=None if target is None else target.bound,
        target_is_most=target is not None and target.is_most,
        met=None if target is None else target.is_met(median),
    )


def _short(value: float) -> float:
    """Six digits are more than any measurement here holds."""
    return float(f"{value:.6g}")


def save(folder: Path, result: BenchmarkResult) -> Path:
    """Write `<benchmark>.json` into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.benchmark}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    return path


def load(folder: Path) -> list[BenchmarkResult]:
    """All results of a folder that are of this schema, by name."""
    found = []
    for path in sorted(folder.glob("*.json")):
        content = path.read_bytes()
        if msgspec.json.decode(content).get("schema") == SCHEMA:
            found.append(msgspec.json.decode(content, type=BenchmarkResult))
    return found
