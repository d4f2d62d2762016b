"""Where a figure lies against its target, on an axis for the eye: the geometry of terminal bars and chart.

The axis counts how many times better than asked a figure is, in powers of two: the line in the middle is the
target, each step to the right is twice as good, each to the left half as good. Bars start at the line, so a
miss points the other way and cannot be overlooked, and 0.5 looks as bad as 2 looks good. Where nothing was
promised the line is the variant it is compared with.
"""

from __future__ import annotations

import math

from benchmarks.harness.figure import Measure, Target
from benchmarks.harness.results import FigureResult

__all__ = ["STEPS", "Span", "span_of", "terminal_bar"]

STEPS = 4
"""Doublings shown on each side of the line; what lies beyond is cut off there."""
_CELLS = 6
"""Characters of a terminal bar on each side of the line."""

Span = tuple[float, float, float]
"""Lowest, median and highest position, from -1 (left end) over 0 (the line) to 1 (right end)."""


def span_of(figure: FigureResult) -> Span:
    """Positions on the axis; all on the line where there is nothing to compare with."""
    if figure.measure is Measure.PLAIN and figure.target is None:
        return 0.0, 0.0, 0.0
    target = figure.bound() or Target(1.0, is_most=figure.measure in (Measure.TIME, Measure.CPU))
    lowest, median, highest = (
        _position(target.margin(value)) for value in (figure.lowest, figure.median, figure.highest)
    )
    return (highest, median, lowest) if target.is_most else (lowest, median, highest)


def _position(margin: float) -> float:
    if margin <= 0:
        return -1.0
    return max(-1.0, min(1.0, math.log2(margin) / STEPS))


def terminal_bar(figure: FigureResult) -> str:
    """A bar of characters with the line in the middle."""
    _, median, _ = span_of(figure)
    cells = round(abs(median) * _CELLS)
    bar = "━" * cells
    return f"{'':{_CELLS}}│{bar:{_CELLS}}" if median >= 0 else f"{bar:>{_CELLS}}│{'':{_CELLS}}"
