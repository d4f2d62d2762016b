"""How numbers are written, the same in the terminal, on the page and in the chart."""

from __future__ import annotations

from benchmarks.harness.figure import Measure
from benchmarks.harness.results import BenchmarkResult, FigureResult

__all__ = ["cpu_of", "number", "rates_of", "target_of", "value_of", "verdict_of"]


def number(value: float) -> str:
    """Three digits, without powers of ten."""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def value_of(figure: FigureResult) -> str:
    """Median, lowest and highest."""
    return f"{number(figure.median)} [{number(figure.lowest)}-{number(figure.highest)}]"


def target_of(figure: FigureResult) -> str:
    """The bound, or a dash."""
    bound = figure.bound()
    return "-" if bound is None else str(bound)


def verdict_of(figure: FigureResult) -> str:
    """Met, missed, or a dash where nothing was promised."""
    if figure.met is None:
        return "-"
    return "met" if figure.met else "missed"


def cpu_of(result: BenchmarkResult, figure: FigureResult) -> str:
    """Microseconds of processor time per unit, ours and the other side's; a dash where nobody looked."""
    names = (figure.of, figure.against) if figure.against else (figure.of,)
    spent = [result.variants[name].cpu_us for name in names]
    if figure.measure is Measure.LEAST_SHARE or spent[0] is None:
        return "-"
    return " against ".join("?" if us is None else number(us) for us in spent)


def rates_of(result: BenchmarkResult, figure: FigureResult) -> str:
    """The raw rates beside the ratio."""
    of = result.variants[figure.of]
    if figure.measure is Measure.LEAST_SHARE:
        least = sorted(min(shares) for shares in of.shares)[len(of.shares) // 2] if of.shares else 0.0
        return f"least {number(least)} of {number(of.median)} {of.unit}"
    if not figure.against:
        return f"{number(of.median)} {of.unit}"
    against = result.variants[figure.against]
    same = of.unit == against.unit
    return (
        f"{number(of.median)}{'' if same else ' ' + of.unit} against {number(against.median)} {against.unit}"
    )
