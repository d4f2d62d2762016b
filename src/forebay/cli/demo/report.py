"""The report of the demo: one HTML file with nothing outside of it, charts as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from forebay.cli.demo.steps import Done, Stage

__all__ = ["draw"]

WIDTH = 640
BAR = 22
_STYLE = """
:root { color-scheme: light dark;
  --ink: #1d2733; --soft: #66758a; --line: #d5dce5; --bar: #2f7f79; --page: #fff }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4eaf1; --soft: #93a1b3; --line: #33404f; --bar: #5db5ae; --page: #131a22 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 46rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1.5rem; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--line) }
.n { text-align: right } .soft { color: var(--soft) } .verdict { font-size: 1.2rem; font-weight: 600 }
svg { width: 100%; height: auto } svg text { fill: var(--ink); font: 13px system-ui, sans-serif }
"""


def draw(stage: Stage, done: Sequence[Done], ok: bool) -> str:
    """The whole page."""
    verdict = "Every record arrived exactly once." if ok else "SOMETHING IS MISSING OR WRONG."
    seconds = sum(each.seconds for each in done)
    answers = next(iter(stage.answers.values()), {})
    parts = [
        f"<h1>Forebay demo</h1><p class=verdict>{verdict}</p>",
        f"<p class=soft>{stage.records:,} events, pipeline on {escape(stage.mode)}, {seconds:.1f} s.</p>",
        *(f"<p>Left out: {escape(each)}</p>" for each in stage.left_out),
        "<h2>Steps</h2>",
        _table(["step", "records", "seconds", "what happened"], [_step_row(each) for each in done], {1, 2}),
        bars("Seconds per step", [(each.name, each.seconds) for each in done], "{:.1f}"),
        "<h2>Proof</h2>",
        _table(_PROOF, [_proof_row(each) for each in stage.proofs], set(range(1, len(_PROOF)))),
        "<h2>Answers</h2>",
        *_answer_parts(answers),
        f"<p class=soft>Asked: {escape(', '.join(stage.answers))}.</p>" if stage.answers else "",
    ]
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Forebay demo</title>"
        f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style>"
        + "\n".join(parts)
        + "</html>\n"
    )


_PROOF = ["topic", "sent", "rows", "dead letters", "late", "missing", "doubled", "changed"]


def _step_row(done: Done) -> list[str]:
    return [done.name, f"{done.outcome.records:,}", f"{done.seconds:.1f}", done.outcome.detail]


def _proof_row(proof: Any) -> list[str]:
    numbers = (
        proof.sent,
        proof.rows,
        proof.dead_letters,
        proof.late,
        proof.missing,
        proof.doubled,
        proof.changed,
    )
    return [proof.topic, *(f"{number:,}" for number in numbers)]


def _answer_parts(answers: dict[str, list[list[Any]]]) -> list[str]:
    parts = []
    for name, rows in answers.items():
        if rows and len(rows[0]) > 1:
            parts.append(bars(name, [(str(row[0]), float(row[-1])) for row in rows], "{:,.0f}"))
        elif rows:
            parts.append(f"<p>{escape(name)}: {rows[0][0]:,}</p>")
    return parts


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: set[int]) -> str:
    def cell(kind: str, number: int, text: str) -> str:
        mark = " class=n" if number in right else ""
        return f"<{kind}{mark}>{escape(text)}</{kind}>"

    head = "".join(cell("th", number, text) for number, text in enumerate(columns))
    body = "".join(
        "<tr>" + "".join(cell("td", number, text) for number, text in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def bars(title: str, values: Sequence[tuple[str, float]], form: str) -> str:
    """A bar chart, one bar per line."""
    most = max([value for _, value in values], default=0) or 1
    lines = []
    for number, (name, value) in enumerate(values):
        top = 24 + number * (BAR + 6)
        length = max((WIDTH - 260) * value / most, 1)
        lines.append(
            f"<text x=0 y={top + 16}>{escape(name)}</text>"
            f"<rect x=140 y={top} width={length:.1f} height={BAR} rx=3 fill='var(--bar)'></rect>"
            f"<text x={148 + length:.1f} y={top + 16}>{escape(form.format(value))}</text>"
        )
    height = 30 + len(values) * (BAR + 6)
    label = escape(title, quote=True)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role=img aria-label="{label}">'
        f"<text x=0 y=14 font-weight=600>{label}</text>{''.join(lines)}</svg>"
    )
