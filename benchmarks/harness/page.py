"""The tables on the documentation page, between two markers: numbers there are never typed by hand."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.results import BenchmarkResult
from benchmarks.harness.wording import cpu_of, rates_of, target_of, value_of, verdict_of

__all__ = ["BEGIN", "END", "markdown", "renew"]

BEGIN = "<!-- measured: begin -->"
END = "<!-- measured: end -->"
NOTHING = "Nothing was measured yet.\n"


def renew(page: str, machines: Sequence[Sequence[BenchmarkResult]]) -> str:
    """The page with what is between its markers replaced by a table for each machine. Raises `ValueError`
    where it has no markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} and {END}")
    tables = "\n".join(markdown(results) for results in machines if results)
    return f"{before}{BEGIN}\n{tables or NOTHING}{END}{after}"


def markdown(results: Sequence[BenchmarkResult]) -> str:
    """Facts of the runs on one machine and one table of all figures."""
    run = results[0].run
    machine = run.machine
    loads = [load for result in results for load in result.load]
    lines = [
        f"### {machine.cpus} x {machine.cpu}",
        "",
        f"{machine.memory_gib:g} GiB, {machine.system} {machine.release}, {machine.file_system}. "
        f"Python {run.versions.get('python', '?')}, {_when(results)}. "
        f"{results[0].rounds} rounds, {results[0].seconds:g} s or a multiple for each variant; "
        f"load average {min(loads):g} to {max(loads):g}.",
        "",
        f"![Figures against their targets](../benchmarks/results/{machine.slug}/chart.svg)",
        "",
        "| benchmark | figure | ratio [lowest-highest] | target | | rates | processor, us |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        for figure in result.figures:
            verdict = verdict_of(figure)
            cells = [
                result.benchmark,
                figure.name,
                value_of(figure),
                target_of(figure),
                f"**{verdict}**" if verdict == "missed" else verdict,
                rates_of(result, figure),
                cpu_of(result, figure),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _when(results: Sequence[BenchmarkResult]) -> str:
    """Commit and time of the run; of the first and the last where the table is made of several."""
    runs = sorted((result.run for result in results), key=lambda run: run.date)
    first, last = runs[0], runs[-1]
    if first.commit == last.commit:
        return f"commit `{last.commit}`, {last.date}"
    return f"commits `{first.commit}` of {first.date} to `{last.commit}` of {last.date}"
