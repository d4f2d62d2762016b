"""The command: choose, measure, print, keep.

A miss is not an error: figures are for reading, and the exit code stays 0. It is 1 where a benchmark itself
broke, and 2 for wrong usage. What this machine cannot measure is skipped with its reason.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.figures import suite as all_benchmarks
from benchmarks.harness.chart import draw
from benchmarks.harness.machine import git_commit, this_machine, versions
from benchmarks.harness.page import renew
from benchmarks.harness.results import BenchmarkResult, Run, load, save, summarize
from benchmarks.harness.rounds import FULL, QUICK, Plan, measure
from benchmarks.harness.suite import Bench, Benchmark, CannotMeasure, Suite
from benchmarks.harness.table import print_results

__all__ = ["Outcome", "main", "run_benchmarks"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
DIRECTORY = ROOT / ".cache" / "benchmarks"
"""Where the disk is measured unless told otherwise: beside the source, since a temporary directory may be in
memory, where fsync costs nothing."""
TABLE_WIDTH_MIN = 130


@dataclass(slots=True)
class Outcome:
    """What became of the benchmarks of one run."""

    results: list[BenchmarkResult] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Why, by name."""
    broken: dict[str, str] = field(default_factory=dict)
    """The traceback, by name."""


def main(arguments: Sequence[str] | None = None, suite: Suite = all_benchmarks) -> int:
    """Run the command; its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        chosen = suite.select(options.names)
    except KeyError as error:
        parser.error(f"there is no benchmark {error}; --list shows what there is")
    console = Console()
    if console.width < TABLE_WIDTH_MIN and not console.is_terminal:
        console = Console(width=TABLE_WIDTH_MIN)
    if options.list:
        return _list(console, chosen)
    options.directory.mkdir(parents=True, exist_ok=True)
    machine = this_machine(options.directory)
    folder = options.results / machine.slug
    if options.page:
        machines = [_keep([], each, suite) for each in options.results.iterdir() if each.is_dir()]
        machines.sort(key=lambda kept: max((result.run.date for result in kept), default=""), reverse=True)
        PAGE.write_text(renew(PAGE.read_text(), machines))
        return 0
    run = Run.now(git_commit(ROOT), machine, versions(), quick=options.quick)
    plan = QUICK if options.quick else FULL
    folder = folder / "quick" if options.quick else folder
    outcome = run_benchmarks(chosen, run, plan, options.directory)
    _keep(outcome.results, folder, suite)
    if options.output == "json":
        print(_document(outcome))
    else:
        _print(console, outcome, folder)
    return 1 if outcome.broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Ratios measured in one run, against targets."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which benchmarks; all without a name")
    parser.add_argument(
        "--quick", action="store_true", help="few and short rounds; kept apart from full runs"
    )
    parser.add_argument("--list", action="store_true", help="show what there is and measure nothing")
    parser.add_argument(
        "--page", action="store_true", help="only renew the page and the charts from kept results"
    )
    parser.add_argument("--output", choices=("text", "json"), default="text", help="a table or one document")
    parser.add_argument(
        "--directory", type=Path, default=DIRECTORY, help="where the disk is measured; must be on a real disk"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are kept")
    return parser


def _list(console: Console, benchmarks: Sequence[Benchmark]) -> int:
    for benchmark in benchmarks:
        console.print(f"[bold]{benchmark.name}[/bold]  {benchmark.claim}", highlight=False)
        for figure in benchmark.figures:
            target = "" if figure.target is None else f"  {figure.target}"
            console.print(f"    {figure.name}{target}", highlight=False, style="dim")
    return 0


def run_benchmarks(benchmarks: Sequence[Benchmark], run: Run, plan: Plan, directory: Path) -> Outcome:
    """Measure one after the other; one that cannot be measured or breaks does not stop the rest."""
    outcome = Outcome()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for benchmark in benchmarks:
            task = progress.add_task(benchmark.name, total=None)
            try:
                outcome.results.append(_measure(benchmark, run, plan, directory, progress))
            except CannotMeasure as error:
                outcome.skipped[benchmark.name] = str(error)
            except Exception:
                outcome.broken[benchmark.name] = traceback.format_exc()
            progress.remove_task(task)
    return outcome


def _measure(
    benchmark: Benchmark, run: Run, plan: Plan, directory: Path, progress: Progress
) -> BenchmarkResult:
    load_before = os.getloadavg()[0]
    plan = plan.of_jobs() if benchmark.jobs else plan
    task = progress.task_ids[-1]

    def say(message: str) -> None:
        progress.update(task, description=f"{benchmark.name}: {message}")

    with (
        tempfile.TemporaryDirectory(prefix=f"{benchmark.name}-", dir=directory) as place,
        benchmark.variants(Bench(Path(place), say, run.quick)) as variants,
    ):
        progress.update(task, description=benchmark.name, total=plan.rounds * plan.slices * len(variants))
        rounds = measure(variants, plan, lambda: progress.advance(task))
        return summarize(benchmark, run, plan, variants, rounds, (load_before, os.getloadavg()[0]))


def _keep(results: Sequence[BenchmarkResult], folder: Path, suite: Suite) -> list[BenchmarkResult]:
    """Save these results; draw and return all that the folder holds, in the order of the suite."""
    for result in results:
        save(folder, result)
    names = [benchmark.name for benchmark in suite]
    kept = [result for result in load(folder) if result.benchmark in names]
    kept.sort(key=lambda result: names.index(result.benchmark))
    if kept:
        (folder / "chart.svg").write_text(draw(kept))
    return kept


def _document(outcome: Outcome) -> str:
    return msgspec.json.format(msgspec.json.encode(outcome)).decode()


def _print(console: Console, outcome: Outcome, folder: Path) -> None:
    print_results(console, outcome.results)
    for name, reason in outcome.skipped.items():
        console.print(f"  skipped {name}: {reason}", style="yellow", highlight=False)
    for name, trace in outcome.broken.items():
        console.print(f"  broken  {name}:", style="bold red", highlight=False)
        console.print(trace, markup=False, highlight=False)
    if outcome.results:
        console.print(f"Kept in {os.path.relpath(folder)}, with a chart.", highlight=False)
