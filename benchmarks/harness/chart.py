"""The chart: one SVG file without scripts, fonts or links, readable on light and on dark pages.

Rows of bars on the axis of `bars`: they start at the target line, to the right where a figure is better than
asked and to the left where it is worse, with a thin whisker from the lowest to the highest round. Written by
hand because a plotting library would be the largest dependency of the whole project.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from benchmarks.harness.bars import STEPS, span_of
from benchmarks.harness.results import BenchmarkResult, FigureResult
from benchmarks.harness.wording import target_of, value_of, verdict_of

__all__ = ["draw"]

WIDTH = 940
ROW = 20
HEADING = 30
TOP = 64
LABEL_RIGHT = 330
AXIS_MIDDLE = 510
AXIS_HALF = 160
VALUE_LEFT = 690
_CLASSES = {"met": "met", "missed": "missed", "-": "plain"}
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f; }
.title { font-size: 15px; font-weight: 600; }
.heading { font-weight: 600; }
.faint { fill: #6e7781; font-size: 11px; }
.line { stroke: #24292f; stroke-width: 1.5; }
.grid { stroke: #d0d7de; stroke-width: 1; }
.whisker { stroke: #57606a; stroke-width: 1; }
.met { fill: #2da44e; } .missed { fill: #cf222e; } .plain { fill: #8c959f; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .faint { fill: #8d96a0; } .line { stroke: #e6edf3; } .grid { stroke: #30363d; }
  .whisker { stroke: #9198a1; } .met { fill: #3fb950; } .missed { fill: #f85149; } .plain { fill: #6e7681; }
}
"""


def draw(results: Sequence[BenchmarkResult]) -> str:
    """The whole file."""
    rows: list[str] = []
    y = TOP
    for result in results:
        y += HEADING - ROW
        rows.append(_text(12, y + ROW - 6, result.benchmark, "heading"))
        y += ROW
        for figure in result.figures:
            rows.extend(_row(figure, y))
            y += ROW
    height = y + 16
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Figures against their targets">'
    )
    return "\n".join([head, f"<style>{_STYLE}</style>", *_frame(results, y), *rows, "</svg>", ""])


def _frame(results: Sequence[BenchmarkResult], bottom: float) -> list[str]:
    parts = [_text(12, 22, "Figures against their targets", "title")]
    if results:
        machine = results[0].run.machine
        facts = f"{machine.cpus} x {machine.cpu}, {machine.file_system}, {results[0].run.date[:10]}"
        parts.append(_text(12, 40, facts, "faint"))
    for step in range(-STEPS, STEPS + 1, 2):
        x = AXIS_MIDDLE + step / STEPS * AXIS_HALF
        kind = "line" if step == 0 else "grid"
        label = "target" if step == 0 else f"x{2**step:g}"
        parts.append(f'<line class="{kind}" x1="{x:g}" y1="{TOP - 6}" x2="{x:g}" y2="{bottom:g}"/>')
        parts.append(_text(x, TOP - 12, label, "faint", anchor="middle"))
    return parts


def _row(figure: FigureResult, y: float) -> list[str]:
    lowest, median, highest = (AXIS_MIDDLE + position * AXIS_HALF for position in span_of(figure))
    left, width = min(median, AXIS_MIDDLE), max(abs(median - AXIS_MIDDLE), 1)
    middle, text = y + ROW / 2, y + ROW / 2 + 4
    target = "" if figure.target is None else f"  (target {target_of(figure)})"
    bar = f'<rect class="{_CLASSES[verdict_of(figure)]}" x="{left:.1f}" y="{y + 4:g}" width="{width:.1f}"'
    return [
        _text(LABEL_RIGHT, text, figure.name, anchor="end"),
        f'{bar} height="{ROW - 8}" rx="2"/>',
        f'<line class="whisker" x1="{lowest:.1f}" y1="{middle:g}" x2="{highest:.1f}" y2="{middle:g}"/>',
        _text(VALUE_LEFT, text, f"{value_of(figure)}{target}", "faint"),
    ]


def _text(x: float, y: float, content: str, kind: str = "", *, anchor: str = "start") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(content)}</text>'
