"""The table of a run, in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.harness.bars import terminal_bar
from benchmarks.harness.results import BenchmarkResult
from benchmarks.harness.wording import cpu_of, rates_of, target_of, value_of, verdict_of

__all__ = ["print_results"]

_STYLES = {"met": "green", "missed": "bold red", "-": "dim"}


def print_results(console: Console, results: Sequence[BenchmarkResult]) -> None:
    """One table per benchmark, then the misses in one line."""
    for result in results:
        console.print()
        console.print(f"[bold]{result.benchmark}[/bold]  {result.claim}")
        console.print(_table(result))
    held = [figure for result in results for figure in result.figures if figure.met is not None]
    missed = [
        f"{result.benchmark}: {figure.name}"
        for result in results
        for figure in result.figures
        if figure.met is False
    ]
    console.print()
    console.print(f"{len(held) - len(missed)} of {len(held)} targets met.", highlight=False)
    for name in missed:
        console.print(f"  missed  {name}", style="red", highlight=False)


def _table(result: BenchmarkResult) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("figure", min_width=28)
    table.add_column("ratio [lowest-highest]", justify="right", no_wrap=True)
    table.add_column("target", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("worse │ better", no_wrap=True)
    table.add_column("rates", style="dim")
    table.add_column("cpu us", style="dim")
    for figure in result.figures:
        verdict = verdict_of(figure)
        style = _STYLES[verdict]
        table.add_row(
            figure.name,
            value_of(figure),
            target_of(figure),
            f"[{style}]{verdict}[/{style}]",
            f"[{style}]{terminal_bar(figure)}[/{style}]",
            rates_of(result, figure),
            cpu_of(result, figure),
        )
    return table
